"""Short ways to write requests and configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncllm.engine.plan import CacheGroup, RowSampling
from asyncllm.engine.scheduling.request import Request, RequestSpec
from asyncllm.engine.scheduling.scheduler import SchedulerConfig

FULL = CacheGroup()
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def make_spec(request: int = 0, tokens: Sequence[int] = (1, 2, 3), **changes: Any) -> RequestSpec:
    fields: dict[str, Any] = {
        "sampling": GREEDY,
        "max_tokens": 8,
        "min_tokens": 0,
        "stop_token_ids": frozenset(),
        "arrival": 0.0,
        **changes,
    }
    return RequestSpec(request=request, token_ids=np.array(tokens, dtype=np.int32), **fields)


def make_request(tokens: Sequence[int] = (1, 2, 3), groups: int = 1, **changes: Any) -> Request:
    spec = make_spec(tokens=tokens, **changes)
    return Request(spec, spec.order(10.0), len(tokens) + spec.max_tokens, groups)


def make_config(**changes: Any) -> SchedulerConfig:
    fields: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_batched_tokens": 64,
        "mixed_chunk_tokens": 64,
        "full_step_tokens": 64,
        "block_size": 4,
        "num_blocks": 32,
        "groups": (FULL,),
        "max_model_len": 64,
        "run_ahead": 1,
        **changes,
    }
    return SchedulerConfig(**fields)
