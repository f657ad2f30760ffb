"""Makes a `ForwardBatch` of a plan and the rows' state, for layers that are one kernel (`layers/kernel_decoder.py`)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.execution.kv_cache import CacheLayout
from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.step_batch import BatchBuilder, StepTokens
from asyncllm.engine.plan import Int32Array, StepPlan
from asyncllm.kernels.cpu.decoder import Draws
from asyncllm.kernels.cpu.further import Advance, FurtherSteps
from asyncllm.layers.kernel_decoder import KernelBatch, KernelDecoder, TableBatch
from asyncllm.models.forward_batch import ForwardBatch
from asyncllm.models.llama import Llama


class Builder(Protocol):
    """Turns tokens into a batch."""

    def build(self, tokens: StepTokens, rows: RowState, draws: Draws | None = None) -> ForwardBatch:
        """The batch of these tokens. `draws`: for a model that draws, see `Llama.draws_tokens`."""
        ...


class KernelBatchBuilder:
    """A `Builder` for the kernel, which looks itself up in the tables where a row keeps keys and values."""

    def __init__(self, layout: CacheLayout, cache: Tensor, *, needs_lengths: bool) -> None:
        self._windows = [group.window for group in layout.groups]
        self._caches = tuple(cache)
        self._needs_lengths = needs_lengths

    def build(self, tokens: StepTokens, rows: RowState, draws: Draws | None = None) -> ForwardBatch:
        """See `Builder`; it points into the arrays of `tokens`, and into the tables of `rows`."""
        lengths: Tensor | None = None
        if self._needs_lengths:
            lengths = tokens.lengths(rows)
        positions = torch.from_numpy(tokens.positions)
        starts = np.cumsum([tokens.singles, *(len(chunk.token_ids) for chunk in tokens.spans)])
        return ForwardBatch(
            token_ids=torch.from_numpy(tokens.ids),
            positions=positions,
            lengths=lengths,
            sampled=_places(tokens),
            attention=(),
            cache=(),
            layers=KernelBatch(
                rows=torch.from_numpy(tokens.rows),
                positions=positions,
                singles=tokens.singles,
                span_starts=torch.from_numpy(starts),
                # a chunk's row may have found blocks that other chunks of the step fill; what decodes has its own
                reads_new=len(tokens.chunk_firsts) > 0,
                groups=tuple(
                    TableBatch(torch.from_numpy(table), window)
                    for table, window in zip(rows.tables, self._windows, strict=True)
                ),
                caches=self._caches,
                draws=draws,
            ),
        )


class DecodeRun:
    """Steps that follow each other and compute one token of each of the same rows: one batch, whose numbers go on.

    In the order of positions, in which its tokens are, they stay. For rows whose tokens the kernel draws. What little
    is done between two of these steps counts: the interpreter's own code has left the processor's caches by then.
    """

    def __init__(
        self, decode_rows: Int32Array, sampled: Int32Array, tokens: StepTokens, batch: ForwardBatch, draws: Draws
    ) -> None:
        """The first of these steps: the rows that its plan names, and those that sample."""
        self.sampled = sampled.astype(np.intp)
        self.batch = batch
        self.token_ids: Int32Array = draws.token_ids.numpy()  # that the last step has drawn
        self._decode_rows = decode_rows
        self._tokens = tokens
        # of the batch's tokens: where in `token_ids` is what follows them
        self._order = tokens.sampled.argsort().astype(np.int64)

    def further(self, decoder: KernelDecoder, told: int) -> FurtherSteps:
        """The next of its steps, and those that are asked for in time: they advance by themselves. `told`: see
        `FurtherSteps`."""
        assert self.batch.layers is not None
        order = torch.from_numpy(self._order)
        advance = Advance(self.batch.token_ids, self.batch.layers.positions, order, len(self.sampled))
        return decoder.further(advance, told)

    def takes(self, plan: StepPlan) -> bool:
        """Whether the next step is one of them."""
        return plan.decode_rows is self._decode_rows and plan.only_decodes

    def advance(self, rows: RowState) -> None:
        """To the next step. `rows` are left as they were before the last one."""
        tokens, lengths = self._tokens, self.batch.lengths
        np.add(tokens.positions, 1, out=tokens.positions)
        tokens.ids[:] = self.token_ids[self._order]
        if lengths is not None:
            lengths.copy_(tokens.lengths(rows))

    def draw(self, model: Llama, further: FurtherSteps | None) -> None:
        """Compute the step, and `further` ones behind it."""
        assert self.batch.layers is not None
        self.batch.layers.further = further
        model.draw(self.batch)

    def logits(self, model: Llama) -> Tensor:
        """[s, vocabulary] float32 of a step that has drawn a token that is none: it is computed again."""
        assert self.batch.layers is not None
        self.batch.layers.further = None
        return model.forward(self.batch)

    def settle(self, rows: RowState) -> None:
        """Let the rows know what the last step has computed."""
        rows.position[self._tokens.rows] = self._tokens.positions + 1  # of equal rows the last, and largest, stays
        rows.last_token[self.sampled] = np.maximum(self.token_ids, 0)


def _places(tokens: StepTokens) -> Tensor | None:
    """Where the tokens are whose logits are needed; None where these are all of them, in their order."""
    sampled = tokens.sampled
    if len(sampled) == len(tokens.ids) and (sampled[1:] > sampled[:-1]).all():
        return None
    return torch.from_numpy(sampled)


def make_batch_builder(model: Llama, layout: CacheLayout, cache: Tensor) -> Builder:
    """What makes batches for this model's layers."""
    needs_lengths = model.rotary.length_dependent
    form = BatchBuilder if model.decoder is None else KernelBatchBuilder
    return form(layout, cache, needs_lengths=needs_lengths)
