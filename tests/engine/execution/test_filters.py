"""The filters that go row by row, alone and after one another, against transformers and llama.cpp's rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from asyncllm.engine.execution.philox import uniform_draws
from asyncllm.engine.execution.sampler import SampledRows, has_rare_filter, processed, sample
from asyncllm.engine.plan import NO_TOKEN, RowSampling

NO_IDS = torch.zeros((1, 1), dtype=torch.int64)
FloatArray = NDArray[np.float64]


def settings_of(**fields: Any) -> RowSampling:
    return RowSampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, **fields})


def rows_of(rows: list[RowSampling], positions: list[int] | None = None) -> SampledRows:
    return SampledRows(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int64),
        top_p=np.array([row.top_p for row in rows], np.float32),
        min_p=np.array([row.min_p for row in rows], np.float32),
        seed=np.array([row.seed for row in rows], np.uint64),
        choice=np.array([row.choice for row in rows], np.int64),
        position=np.array(positions or [0] * len(rows), np.int64),
        rare=[(i, row) for i, row in enumerate(rows) if has_rare_filter(row)],
    )


def kept(logits: torch.Tensor, sampling: RowSampling, position: int = 0) -> torch.Tensor:
    """bool [vocabulary]"""
    result = processed(logits[None].clone(), rows_of([sampling], [position]), np.zeros(1, np.int64))[0]
    return result > -torch.inf


def spread(seed: int, size: int = 200) -> torch.Tensor:
    return 2.5 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("fields", "warper"),
    [
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
        ({"min_p": 0.05}, MinPLogitsWarper(0.05)),
        ({"typical_p": 0.6}, TypicalLogitsWarper(0.6)),
        ({"typical_p": 0.95}, TypicalLogitsWarper(0.95)),
    ],
    ids=["top_k", "top_p", "min_p", "typical_p", "wide typical_p"],
)
def test_equals_transformers(seed: int, fields: dict[str, Any], warper: Any) -> None:
    logits = spread(seed)
    expected = warper(NO_IDS, logits[None].clone())[0] > -torch.inf
    assert torch.equal(kept(logits, settings_of(**fields)), expected)
    # beside another filter the same ones go row by row
    assert torch.equal(kept(logits, settings_of(**fields, top_n_sigma=1e6)), expected)
    half = warper(NO_IDS, logits[None] / 0.5)[0] > -torch.inf
    assert torch.equal(kept(logits, settings_of(**fields, temperature=0.5)), half)


def n_sigma(logits: FloatArray, n: float) -> NDArray[np.bool_]:
    """llama.cpp: at least max - n · the standard deviation of the logits that are not -inf."""
    finite = logits[logits > -np.inf]
    return logits >= finite.max() - n * finite.std()


def first_choices(logits: FloatArray, threshold: float) -> NDArray[np.bool_]:
    """llama.cpp: of the tokens with at least this probability all but the last one go."""
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    order = np.argsort(-logits, kind="stable")
    count = int((shares >= threshold).sum())
    keep = logits > -np.inf
    keep[order[: max(count - 1, 0)]] = False
    return keep


@pytest.mark.parametrize("n", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_top_n_sigma(n: float, temperature: float) -> None:
    logits = spread(1)
    logits[5:9] = -torch.inf
    expected = n_sigma(logits.double().numpy(), n)
    assert kept(logits, settings_of(top_n_sigma=n, temperature=temperature)).tolist() == expected.tolist()


@pytest.mark.parametrize("threshold", [0.001, 0.02, 0.1, 0.3, 0.5, 0.9])
def test_xtc(threshold: float) -> None:
    logits = spread(2)
    expected = first_choices(logits.double().numpy(), threshold)
    assert kept(logits, settings_of(xtc_probability=1.0, xtc_threshold=threshold)).tolist() == expected.tolist()
    assert bool(kept(logits, settings_of(xtc_probability=0.0, xtc_threshold=threshold)).all())


def test_xtc_acts_as_often_as_asked_and_its_number_is_not_the_draws() -> None:
    logits = torch.tensor([3.0, 2.9, 0.0])
    acted = [not bool(kept(logits, settings_of(xtc_probability=0.3, seed=11), position)[0]) for position in range(4000)]
    assert abs(sum(acted) - 1200) < 6 * np.sqrt(4000 * 0.3 * 0.7)
    seeds, positions = np.full(4000, 11, np.uint64), np.arange(4000)
    draws = uniform_draws(seeds, positions, np.zeros(4000, np.int64))
    assert abs(np.corrcoef(draws, acted)[0, 1]) < 0.1


def slow(logits: FloatArray, row: RowSampling) -> tuple[NDArray[np.bool_], bool]:
    """Every filter in its order on float64; whether a cut is so close that rounding may decide it."""
    x = logits / row.temperature
    close = False

    def shares() -> FloatArray:
        weights = np.exp(x - x.max())
        return weights / weights.sum()

    def reach(order: NDArray[np.int64], share: float) -> int:
        nonlocal close
        held = np.cumsum(shares()[order])
        close |= bool((abs(held - share) < 1e-5).any())
        return min(int((held < share).sum()), len(x) - 1)

    if row.top_n_sigma:
        bound = x.max() - row.top_n_sigma * x.std()
        close |= bool((abs(x - bound) < 1e-4).any())
        x = np.where(x >= bound, x, -np.inf)
    if row.top_k:
        x = np.where(x >= np.sort(x)[::-1][min(row.top_k, len(x)) - 1], x, -np.inf)
    if row.typical_p < 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(shares())
            distance = abs(surprise - np.nansum(shares() * surprise))
        order = np.argsort(distance, kind="stable")
        gaps = np.diff(np.unique(distance[np.isfinite(distance)]))
        close |= bool((gaps < 1e-5).any())
        last = distance[order[reach(order, row.typical_p)]]
        x = np.where(distance <= last, x, -np.inf)
    if row.top_p < 1:
        order = np.argsort(-x, kind="stable")
        x = np.where(x >= x[order[reach(order, row.top_p)]], x, -np.inf)
    if row.min_p:
        bound = row.min_p * shares().max()
        close |= bool((abs(shares() - bound) < 1e-6).any())
        x = np.where(shares() >= bound, x, -np.inf)
    if row.xtc_probability:
        close |= bool((abs(shares() - row.xtc_threshold) < 1e-6).any())
        chosen = x[shares() >= row.xtc_threshold]
        x = np.where(x <= chosen.min(), x, -np.inf) if len(chosen) else x
    return x > -np.inf, close


combinations = st.builds(
    settings_of,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 3, 30]),
    top_p=st.sampled_from([1.0, 0.7, 0.93]),
    min_p=st.sampled_from([0.0, 0.03]),
    typical_p=st.sampled_from([1.0, 0.4, 0.85]),
    top_n_sigma=st.sampled_from([0.0, 0.7, 1.9]),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    xtc_threshold=st.sampled_from([0.04, 0.17]),
)


@settings(max_examples=200, deadline=None)
@given(combinations, st.integers(0, 2**31))
def test_filters_after_one_another(sampling: RowSampling, seed: int) -> None:
    """Logits on a coarse grid, so that ties are frequent."""
    logits = torch.tensor(np.random.default_rng(seed).integers(-12, 13, 60) / 4, dtype=torch.float32)
    expected, close = slow(logits.double().numpy(), sampling)
    if not close:
        assert kept(logits, sampling).tolist() == expected.tolist()


def test_a_row_does_not_depend_on_its_mates() -> None:
    rows = [
        settings_of(top_k=5),
        settings_of(typical_p=0.5, seed=3),
        settings_of(temperature=0.0, typical_p=0.5),
        settings_of(xtc_probability=0.5, top_p=0.9, seed=4),
        settings_of(seed=9),
        settings_of(top_n_sigma=1.0, min_p=0.1, seed=10),
    ]
    logits = torch.stack([spread(10 + i) for i in range(len(rows))])
    together = sample(logits.clone(), rows_of(rows)).tolist()
    assert together == [sample(logits[i : i + 1].clone(), rows_of([row]))[0] for i, row in enumerate(rows)]
    assert together[2] == int(logits[2].argmax())


@pytest.mark.parametrize("broken", [float("nan"), -float("inf")])
def test_rows_without_numbers_have_no_token(broken: float) -> None:
    sampling = settings_of(top_n_sigma=1.0, typical_p=0.5, top_p=0.5, min_p=0.1, xtc_probability=1.0, top_k=4)
    logits = torch.full((2, 60), broken)
    logits[1, 7] = 1.0
    assert sample(logits, rows_of([sampling] * 2)).tolist() == [NO_TOKEN, 7]
    assert 0 <= sample(torch.full((1, 60), torch.inf), rows_of([sampling]))[0] < 60
