from __future__ import annotations

from typing import Any

import pytest

from asyncllm.engine.plan import CacheGroup
from asyncllm.errors import ConfigError
from tests.engine.scheduling.specs import FULL, make_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_batched_tokens": 0}, "max_batched_tokens"),
        ({"mixed_chunk_tokens": 0}, "mixed_chunk_tokens"),
        ({"full_step_tokens": 0}, "full_step_tokens"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"block_size": 1}, "block_size"),
        ({"run_ahead": -1}, "run_ahead"),
        ({"ageing_seconds": 0.0}, "ageing_seconds"),
        ({"ageing_seconds": float("nan")}, "ageing_seconds"),
        ({"groups": ()}, "groups"),
        ({"groups": (CacheGroup(0),)}, "groups"),
        ({"groups": (FULL, CacheGroup(4), FULL), "num_blocks": 2}, "needs 3"),
    ],
)
def test_impossible_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


@pytest.mark.parametrize(
    ("changes", "capacity"),
    [
        ({"num_blocks": 8, "max_model_len": 512}, 32),
        ({"num_blocks": 8, "max_model_len": 30}, 30),
        ({"num_blocks": 9, "groups": (FULL, FULL), "max_model_len": 512}, 16),
        ({"num_blocks": 2, "groups": (CacheGroup(4),), "max_model_len": 512}, 512),  # a window never needs more
        ({"num_blocks": 1, "groups": (CacheGroup(4),), "max_model_len": 512}, 4),
        ({"num_blocks": 8, "groups": (FULL, CacheGroup(4)), "max_model_len": 512}, 24),
    ],
)
def test_capacity(changes: dict[str, Any], capacity: int) -> None:
    assert make_config(**changes).capacity == capacity
