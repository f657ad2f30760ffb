"""On a Hopper GPU: Gluon has no interpreter. Elsewhere, tests/engine/execution/test_start_up_kernels.py compiles it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncllm.kernels import attention_plan, paged_attention, specialized_attention
from asyncllm.kernels.attention_plan import AttentionShape, Tiling, default_tilings
from asyncllm.kernels.language import GLUON_AVAILABLE
from tests.kernels.mutants import mutant
from tests.kernels.paged_case import Case, Modules, check, tilings

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not (HOPPER and GLUON_AVAILABLE), reason="the kernel is for Hopper GPUs")


def specialized(*, programs: int = 7, share: int = 1, least_blocks: int = 100) -> tuple[Tiling, Tiling]:
    """Few programs, so that each has several units in turn."""
    small, large = tilings(16, share=share)
    return small, replace(large, rows=128, keys=128, least_blocks=least_blocks, programs=programs)


# whole prompts, chunks that begin anywhere, a tile of few rows, and sequences that are none of this kernel's
SEQUENCES = ((777, 777), (1000, 333), (64, 64), (129, 5), (140, 100), (300, 41), (90, 1), (128, 128), (5, 5))
PLAIN = Case(q_heads=8, dim=128, block_size=64, sequences=SEQUENCES, tilings=specialized())
SPLIT = replace(PLAIN, sequences=((3000, 40), (1500, 70)), tilings=specialized(programs=50, share=9, least_blocks=1))
# one program, which computes a tile's parts in turn: elsewhere they end at about the same time, and whoever merges may
# find them all
IN_TURN = replace(SPLIT, tilings=specialized(programs=1, share=9, least_blocks=1))
CASES = [
    PLAIN,
    SPLIT,
    replace(PLAIN, q_heads=4, dim=64, sinks=True),
    replace(PLAIN, q_heads=2, soft_cap=3.0),
    replace(PLAIN, q_heads=14, kv_heads=2, sinks=True, tilings=specialized(programs=1)),
    replace(SPLIT, q_heads=6, dim=64, sinks=True, soft_cap=20.0),
    replace(PLAIN, sequences=((700, 1), (3, 1)), tilings=specialized()),
    replace(PLAIN, sequences=((40, 40),), tilings=specialized(programs=132)),
    IN_TURN,
]


@on_hopper
@pytest.mark.parametrize("number", range(len(CASES)))
def test_equals_reference(number: int, device: torch.device) -> None:
    check(CASES[number], device, [torch.bfloat16, torch.float16][number % 2])


@on_hopper
@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_random_steps(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    kv_heads = draw(1, 4)
    case = Case(
        q_heads=kv_heads * draw(1, 8),
        kv_heads=kv_heads,
        dim=[64, 128][draw(0, 1)],
        block_size=64,
        sinks=bool(draw(0, 1)),
        sequences=tuple((length, min(length, draw(1, 700))) for length in (draw(1, 2500) for _ in range(draw(1, 12)))),
        tilings=specialized(programs=draw(1, 200), share=draw(1, 16), least_blocks=draw(1, 3)),
    )
    check(case, device, torch.bfloat16, seed=seed)


def test_what_the_default_is(device: torch.device) -> None:
    def large(shape: AttentionShape, dtype: torch.dtype = torch.bfloat16, *, deterministic: bool = False) -> Tiling:
        return default_tilings(
            shape, dtype, multiprocessors=132, descriptors=True, specialized=True, deterministic=deterministic
        )[1]

    shape = AttentionShape(32, 8, 128, 64, None)
    assert large(shape).programs == 132
    assert not large(shape, deterministic=True).programs
    assert not large(shape, torch.float32).programs
    assert not large(shape, torch.float8_e4m3fn).programs
    for other in (replace(shape, window=100), replace(shape, block_size=16), replace(shape, head_dim=256)):
        assert not large(other).programs
    plan = attention_plan.make_attention_plan(shape, torch.bfloat16, device, max_tokens=64, max_sequences=4)
    if HOPPER and GLUON_AVAILABLE:
        assert plan.large.programs == torch.cuda.get_device_properties(device).multi_processor_count
    else:
        assert not plan.large.programs


FAULTS = [
    ("key[None, :] <= positions[:, None]) & (key >= key_start)[None, :], near", "key >= 0)[None, :], near"),
    ("key[None, :] <= positions[:, None]) & (key >= key_start)[None, :], far", "key >= 0)[None, :], far"),
    ("gl.maximum(end - whole, 1)", "1 + 0 * whole"),
    ("weight = weight * decay + gl.sum(near", "weight += gl.sum(near"),
    ("first_row = gl.load(unit + 4) + WHICH * HALF", "first_row = gl.load(unit + 4)"),
    ("== splits - 1", "== splits"),
    ("weight = weight * decay + part_weight * part_factor", "weight += part_weight"),
    ("gl.store(progress, 0)  # ready", "# ready"),
    ("line = gl.load(unit + 8) + WHICH * HALF", "line = gl.load(unit + 8)"),
    ("gl.load(unit).to(gl.int64) * table_width", "gl.load(unit).to(gl.int64) // 2 * table_width"),
    ("near = (gl.load(table + first)", "near = (gl.load(table + first // 2)"),
    ("gl.minimum(first + 1, last)", "gl.minimum(first, last)"),
    ("[near + plane_rows, 0]", "[near, 0]"),
    ("[far + plane_rows, 0]", "[near + plane_rows, 0]"),
    ("offset = (token + row // GROUP)", "offset = (token + row // (GROUP + 1))"),
    ("QUERY_STRIDE + (head * GROUP + row % GROUP)", "QUERY_STRIDE + (head * GROUP)"),
    ("target = (token + wide_row // GROUP)", "target = (token + wide_row // (GROUP + 1))"),
    ("(2 * gl.load(unit + 14) + WHICH)", "(2 * gl.load(unit + 14) + 0 * WHICH)"),
    ("sums = partial + lines[:, None] * DIM + gl", "sums = partial + lines[:, None] // 2 * DIM + gl"),
]  # fmt: skip


@on_hopper
@pytest.mark.full
@pytest.mark.parametrize(("right", "wrong"), FAULTS, ids=range(len(FAULTS)))
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    case = SPLIT if any(word in right for word in ("part", "line")) else PLAIN
    if "splits" in right or "unit + 14" in right:
        case = IN_TURN
    with mutant(specialized_attention, tmp_path, right, wrong, user=paged_attention) as module:
        modules = Modules(attention=module)
        with pytest.raises(AssertionError):
            check(case, device, torch.bfloat16, modules=modules)
