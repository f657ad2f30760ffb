"""A model without engine or scheduler: feeds one row by hand and returns the logits of every position."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.kv_cache import make_cache_layout
from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.step_batch import BatchBuilder, lay_out_tokens
from asyncllm.engine.plan import Chunk, RowJoin, RowSampling, StepPlan, TableEdits
from asyncllm.layers.parameter import Placement
from asyncllm.models.checkpoint import load_weights
from asyncllm.models.registry import find_architecture, read_model_config
from asyncllm.weights.source import resolve_source
from asyncllm.weights.tensors import iterate_tensors

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class SingleModel:
    """One row of a model that is loaded from a folder or GGUF file."""

    def __init__(self, path: Path, *, max_length: int = 128, block_size: int = 16, dtype=torch.float32) -> None:
        source = resolve_source(str(path), EngineConfig())
        self.config = read_model_config(source.config)
        self.layout = make_cache_layout(self.config.windows, self.config.num_kv_heads, self.config.head_dim, block_size)
        placement = Placement(dtype, torch.device("cpu"))
        self.model = find_architecture(source.config).model(self.config, self.layout.layers, max_length, placement)
        load_weights(self.model, iterate_tensors(source))
        self.row_blocks = -(-max_length // block_size)
        groups = len(self.layout.groups)
        self.cache = self.layout.allocate(groups * self.row_blocks, dtype)
        self.rows = RowState(1, groups, self.row_blocks, self.config.vocab_size)
        self.builder = BatchBuilder(self.layout, self.cache, needs_lengths=self.model.rotary.length_dependent)

    def start(self, prompt_tokens: int) -> None:
        """A new request takes the row and all blocks."""
        self.rows.join(RowJoin(0, 0, GREEDY, prompt_tokens))
        for group in range(len(self.layout.groups)):
            first = group * self.row_blocks + 1
            self.rows.tables[group, 0] = np.random.default_rng(group).permutation(self.row_blocks) + first

    def feed(self, start: int, token_ids: list[int]) -> Tensor:
        """Logits [n, vocabulary] of these tokens at positions from `start`."""
        chunk = Chunk(0, start, np.array(token_ids, np.int32), True)
        none = np.zeros(0, np.int32)
        plan = StepPlan(0, (), TableEdits(none, none, none, none), none.reshape(0, 2), (chunk,), none, False)
        tokens = replace(lay_out_tokens(plan, self.rows), sampled=np.arange(len(token_ids)))
        with torch.inference_mode():
            return self.model.forward(self.builder.build(tokens, self.rows)).clone()

    def logits(self, token_ids: list[int], cuts: tuple[int, ...] = (), prompt_tokens: int | None = None) -> Tensor:
        """Logits of all tokens, computed in chunks that end at `cuts`."""
        self.start(prompt_tokens or len(token_ids))
        bounds = [0, *cuts, len(token_ids)]
        return torch.cat([self.feed(a, token_ids[a:b]) for a, b in pairwise(bounds)])
