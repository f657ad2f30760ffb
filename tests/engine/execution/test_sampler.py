"""The sampler against a float64 reference that is written the slow way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncllm.engine.execution import sampler
from asyncllm.engine.execution.philox import uniform_draws
from asyncllm.engine.execution.processor import native_kernels
from asyncllm.engine.execution.sampler import SampledRows, sample
from asyncllm.engine.plan import NO_TOKEN
from asyncllm.kernels import sampled_rows
from asyncllm.kernels.cpu.build import Library

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0
    suppressed: tuple[int, ...] = ()


def rows_of(rows: list[Row]) -> SampledRows:
    return SampledRows(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int64),
        top_p=np.array([row.top_p for row in rows], np.float32),
        min_p=np.array([row.min_p for row in rows], np.float32),
        seed=np.array([row.seed for row in rows], np.uint64),
        choice=np.array([row.choice for row in rows], np.int64),
        position=np.array([row.position for row in rows], np.int64),
        suppressed=[(i, np.array(row.suppressed, np.int64)) for i, row in enumerate(rows) if row.suppressed],
    )


def draw(logits: FloatArray, rows: list[Row], library: Library | None = None) -> list[int]:
    return sample(torch.tensor(logits, dtype=torch.float32), rows_of(rows), library).tolist()


def kept(logits: FloatArray, row: Row) -> tuple[NDArray[np.bool_], bool]:
    """Which ids the filters keep, and whether a cut is so close that float32 may decide it."""
    scaled = np.array(logits, np.float64)
    scaled[list(row.suppressed)] = -np.inf
    weights = np.exp((scaled - scaled.max()) / np.float64(np.float32(row.temperature)))
    keep = np.isfinite(scaled)
    if row.top_k:
        keep &= scaled >= np.sort(scaled)[::-1][min(row.top_k, len(scaled)) - 1]
    close = False
    if row.top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        mass = np.cumsum(np.where(keep, weights, 0)[order])
        wanted = float(np.float32(row.top_p)) * mass[-1]
        close |= bool((abs(mass - wanted) < 1e-4 * mass[-1]).any())
        keep &= scaled >= scaled[order[np.searchsorted(mass, wanted)]]
    bound = float(np.float32(row.min_p)) * weights.max()
    close |= bool((abs(weights - bound) < 1e-4 * bound).any())
    return keep & (weights >= bound), close


def check(logits: FloatArray, row: Row, token: int) -> None:
    keep, close = kept(logits, row)
    if close:
        return
    assert keep[token]
    scaled = np.where(keep, logits, -np.inf).astype(np.float64)
    weights = np.exp((scaled - scaled.max()) / np.float64(np.float32(row.temperature)))
    cumulative = np.cumsum(weights) / weights.sum()
    uniform = uniform_draws(np.array([row.seed], np.uint64), np.array([row.position]), np.array([row.choice]))[0]
    before = cumulative[token] - weights[token] / weights.sum()
    assert before - 1e-5 <= uniform <= cumulative[token] + 1e-5


row_strategy = st.builds(
    Row,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.93, 0.51, 0.013]),
    min_p=st.sampled_from([0.0, 0.0, 0.037, 0.6]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 9),
    position=st.integers(0, 2**20),
    suppressed=st.lists(st.integers(0, 59), max_size=3, unique=True).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(row_strategy, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_rows_of_every_kind_together(rows: list[Row], seed: int) -> None:
    """Logits on a coarse grid, so that ties are frequent."""
    logits = np.random.default_rng(seed).integers(-6, 7, (len(rows), 60)) / 2
    for i, token in enumerate(draw(logits, rows)):
        check(logits[i], rows[i], token)
        assert draw(logits[i : i + 1], [rows[i]]) == [token]


@pytest.mark.parametrize("size", [7, 5_000, 49_152])
def test_greedy_takes_the_lowest_id_of_the_best(size: int) -> None:
    rng = np.random.default_rng(size)
    logits = rng.integers(0, 4, (16, size)).astype(np.float64)
    rows = [Row(temperature=0.0, top_k=3, top_p=0.5)] * 16
    assert draw(logits, rows) == [int(np.flatnonzero(row == row.max())[0]) for row in logits]


def test_greedy_and_drawn_rows_together() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 60))
    rows = [Row(temperature=0.0), Row(seed=5), Row(temperature=0.0, suppressed=(int(logits[2].argmax()),)), Row(seed=6)]
    tokens = draw(logits, rows)
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == np.argsort(-logits[2])[1]
    assert [tokens[1], tokens[3]] == [draw(logits[i : i + 1], [rows[i]])[0] for i in (1, 3)]


@pytest.mark.parametrize(("spread", "steps"), [(0.1, 0), (3.0, 0), (30.0, 0), (0.0, 0), (2.0, 8)])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.9999])
def test_the_nucleus_is_what_a_sort_finds(spread: float, steps: int, share: float) -> None:
    """Flat and steep distributions, equal logits, many ties; whole rows of a vocabulary, some of it banned."""
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((6, 20_000)) * spread
    if steps:
        logits = np.round(logits * steps) / steps
    logits = logits.astype(np.float32)
    logits[:, ::3] = -np.inf
    scaled = torch.from_numpy(logits - logits.max(-1, keepdims=True))
    floor = torch.tensor([-torch.inf, -0.5, -5.0, -50.0, -torch.inf, -1.0])
    bounds = sampler._top_p_bounds(scaled, floor, torch.full((6,), share, dtype=torch.float64)).numpy()
    for row, low, bound in zip(scaled.double().numpy(), floor.numpy(), bounds, strict=True):
        order = np.sort(row[row >= low])[::-1]
        held = np.exp(order).cumsum() / np.exp(order).sum()
        at = int(np.flatnonzero(order == np.float64(bound))[-1])
        assert held[at] >= share - 1e-6
        first = int(np.flatnonzero(order == np.float64(bound))[0])
        assert first == 0 or held[first - 1] < share + 1e-6


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_almost_no_temperature_is_almost_greedy(temperature: float) -> None:
    logits = np.array([[1.0, 5.0, 3.0, 4.9]] * 50) * 100
    assert set(draw(logits, [Row(temperature=temperature, position=i) for i in range(50)])) == {1}


def test_a_huge_temperature_is_almost_even() -> None:
    logits = np.array([[1.0, 5.0, 3.0, 4.9]] * 400)
    tokens = draw(logits, [Row(temperature=1e30, position=i) for i in range(400)])
    assert min(np.bincount(tokens, minlength=4)) > 60


@pytest.mark.parametrize(
    "row",
    [Row(), Row(temperature=0.7), Row(top_k=5), Row(top_p=0.8), Row(min_p=0.1), Row(top_k=20, top_p=0.9, min_p=0.02)],
    ids=str,
)
def test_draws_follow_the_distribution(row: Row) -> None:
    """50,000 draws: the count of every id within six standard deviations (and one) of what is expected."""
    count = 50_000
    logits = np.random.default_rng(3).standard_normal(50) * 2
    rows = [Row(**{**row.__dict__, "seed": 99, "position": i}) for i in range(count)]
    tokens = np.concatenate([draw(np.tile(logits, (5000, 1)), rows[i : i + 5000]) for i in range(0, count, 5000)])
    keep, close = kept(logits, row)
    assert not close
    weights = np.where(keep, np.exp((logits - logits.max()) / row.temperature), 0)
    expected = weights / weights.sum()
    counts = np.bincount(tokens.astype(int), minlength=50)
    assert counts[~keep].sum() == 0
    assert (abs(counts - count * expected) <= 6 * np.sqrt(count * expected * (1 - expected)) + 1).all()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "row", [Row(temperature=0.0), Row(), Row(top_k=3), Row(top_p=0.5), Row(min_p=0.1), Row(top_k=9, top_p=0.9)], ids=str
)
def test_a_row_without_a_number_has_no_token(row: Row, native: bool) -> None:
    """And one that has any draws of those; others do not notice."""
    library = native_kernels() if native else None
    if native and library is None:
        pytest.skip("no kernels for this processor")
    logits = np.random.default_rng(5).standard_normal((7, 700))
    logits[0], logits[1] = np.nan, -np.inf
    logits[2], logits[2, 600] = np.nan, -3.0
    logits[3, 650] = np.inf
    logits[4], logits[4, ::2] = np.nan, -np.inf
    rows = [row] * 6
    tokens = draw(logits[:6], rows, library)
    assert tokens[:5] == [NO_TOKEN, NO_TOKEN, 600, 650, NO_TOKEN]
    assert tokens[5] == draw(logits[5:6], rows[:1], library)[0]
    mixed = [row, Row(temperature=0.0), row, replace(row, top_k=0), Row(temperature=0.0), row]
    assert draw(logits[:6], mixed, library) == tokens


def test_the_device_says_it_alike() -> None:
    assert sampled_rows.NO_TOKEN == NO_TOKEN
