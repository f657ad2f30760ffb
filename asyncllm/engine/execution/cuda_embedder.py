"""Embeddings on the GPU: the last token's features of a text, computed beside the steps.

As on the CPU (`cpu_embedder`), a text has a cache of its own for as long as it takes, so neither the scheduler nor the
pool knows of it. It is computed in chunks, launched by hand, and steps run between them. The cache is memory that no
graph uses; it stays reserved, for the next text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.execution.cuda_device import CudaSpace
from asyncllm.engine.execution.kv_cache import allocate_device_cache
from asyncllm.engine.execution.step_program import StepProgram, TextChunk
from asyncllm.engine.execution.step_ring import host_words
from asyncllm.engine.plan import Float32Array, Int32Array
from asyncllm.errors import InsufficientMemoryError
from asyncllm.kernels.attention_plan import Sequences
from asyncllm.kernels.language import next_power_of_2

CHUNK = 1024
"""Tokens that are computed at once, at most: others wait for so long."""


class DeviceText:
    """One text on its way through the model. Launches and frees on one thread; see `close`."""

    def __init__(  # noqa: PLR0913 (what it works on, and the sizes that steps have)
        self,
        space: CudaSpace,
        program: StepProgram,
        dtype: torch.dtype,
        token_ids: Int32Array,
        *,
        sizes: Sequence[int],
        row_blocks: int,
    ) -> None:
        """`dtype`: the cache's; `sizes`: of the steps' graphs, ascending, whose kernels are compiled; `row_blocks`: of
        a row's block table. Raises `InsufficientMemoryError` where there is no room for the text's cache."""
        layout = program.layout
        groups, blocks = len(layout.groups), -(-len(token_ids) // layout.block_size)
        self._space = space
        self._program = program
        self._ids = token_ids
        self._sizes = [size for size in sizes if size <= max(CHUNK, sizes[0])]
        self._done = 0
        self._kept: list[Tensor] = []  # what launches read
        tables = np.zeros((groups, 1, row_blocks), np.int32)
        # a block belongs to one group, so each has numbers of its own
        tables[:, 0, :blocks] = 1 + np.arange(groups * blocks, dtype=np.int32).reshape(groups, blocks)
        with space.lasting():
            try:
                # sizes that repeat, so that one text's memory is of use to the next
                cache = allocate_device_cache(layout, next_power_of_2(groups * blocks), dtype, space.device)
            except torch.OutOfMemoryError as error:
                raise InsufficientMemoryError(
                    f"the cache of a text of {len(token_ids)} tokens does not fit beside the engine's: {error}"
                ) from None
            self._cache: Tensor | None = cache
            self._tables: Tensor | None = self._put(tables)
            self._features: Tensor | None = None

    def launch(self) -> bool:
        """Launch the next chunk; says whether it was the last one. Raises `InsufficientMemoryError`."""
        try:
            return self._launch()
        except torch.OutOfMemoryError as error:
            raise InsufficientMemoryError(f"a text's chunk does not fit beside the engine's steps: {error}") from None

    def _launch(self) -> bool:
        assert self._cache is not None
        assert self._tables is not None
        start = self._done
        count = min(self._sizes[-1], len(self._ids) - start)
        size = self._sizes[bisect_left(self._sizes, count)]
        ids, positions = np.zeros((2, size), np.int32)  # what fills it up is token 0 at position 0, and not computed
        ids[:count] = self._ids[start : start + count]
        positions[:count] = np.arange(start, start + count)
        most = self._program.max_sequences  # kernels look at the entries of so many, and find one
        with self._space.entered():
            chunk = TextChunk(
                token_ids=self._put(ids),
                positions=self._put(positions),
                rows=self._put(np.zeros(size, np.int32)),
                lengths=self._put(np.maximum(positions + 1, len(self._ids))),
                num_tokens=self._words(count),
                last=self._words(count - 1),
                sequences=Sequences(
                    query_starts=self._words(0, count, room=most + 1),
                    context_lens=self._words(start + count, room=most),
                    rows=self._words(0, room=most),
                    num_sequences=self._words(1),
                ),
                tables=self._tables,
                cache=self._cache,
            )
            vector = self._program.text_features(chunk)[0].float()
            self._done += count
            if self._done < len(self._ids):
                return False
            vector = vector / vector.norm().clamp_min(1e-12)
            self._features = torch.empty(vector.shape, pin_memory=vector.device.type == "cuda")
            self._features.copy_(vector, non_blocking=True)
        return True

    def read(self) -> Float32Array:
        """The features [hidden] of the last token, of length 1, once all launches are complete."""
        assert self._features is not None
        found: Float32Array = self._features.numpy().copy()
        return found

    def close(self) -> None:
        """Give the memory back, complete or not: what takes it next does so later on the same stream."""
        self._cache = self._tables = self._features = None
        self._kept.clear()

    def _words(self, *words: int, room: int = 1) -> Tensor:
        line = np.zeros(room, np.int32)
        line[: len(words)] = words
        return self._put(line)

    def _put(self, array: Int32Array) -> Tensor:
        """On its way to the device."""
        words = host_words(array, self._space.device)
        self._kept.append(words)
        return words.to(self._space.device, non_blocking=True)
