"""Embeddings on the CPU: the last token's features of a text, computed beside the steps.

A text has a small cache of its own for as long as it takes, so neither the scheduler nor the pool knows of it. It is
computed in chunks, and steps run between them.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncllm.engine.execution.kernel_batch import make_batch_builder
from asyncllm.engine.execution.kv_cache import CacheLayout
from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.step_batch import lay_out_tokens
from asyncllm.engine.plan import Chunk, Float32Array, Int32Array, StepPlan, TableEdits
from asyncllm.models.llama import Llama

CHUNK = 256
"""Tokens that are computed at once: others wait for so long."""

_NONE = np.zeros(0, np.int32)
_NO_EDITS = TableEdits(_NONE, _NONE, _NONE, _NONE)


class TextFeatures:
    """One text on its way through the model. Every call is made on the device's thread."""

    def __init__(self, model: Llama, layout: CacheLayout, dtype: torch.dtype, token_ids: Int32Array) -> None:
        groups, blocks = len(layout.groups), -(-len(token_ids) // layout.block_size)
        self._model = model
        self._ids = token_ids
        self._done = 0
        self._rows = RowState(1, groups, blocks, model.config.vocab_size)
        # A block belongs to one group, so each has numbers of its own.
        self._rows.tables[:, 0] = 1 + np.arange(groups * blocks).reshape(groups, blocks)
        self._rows.prompt_tokens[0] = len(token_ids)
        cache = layout.allocate(groups * blocks, dtype)
        self._builder = make_batch_builder(model, layout, cache)

    def advance(self) -> Float32Array | None:
        """Compute the next chunk. The features [hidden] of the last token, of length 1, once all is computed."""
        ids = self._ids[self._done : self._done + CHUNK]
        chunk = Chunk(0, self._done, ids, samples=True)
        plan = StepPlan(0, (), _NO_EDITS, np.zeros((0, 2), np.int32), (chunk,), _NONE, False)
        features = self._model.features(self._builder.build(lay_out_tokens(plan, self._rows), self._rows))
        self._done += len(ids)
        if self._done < len(self._ids):
            return None
        vector = features[-1].float()
        found: Float32Array = (vector / vector.norm().clamp_min(1e-12)).numpy()
        return found
