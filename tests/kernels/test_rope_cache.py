from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import rope_cache
from tests.kernels.mutants import mutant
from tests.kernels.precision import assert_as_good


@dataclass(frozen=True)
class Case:
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    rotary: int = 64
    block_size: int = 16
    norm: bool = False
    shifted: bool = False  # angles are not those of the positions


CASES = [
    Case(),
    Case(q_heads=7, kv_heads=1, dim=80, rotary=80, block_size=32, norm=True),
    Case(q_heads=3, kv_heads=3, dim=96, rotary=24, block_size=64, norm=True, shifted=True),
    Case(dim=128, rotary=128, block_size=128, norm=True),
    Case(dim=256, rotary=64, shifted=True),
]
TOKENS, REAL = 7, 5


def check(module: ModuleType, case: Case, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(case.dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    heads = case.q_heads + 2 * case.kv_heads
    qkv = normal(TOKENS, heads * case.dim + 3)[:, : heads * case.dim]
    table = normal(300, case.rotary).float()
    positions = torch.tensor([0, case.block_size - 1, case.block_size, 130, 17, 0, 0], dtype=torch.int32, device=device)
    rows = torch.tensor([2, 2, 2, 0, 3, 9, 9], dtype=torch.int32, device=device)
    blocks = torch.randperm(4 * 10, generator=generator).reshape(4, 10).to(device, torch.int32)
    cache = normal(2, 40, case.kv_heads, case.block_size, case.dim)
    weights = torch.rand((2, case.dim), generator=generator).to(device, dtype)
    norm = module.HeadNorm(weights[0], weights[1], 1e-6) if case.norm else None
    arguments = {
        "table": table,
        "block_table": blocks,
        "norm": norm,
        "angles": positions + 100 if case.shifted else None,
    }
    count = torch.tensor([REAL], dtype=torch.int32, device=device)

    exact_cache, low = cache.double(), cache.clone()
    exact = module.rope_cache_reference(qkv.double(), positions, rows, count, cache=exact_cache, **arguments)
    output = torch.full((TOKENS, case.q_heads, case.dim), 7.0, dtype=dtype, device=device)
    assert module.rope_cache(qkv, positions, rows, count, cache=low, query=output, **arguments) is output
    assert bool((output[REAL:] == 7.0).all())  # tokens that do not exist

    plain_cache = cache.clone()
    plain = _plain(qkv[:REAL], positions[:REAL], rows[:REAL], plain_cache, case, table=table, blocks=blocks, norm=norm)
    assert_as_good(output[:REAL], exact[:REAL], plain)
    assert_as_good(low[0], exact_cache[0], plain_cache[0])
    assert torch.equal(low[1], plain_cache[1])


def _plain(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    cache: torch.Tensor,
    case: Case,
    *,
    table: torch.Tensor,
    blocks: torch.Tensor,
    norm: rope_cache.HeadNorm | None,
) -> torch.Tensor:
    """With torch operators in qkv's own type."""
    heads = qkv.reshape(len(qkv), -1, case.dim)
    query, key, value = torch.split(heads, [case.q_heads, case.kv_heads, case.kv_heads], dim=1)
    if norm is not None:
        query = torch.nn.functional.rms_norm(query, (case.dim,), norm.query, norm.epsilon)
        key = torch.nn.functional.rms_norm(key, (case.dim,), norm.key, norm.epsilon)
    angles = positions.long() + (100 if case.shifted else 0)
    cosine, sine = table[angles].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turning, rest = x[..., : case.rotary], x[..., case.rotary :]
        low, high = turning.chunk(2, dim=-1)
        return torch.cat((low * cosine - high * sine, high * cosine + low * sine, rest), dim=-1)

    block = blocks[rows.long(), positions.long() // case.block_size].long()
    slot = positions.long() % case.block_size
    cache[0, block, :, slot] = rotate(key)
    cache[1, block, :, slot] = value
    return rotate(query)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    check(rope_cache, case, device, dtype)


def test_values_are_written_finite(device: torch.device) -> None:
    """A slot that another request will own must not turn 0 · value into not-a-number."""
    qkv = torch.full((1, 3 * 16), torch.nan, dtype=torch.float16, device=device)
    qkv[0, -16:] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0] * 4)
    cache = torch.zeros((2, 2, 1, 16, 16), dtype=torch.float16, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    table, blocks = torch.ones(1, 16, device=device), zero[:, None] + 1
    expected = cache.clone()
    rope_cache.rope_cache(qkv, zero, zero, zero + 1, table=table, block_table=blocks, cache=cache)
    rope_cache.rope_cache_reference(qkv, zero, zero, zero + 1, table=table, block_table=blocks, cache=expected)
    assert cache[1, 1, 0, 0, :4].tolist() == [0.0, 65504.0, -65504.0, 1.0]
    assert torch.equal(cache[1], expected[1])
    assert bool(cache[0, 1, 0, 0].isnan().all())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("position // BLOCK_SIZE", "(position + 1) // BLOCK_SIZE"),
        ("position % BLOCK_SIZE\n", "(position + 1) % BLOCK_SIZE\n"),
        ("row.to(tl.int64) * table_width", "row.to(tl.int64) // 2 * table_width"),
        ("heads - (Q_HEADS + KV_HEADS)", "Q_HEADS + 2 * KV_HEADS - 1 - heads"),
        ("tl.where(is_value, plane_stride, 0)", "0"),
        ("turn + half", "turn + half - 1"),
        ("token >= count", "token >= count - 1"),
        ("key_norm + half", "key_norm"),
        ("of_query[None, :], of_key[None, :]", "of_key[None, :], of_query[None, :]"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(rope_cache, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, Case(dim=32, rotary=16, norm=True), device, torch.float32)


@pytest.mark.parametrize("rotary", [32, 16])
def test_cache_of_8_bits(rotary: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    kv_heads, dim, count = 2, 32, 6
    # the interpreter rounds some numbers to 8 bits wrongly: here, only rotated keys need rounding
    qkv = (40.0 * torch.randn((count, (3 + 2 * kv_heads) * dim), generator=generator)).to(torch.float8_e4m3fn)
    qkv = qkv.float().to(device)
    qkv[0, 3 * dim :] = 1e4  # too large for 8 bits
    qkv[1, -dim:] = torch.nan
    positions = torch.arange(count, dtype=torch.int32, device=device)
    cache = torch.zeros((2, 1, kv_heads, 16, dim), device=device).to(torch.float8_e4m3fn)
    expected = cache.clone()
    arguments = {
        "table": torch.rand((count, rotary), generator=generator).to(device),
        "block_table": torch.zeros((1, 1), dtype=torch.int32, device=device),
    }
    rows, number = torch.zeros_like(positions), torch.full_like(positions[:1], count)
    query = rope_cache.rope_cache(qkv, positions, rows, number, cache=cache, **arguments)
    exact = rope_cache.rope_cache_reference(qkv, positions, rows, number, cache=expected, **arguments)
    torch.testing.assert_close(query, exact)
    assert cache.float().isfinite().all()
    assert bool((cache[1, 0, :, 0].float() == 448.0).all())
    assert torch.equal(cache[1].view(torch.uint8), expected[1].view(torch.uint8))
    equal = (cache[0].view(torch.uint8) == expected[0].view(torch.uint8)).float().mean()
    assert equal > (0.9 if device.type == "cpu" else 0.99)  # a rotated key may lie between two of the few numbers
    if device.type != "cpu":
        torch.testing.assert_close(cache[0].float(), expected[0].float(), rtol=0.13, atol=2e-3)
