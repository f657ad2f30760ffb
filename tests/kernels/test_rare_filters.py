from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncllm.engine.execution.sampler import SampledRows, processed
from asyncllm.engine.plan import RowSampling
from asyncllm.kernels import rare_filters
from asyncllm.kernels.sampled_rows import ADJUSTS, FILTERS
from asyncllm.kernels.sampling import make_sampling_workspace
from tests.kernels.adjusted_rows import VOCABULARY, Case, joined, make_logits, rows_of, settings_of
from tests.kernels.mutants import mutant

PLAIN = Case(duties=ADJUSTS | FILTERS)
ALONE = [
    replace(PLAIN, top_n_sigma=1.2, temperature=0.7),
    replace(PLAIN, typical_p=0.6),
    replace(PLAIN, typical_p=0.97, temperature=1.6),
    replace(PLAIN, xtc_probability=1.0, xtc_threshold=0.02),
    replace(PLAIN, top_k=5),
    replace(PLAIN, top_p=0.7),
    replace(PLAIN, min_p=0.05),
    replace(PLAIN, temperature=0.0, top_k=2),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rare_filters, "_BLOCK", 128)


def kept(
    cases: list[Case], logits: torch.Tensor, module: object = rare_filters, candidates: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel, and by the reference: bool [cases, VOCABULARY]."""
    device = logits.device
    state, settings, where = joined(cases, device), settings_of(cases, device), rows_of(cases, device)
    workspace = make_sampling_workspace(len(logits), VOCABULARY, device, candidates)
    results = []
    for name, extra in (("filter_rare_rows", (workspace,)), ("filter_rare_rows_reference", ())):
        adjusted = logits.clone()
        getattr(module, name)(adjusted, where, settings, state, *extra)
        assert torch.equal(adjusted[-1], logits[-1])
        torch.testing.assert_close(adjusted[:, VOCABULARY:], logits[:, VOCABULARY:], rtol=0, atol=0, equal_nan=True)
        results.append(adjusted[:-1, :VOCABULARY] > -torch.inf)
    return results[0], results[1]


@pytest.mark.parametrize("candidates", [16, 1024])
def test_each_alone(candidates: int, device: torch.device) -> None:
    """By a few turns and a list, and by a list alone."""
    actual, expected = kept(ALONE, make_logits(len(ALONE), torch.float32, device), candidates=candidates)
    assert torch.equal(actual, expected)
    assert all(0 < int(row.sum()) < VOCABULARY for row in expected[:-1])
    assert bool(expected[-1].all())  # greedy: nothing is drawn


def test_rows_of_other_duties_are_left_alone(device: torch.device) -> None:
    cases = [replace(case, duties=ADJUSTS) for case in ALONE]
    actual, _ = kept(cases, make_logits(len(cases), torch.float32, device))
    assert bool(actual.all())


def combinations() -> list[Case]:
    pairs = product((0.0, 1.0), (0, 12), (1.0, 0.8), (1.0, 0.7), (0.0, 0.04), (0.0, 1.0))
    return [
        replace(
            PLAIN,
            top_n_sigma=2 * sigma,
            top_k=k,
            typical_p=typical,
            top_p=nucleus,
            min_p=share,
            xtc_probability=chance,
            xtc_threshold=0.06,
            seed=i,
        )
        for i, (sigma, k, typical, nucleus, share, chance) in enumerate(pairs)
    ]


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_after_one_another(part: int, device: torch.device) -> None:
    """Against the reference here and the CPU's own filters."""
    cases = combinations()[part * 24 :: 3][:8]
    logits = make_logits(len(cases), torch.float32, device, seed=part)
    actual, expected = kept(cases, logits)
    assert torch.equal(actual, expected)
    rows = [
        RowSampling(
            temperature=case.temperature,
            top_k=case.top_k,
            top_p=case.top_p,
            min_p=case.min_p,
            seed=case.seed,
            typical_p=case.typical_p,
            top_n_sigma=case.top_n_sigma,
            xtc_probability=case.xtc_probability,
            xtc_threshold=case.xtc_threshold,
        )
        for case in cases
    ]
    settings = SampledRows(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int64),
        top_p=np.array([row.top_p for row in rows], np.float32),
        min_p=np.array([row.min_p for row in rows], np.float32),
        seed=np.array([row.seed for row in rows], np.uint64),
        choice=np.zeros(len(rows), np.int64),
        position=np.arange(50, 50 + len(rows)),
        rare=list(enumerate(rows)),
    )
    cpu = processed(logits[:-1, :VOCABULARY].cpu(), settings, np.arange(len(rows)))
    assert torch.equal(actual.cpu(), cpu > -torch.inf)


def test_xtc_acts_where_the_cpu_says(device: torch.device) -> None:
    cases = [replace(PLAIN, xtc_probability=0.5, xtc_threshold=0.01, seed=seed) for seed in range(9)]
    actual, expected = kept(cases, make_logits(len(cases), torch.float32, device))
    assert torch.equal(actual, expected)
    assert 0 < sum(not bool(row.all()) for row in actual) < len(cases)


def test_broken_rows(device: torch.device) -> None:
    logits = make_logits(3, torch.float32, device)
    logits[0] = torch.nan
    logits[1, :7] = 1e15
    logits[2, 5:] = -torch.inf
    cases = [replace(PLAIN, top_n_sigma=1.0, typical_p=0.5, top_p=0.5, min_p=0.1, xtc_probability=1.0, top_k=4)] * 3
    actual, _ = kept(cases, logits)
    assert actual.sum(-1).tolist()[0] == 0
    assert 0 < int(actual[2].sum()) <= 5


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("sigmas * tl.sqrt(", "tl.sqrt("),
        ("(expected / total)", "(expected * 0.5)"),
        ("low = tl.maximum(low, peak + temperature * tl.log(min_p))", "low = peak"),
        ("& (x <= high)", "& (x < high)"),
        ("top_k.to(tl.float64), share", "top_k.to(tl.float64) + 1, share"),
        ("if uniform <= chance.to(tl.float64)", "if uniform > chance.to(tl.float64)"),
        (" >= enough", " > total"),
        ("measure, above, need", "measure, above * 0, need"),
        ("at_most - at_least > CANDIDATES", "at_most - at_least > 2 * CANDIDATES"),
        ("tl.load(min_ps + row)", "tl.load(top_ps + row)"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(rare_filters, tmp_path, right, wrong) as module:
        module._BLOCK = 512  # type: ignore[attr-defined]  # at once: faults in loops are the other tests'
        actual, expected = kept(ALONE, make_logits(len(ALONE), torch.float32, device), module)
        assert not torch.equal(actual, expected)
