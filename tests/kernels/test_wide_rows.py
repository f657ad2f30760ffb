"""Rows of which filters keep more than a short list holds, against the reference."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.kernels import sampling, wide_rows
from tests.kernels.conftest import INTERPRETED
from tests.kernels.mutants import mutant
from tests.kernels.sampled_cases import VOCABULARY as NARROW
from tests.kernels.sampled_cases import Setting, make_logits, run

FULL = pytest.mark.full
VOCABULARY = 3000
SAMPLE, CANDIDATES = 256, 256
SETTINGS = [
    Setting(top_p=0.9, seed=3),
    Setting(temperature=0.7, top_p=0.97, seed=4),
    Setting(top_k=900, seed=5),
    Setting(top_k=400, top_p=0.8, seed=6),
    Setting(temperature=1.5, min_p=0.0005, seed=7),
    Setting(top_p=0.95, min_p=0.002, seed=8),
    Setting(temperature=2.0, top_k=2000, top_p=0.7, min_p=0.003, seed=9),
    Setting(top_k=2999, seed=10),
]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_rows, "_SAMPLE", SAMPLE)
    monkeypatch.setattr(wide_rows, "_AT_ONCE", 4)


def check(logits: torch.Tensor, settings: list[Setting], start: int = 3, **options: Any) -> None:
    options = {"candidates": CANDIDATES, **options}
    actual, expected = run(sampling, logits, settings, list(range(start, start + len(settings))), **options)
    assert actual == expected


def rows_of(scale: float, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return make_logits(len(SETTINGS) + 1, dtype, seed=seed, scale=scale, vocabulary=VOCABULARY)


def test_filters(device: torch.device) -> None:
    check(rows_of(1.0, 11, torch.float16).to(device), SETTINGS)


@FULL
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_filters_at_other_spreads(scale: float, device: torch.device, dtype: torch.dtype) -> None:
    check(rows_of(scale, 11, dtype).to(device), SETTINGS)


class Looks:
    """Counts the readings of rows, and the logits that they let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        look: Any = wide_rows._look

        def counted(*arguments: Any) -> Any:
            self.count += 1
            return look(*arguments)

        monkeypatch.setattr(wide_rows, "_look", counted)


