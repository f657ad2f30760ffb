"""Where host and device meet: a line per launched step, in memory of the host that the device can read and write.

A line belongs to its step until that is complete. The host writes a step's words before it launches it, the device
reads them when it comes to it (`kernels/step_layout.py`), and leaves the sampled tokens in the line of `tokens`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.plan import Int32Array, StepPlan
from asyncllm.kernels.step_layout import StepWords


def host_words(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of `array` where the device can read it: in pinned memory, for a GPU."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    copy = torch.empty(array.shape, dtype=dtype, pin_memory=device.type == "cuda")
    copy.numpy()[...] = array
    return copy


class StepRing:
    """Lines 0 to `steps` - 1, written in turn."""

    def __init__(self, layout: StepWords, steps: int, device: torch.device) -> None:
        self.layout = layout
        self.words = host_words(np.zeros((steps, layout.size), np.int32), device)
        self.tokens = host_words(np.zeros((steps, layout.rows), np.int32), device)
        self.late_tokens = host_words(np.zeros((steps, layout.rows), np.int32), device)
        self._lines = list(self.words.numpy())
        self._results = list(self.tokens.numpy())
        self._decode_rows: list[Int32Array | None] = [None] * steps  # what each line holds already

    def write(
        self, turn: int, plan: StepPlan, entries: Int32Array, joins: Int32Array, *, size: tuple[int, int]
    ) -> None:
        """Describe a step. `entries`: of the block tables seen as one line, those that the first edits are for; `joins`
        [n, RECORD_WORDS]: the records of requests that take rows; `size`: how many tokens and samples its launches are
        made for."""
        layout, line, decode = self.layout, self._lines[turn], plan.decode_rows
        chunks, edits, decoding = plan.chunks, len(entries), len(decode)
        if self._decode_rows[turn] is not decode:
            line[layout.decode_rows : layout.decode_rows + decoding] = decode
            self._decode_rows[turn] = decode
        if plan.late is not None:  # on the device they are decoding rows like any others
            late = plan.late.rows[: plan.late.decoding]
            self._put(turn, layout.decode_rows + decoding, late)
            decoding += len(late)
        tokens = sampled = decoding
        if chunks:
            counts = [len(chunk.token_ids) for chunk in chunks]
            samples = np.array([chunk.samples or chunk.keeps for chunk in chunks], np.int32)
            firsts = np.cumsum([decoding, *counts])
            self._put(turn, layout.chunk_rows, [chunk.row for chunk in chunks])
            self._put(turn, layout.chunk_starts, [chunk.start for chunk in chunks])
            self._put(turn, layout.chunk_samples, samples)
            self._put(turn, layout.chunk_places, decoding + np.cumsum(samples) - samples)
            self._put(turn, layout.chunk_firsts, firsts)
            tokens, sampled = int(firsts[-1]), decoding + int(samples.sum())
            self._put(turn, layout.chunk_tokens, np.concatenate([chunk.token_ids for chunk in chunks]))
        if edits:
            self._put(turn, layout.edit_entries, entries)
            self._put(turn, layout.edit_blocks, plan.tables.blocks[:edits])
        if len(joins):
            self._put(turn, layout.joins, joins.reshape(-1))
        line[:8] = (decoding, len(chunks), tokens, sampled, edits, *size, len(joins))

    def read(self, turn: int, count: int) -> Int32Array:
        """A copy of the tokens that a complete step sampled."""
        result: Int32Array = self._results[turn][:count].copy()
        return result

    def read_late(self, turn: int, count: int) -> Int32Array:
        """A copy of the tokens that a complete step's late samples are."""
        result: Int32Array = self.late_tokens[turn, :count].numpy().copy()
        return result

    def _put(self, turn: int, offset: int, values: NDArray[Any] | list[int]) -> None:
        self._lines[turn][offset : offset + len(values)] = values
