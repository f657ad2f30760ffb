from __future__ import annotations

import math

import pytest
import torch

from asyncllm.layers.parameter import Placement
from asyncllm.layers.rope import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    Rotation,
    YarnRope,
    make_rotary_embedding,
)

CPU = Placement(torch.float32, torch.device("cpu"))
LONG = LongRope(
    rope_theta=100.0,
    short_factor=(1.0, 2.0),
    long_factor=(3.0, 4.0),
    factor=4.0,
    original_max_position_embeddings=8,
)
DYNAMIC = DynamicRope(rope_theta=100.0, factor=2.0, original_max_position_embeddings=8)


def angles(rotation: Rotation) -> torch.Tensor:
    """[n, dim / 2], modulo 2 pi."""
    half = rotation.cosine.shape[-1] // 2
    return torch.atan2(-rotation.sine[:, 0, :half], rotation.cosine[:, 0, :half])


def test_rotation_turns_pairs_of_dimensions() -> None:
    rotary = make_rotary_embedding(DefaultRope(rope_theta=100.0), 4, 16, CPU)
    positions = torch.tensor([0, 1, 5])
    heads = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    turned = rotary(positions, None).apply_(heads.clone())
    pairs = torch.view_as_complex(torch.stack((heads[..., :2], heads[..., 2:]), -1))
    turn = torch.polar(torch.ones(3, 2), positions[:, None] * torch.tensor([1.0, 0.1]))
    expected = pairs * turn[:, None]
    assert torch.allclose(turned[..., :2], expected.real, atol=1e-6)
    assert torch.allclose(turned[..., 2:], expected.imag, atol=1e-6)


def test_linear_divides_positions() -> None:
    plain = make_rotary_embedding(DefaultRope(rope_theta=100.0), 4, 16, CPU)
    linear = make_rotary_embedding(LinearRope(rope_theta=100.0, factor=4.0), 4, 16, CPU)
    assert torch.allclose(
        angles(linear(torch.tensor([8, 12]), None)), angles(plain(torch.tensor([2, 3]), None)), atol=1e-6
    )


def test_llama3_divides_long_wavelengths_only() -> None:
    rope = Llama3Rope(
        rope_theta=1e6, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    ratio = DefaultRope(rope_theta=1e6).frequencies(128) / rope.frequencies(128)
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)
    assert (ratio.diff() >= -1e-5).all()


def test_yarn_factor_on_attention() -> None:
    common = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    assert YarnRope(**common).attention_scale == pytest.approx(0.1 * math.log(4) + 1)
    assert YarnRope(**common, attention_factor=1.0).attention_scale == 1.0
    assert YarnRope(**common, mscale=1.0, mscale_all_dim=1.0).attention_scale == 1.0
    assert YarnRope(**{**common, "factor": 1.0}).attention_scale == 1.0
    table = make_rotary_embedding(YarnRope(**common), 8, 4, CPU)(torch.arange(4), None)
    assert table.cosine[0, 0, 0] == pytest.approx(0.1 * math.log(4) + 1)


def test_longrope_goes_by_the_length_of_the_request() -> None:
    rotary = make_rotary_embedding(LONG, 4, 32, CPU)
    assert rotary.length_dependent
    positions = torch.tensor([3, 3, 9])
    short = positions[:, None] * torch.tensor([1.0, 0.1 / 2])
    long = positions[:, None] * torch.tensor([1.0 / 3, 0.1 / 4])
    found = angles(rotary(positions, torch.tensor([8, 9, 10])))
    assert torch.allclose(found, torch.stack((short[0], long[1], long[2])), atol=1e-6)


def test_dynamic_goes_by_the_length_of_the_request() -> None:
    rotary = make_rotary_embedding(DYNAMIC, 4, 32, CPU)
    assert rotary.length_dependent
    theta = 100.0 * (2.0 * 16 / 8 - 1.0) ** (4 / 2)
    found = angles(rotary(torch.tensor([3, 3, 3]), torch.tensor([4, 8, 16])))
    assert torch.allclose(found[:2], 3 * torch.tensor([[1.0, 0.1]] * 2), atol=1e-6)
    assert torch.allclose(found[2], 3 * torch.tensor([1.0, theta**-0.5]), atol=1e-6)


@pytest.mark.parametrize("rope", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
def test_within_the_original_length_nothing_depends_on_it(rope: LongRope | DynamicRope) -> None:
    """So such an engine may share prefix blocks."""
    limited, longer = make_rotary_embedding(rope, 4, 8, CPU), make_rotary_embedding(rope, 4, 9, CPU)
    assert not limited.length_dependent
    positions = torch.arange(8)
    expected = longer(positions, torch.full((8,), 8))
    assert torch.allclose(limited(positions, None).cosine, expected.cosine, atol=1e-6)
