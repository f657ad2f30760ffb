"""Makes a `ForwardBatch` of a plan and the rows' state, for layers that are one kernel (`layers/kernel_decoder.py`)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.execution.kv_cache import CacheLayout
from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.step_batch import BatchBuilder, StepTokens
from asyncllm.layers.kernel_decoder import KernelBatch, TableBatch
from asyncllm.models.forward_batch import ForwardBatch
from asyncllm.models.llama import Llama


class Builder(Protocol):
    """Turns tokens into a batch."""

    def build(self, tokens: StepTokens, rows: RowState) -> ForwardBatch:
        """The batch of these tokens."""
        ...


class KernelBatchBuilder:
    """A `Builder` for the kernel, which looks itself up in the tables where a row keeps keys and values."""

    def __init__(self, layout: CacheLayout, cache: Tensor, *, needs_lengths: bool) -> None:
        self._windows = [group.window for group in layout.groups]
        self._caches = tuple(cache)
        self._needs_lengths = needs_lengths

    def build(self, tokens: StepTokens, rows: RowState) -> ForwardBatch:
        """See `Builder`; it points into the tables of `rows`."""
        lengths: Tensor | None = None
        if self._needs_lengths:
            lengths = torch.from_numpy(np.maximum(rows.prompt_tokens[tokens.rows], tokens.positions + 1))
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
                longest=int(tokens.positions.max()) + 1,
                # a chunk's row may have found blocks that other chunks of the step fill; what decodes has its own
                reads_new=len(tokens.chunk_firsts) > 0,
                groups=tuple(
                    TableBatch(torch.from_numpy(table), window)
                    for table, window in zip(rows.tables, self._windows, strict=True)
                ),
                caches=self._caches,
            ),
        )


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
