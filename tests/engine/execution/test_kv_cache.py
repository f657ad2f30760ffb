from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.execution.kv_cache import copy_blocks, make_cache_layout
from asyncllm.engine.plan import CacheGroup


@given(st.lists(st.sampled_from([None, 8, 64]), min_size=1, max_size=70))
def test_every_layer_has_its_own_place(windows: list[int | None]) -> None:
    layout = make_cache_layout(windows, 2, 16, 16)
    assert len(set(layout.layers)) == len(windows)
    for window, place in zip(windows, layout.layers, strict=True):
        assert layout.groups[place.group] == CacheGroup(window)
        assert place.index < layout.layers_per_group
    assert len(layout.groups) <= 8
    sizes = Counter(place.group for place in layout.layers)
    assert max(sizes.values()) == layout.layers_per_group


@pytest.mark.parametrize(
    ("windows", "groups", "layers_per_group"),
    [
        ([None] * 30, (None,), 30),
        ([512] * 4, (512,), 4),
        ([None] * 21 + [4096] * 7, (None, None, None, 4096), 7),
        (([512] * 5 + [None]) * 5, (512, 512, 512, 512, 512, None), 5),
        ([None] * 27 + [4096], (None,) * 7 + (4096,), 4),
    ],
)
def test_layouts(windows: list[int | None], groups: tuple[int | None, ...], layers_per_group: int) -> None:
    layout = make_cache_layout(windows, 2, 16, 16)
    assert layout.groups == tuple(CacheGroup(window) for window in groups)
    assert layout.layers_per_group == layers_per_group


def test_sizes() -> None:
    layout = make_cache_layout([None, None, 40, 40], 2, 8, 16)
    assert layout.block_bytes(torch.float32) == 2 * 2 * 2 * 16 * 8 * 4
    cache = layout.allocate(10, torch.bfloat16)
    assert cache.shape == (2, 11, 16, 2, 2, 8)
    assert cache.dtype == torch.bfloat16
    assert cache.is_contiguous()
    assert cache.data_ptr() % 64 == 0
    assert (cache == 0).all()
    # 100 positions are 7 blocks of the full group; a window of 40 and two steps of 4 touch at most 4
    assert layout.request_blocks(100, 4) == 7 + 4
    assert layout.request_blocks(20, 4) == 2 + 2


def test_copies_read_before_they_write() -> None:
    cache = make_cache_layout([None] * 3, 2, 4, 8).allocate(6, torch.float32)
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.clone()
    copy_blocks(cache, np.array([[1, 2], [2, 3], [5, 6]], np.int32))
    for source, destination in ((1, 2), (2, 3), (5, 6), (1, 1), (4, 4), (5, 5), (0, 0)):
        assert torch.equal(cache[:, destination], before[:, source])