if INTERPRETED:  # a compiled kernel cannot be looked into

    @pytest.mark.parametrize("scale", [1.0, pytest.param(0.3, marks=FULL)])
    def test_a_filter_reads_a_row_about_once(
        scale: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For a row as random as a model's; both top-k and top-p may read it once each."""
        monkeypatch.setattr(wide_rows, "_SAMPLE", 2048)  # a short row takes more of it than a long one
        looks = Looks(monkeypatch)
        for seed in range(2):
            logits = rows_of(scale, seed)
            check(logits, SETTINGS[:3], candidates=1024)
        assert looks.count <= 6 + 1
        looks.count = 0
        check(logits, SETTINGS[3:6], candidates=1024)
        assert looks.count <= 4 + 1

    @FULL
    def test_halving_is_rare_but_ends(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = Looks(monkeypatch)
        check(rows_of(1.0, 5), SETTINGS[:3], candidates=16)
        assert 6 < looks.count < 60

else:

    @pytest.mark.parametrize("scale", [1.0, 4.0])
    def test_a_whole_vocabulary(scale: float, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the sizes that it is made for."""
        monkeypatch.undo()
        logits = make_logits(len(SETTINGS) + 1, torch.bfloat16, scale=scale, vocabulary=151_936).to(device)
        check(logits, SETTINGS, candidates=4096)


@pytest.mark.parametrize("grain", [0.5, 40.0, pytest.param(2.0, marks=FULL)])
def test_equal_logits(grain: float, device: torch.device) -> None:
    """More than the list has room for: a filter keeps all that are as likely."""
    logits = (rows_of(2.0, 7) / grain).round() * grain
    check(logits.to(device), SETTINGS[:4])


def test_a_sample_that_misleads(device: torch.device) -> None:
    """What the guess looks at lies far above, or far below, all else."""
    places = np.arange(SAMPLE)
    seen = places // 8 * (VOCABULARY - 8) // (SAMPLE // 8 - 1) + places % 8
    logits = rows_of(1.0, 9)
    logits[::2, seen] -= 30.0
    logits[1::2, seen] += 3.0
    check(logits.to(device), SETTINGS[:4])


@FULL
def test_most_ids_are_banned(device: torch.device) -> None:
    logits = rows_of(0.2, 10)
    logits[:, 700:VOCABULARY] = -torch.inf
    check(logits.to(device), SETTINGS[1:4])


@FULL
@pytest.mark.parametrize("size", [3e38, 1e-38])
def test_numbers_at_the_ends(size: float, device: torch.device) -> None:
    logits = rows_of(1.0, 12).clamp(-1, 1) * size
    check(logits.to(device), [Setting(temperature=t, top_k=k) for t, k in ((1.0, 1000), (0.5, 2000))])


@pytest.mark.parametrize("vocabulary", [NARROW, 600])
def test_a_row_that_the_sample_holds_whole(vocabulary: int, device: torch.device) -> None:
    logits = make_logits(5, torch.float32, scale=0.4, vocabulary=vocabulary).to(device)
    check(logits, [SETTINGS[0], SETTINGS[3], SETTINGS[4], Setting(top_k=590, top_p=0.9)], candidates=64)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_random_settings(seed: int, device: torch.device) -> None:
    generator = np.random.default_rng(seed)
    settings = [
        Setting(
            temperature=float(np.float32(generator.uniform(0.3, 2.0))),
            top_k=int(generator.integers(200, VOCABULARY)) if generator.integers(2) else 0,
            top_p=float(np.float32(generator.uniform(0.5, 1.0))) if generator.integers(2) else 1.0,
            min_p=float(np.float32(generator.uniform(0.0, 0.01))) if generator.integers(2) else 0.0,
            seed=int(generator.integers(2**63)),
        )
        for _ in range(8)
    ]
    logits = rows_of(float(generator.uniform(0.1, 3.0)), seed + 50).to(device)
    for candidates in (32, 256, 4096):
        check(logits, settings, start=int(generator.integers(1000)), candidates=candidates)


def draws_as_expected(module: ModuleType, device: torch.device) -> bool:
    """Of rows that look once, of equal logits, and of a row that halves; some draws of each."""
    module.draw_wide_rows.__globals__.update(_SAMPLE=SAMPLE, _AT_ONCE=4)
    rows = torch.cat((rows_of(1.0, 20)[:3], (rows_of(2.0, 21)[:2] / 0.5).round() * 0.5, rows_of(1.0, 22)[:1]))
    settings = [Setting(top_p=0.9), Setting(top_k=400, top_p=0.8, seed=2), Setting(min_p=0.002, seed=3)]
    settings += [Setting(top_k=900, seed=4), Setting(top_p=0.6, seed=5)]
    for start, candidates in ((10, CANDIDATES), (20, CANDIDATES), (30, 32)):
        positions = list(range(start, start + len(settings)))
        actual, expected = run(module, rows.to(device), settings, positions, candidates=candidates)
        if actual != expected:
            return False
    return True


QUICK_FAULTS = [
    ("listed = (x >= low) & (x < high)", "listed = (x >= low) & (x <= high)"),
    ("(passed >= need)", "(both >= need)"),
    ("(x >= threshold) & (places < filled)", "(x > threshold) & (places < filled)"),
]
FAULTS = [
    ("place = (ended - counts)", "place = ended"),
    ("listed -= tl.load(reached + begin - 1", "listed -= 0.5 * tl.load(reached + begin - 1"),
    ("floor = threshold\n", "floor = low\n"),
    ("tl.where(above, weights, 0.0), axis=1)", "tl.where(above | listed, weights, 0.0), axis=1)"),
    ("weights.to(tl.float64) + listed, highest", "weights.to(tl.float64), highest"),
    ("measure, passed, need, start,", "measure, passed * 0, need, start,"),
]


@pytest.mark.parametrize(("right", "wrong"), [*QUICK_FAULTS, *(pytest.param(*fault, marks=FULL) for fault in FAULTS)])
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(wide_rows, tmp_path, right, wrong, user=sampling) as module:
        assert not draws_as_expected(module, device)


@FULL
def test_no_fault_is_seen_where_there_is_none(device: torch.device) -> None:
    assert draws_as_expected(sampling, device)
