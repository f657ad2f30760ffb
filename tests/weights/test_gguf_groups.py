from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from asyncllm.weights.gguf import dequantize
from asyncllm.weights.gguf_groups import group_bits, read_groups
from asyncllm.weights.grouped import GROUP, concatenate

BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q8_0": 8}
FLOATS = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}  # float16s that a block begins with; else one


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """Any bytes are codes, but for the scales, which must be finite."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    count = FLOATS.get(name, 1)
    scales = generator.normal(size=(rows, blocks, count)).astype(np.float16)
    data[:, :, : 2 * count] = scales.view(np.uint8).reshape(rows, blocks, -1)
    return data.reshape(rows, -1)


@pytest.mark.parametrize(("name", "bits"), BITS.items())
def test_groups_are_the_numbers_of_the_file(name: str, bits: int) -> None:
    packed = random_blocks(name, 7, 3)
    expected = dequantize(packed, name)
    groups = read_groups(torch.from_numpy(packed), name)
    assert groups.bits == bits == group_bits(name)
    assert groups.codes.dtype == torch.int8
    assert groups.shape == expected.shape
    assert groups.scales.shape == groups.zeros.shape == (7, expected.shape[1] // GROUP)
    np.testing.assert_allclose(groups.dequantize().numpy(), expected, rtol=1e-6, atol=1e-4)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert low <= int(groups.codes.min()) <= int(groups.codes.max()) <= high


def test_a_type_with_smaller_groups_has_none() -> None:
    assert group_bits("Q6_K") is None
    assert group_bits("F16") is None


def test_parts_below_each_other_are_as_wide_as_the_widest() -> None:
    parts = [read_groups(torch.from_numpy(random_blocks(name, 3, 2)), name) for name in ("Q4_1", "Q8_0")]
    both = concatenate(parts)
    assert both.bits == 8
    assert torch.equal(both.dequantize(), torch.cat([part.dequantize() for part in parts]))
