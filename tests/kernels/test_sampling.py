from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from asyncllm.engine.execution.sampler import SampledRows
from asyncllm.engine.execution.sampler import sample as sample_on_cpu
from asyncllm.kernels import logit_tiles, sampling, thresholds
from asyncllm.kernels.sampled_rows import NO_TOKEN
from tests.kernels.mutants import mutant
from tests.kernels.sampled_cases import VOCABULARY, WIDTH, Setting, make_logits, run

SETTINGS = [
    Setting(temperature=0.0, top_k=5, top_p=0.5),
    Setting(temperature=0.7, seed=2**64 - 5),
    Setting(top_k=3, seed=9),
    Setting(temperature=1.3, top_k=700, choice=3),
    Setting(top_p=0.9, seed=77),
    Setting(temperature=0.4, min_p=0.2, seed=123456789012345),
    Setting(temperature=1.5, top_k=50, top_p=0.6, min_p=0.01, seed=5),
    Setting(top_k=VOCABULARY + 9, seed=6),
]


def test_every_filter(device: torch.device, dtype: torch.dtype) -> None:
    logits = make_logits(len(SETTINGS) + 1, dtype).to(device)
    actual, expected = run(sampling, logits, SETTINGS, [3, 2**31 - 1, 5, 6, 7, 8, 9, 10])
    assert actual == expected


def test_many_draws_without_filters(device: torch.device) -> None:
    settings = [Setting(temperature=0.1 * i, seed=i, choice=i % 3) for i in range(20)]
    logits = make_logits(21, torch.float32, seed=1).to(device)
    actual, expected = run(sampling, logits, settings, list(range(20)), filters=False)
    assert actual == expected


def draws_without_filters(module: ModuleType, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tokens are the reference's, of rows that several programs read; what is banned is among them."""
    banned = Setting(suppress_before=10, suppressed=(20, 4096, 9990))
    settings = [Setting(seed=3), Setting(temperature=0.0), banned, replace(banned, temperature=0.0), Setting(choice=2)]
    logits = make_logits(7, dtype, seed=6, scale=0.5, vocabulary=10_000).to(device)
    logits[1, 9000:9990:10] = 30.0
    logits[2:4, [20, 4096, 9990]] = 30.0
    logits[4, 300:4500] = torch.nan
    actual, expected = run(module, logits, settings, [5, 6, 7, 8, 9], filters=False)
    return actual == expected


def test_without_filters(dtype: torch.dtype, device: torch.device) -> None:
    assert draws_without_filters(sampling, dtype, device)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("!= tl.num_programs(0) - 1", "!= tl.num_programs(0)"),
        ("tl.store(arrivals + index, 0)", "tl.store(arrivals + index, 1)"),
        ("seed, position.to(tl.int64), choice, 0", "seed, position.to(tl.int64) + 1, choice, 0"),
    ],
)
def test_planted_fault_without_filters_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(logit_tiles, tmp_path, right, wrong, user=sampling) as user, pytest.raises(AssertionError):
        assert draws_without_filters(user, torch.float32, device)


@pytest.mark.parametrize("scale", [0.5, 8.0])
def test_more_candidates_than_room(scale: float, device: torch.device) -> None:
    """With room for 16 the search has to halve ranges before it can list what is left."""
    settings = [Setting(top_k=100), Setting(top_p=0.8, seed=3)]
    logits = make_logits(3, torch.float16, seed=2, scale=scale).to(device)
    actual, expected = run(sampling, logits, settings, [1, 2], candidates=16)
    assert actual == expected


def test_equal_logits(device: torch.device) -> None:
    """Ties go to the lowest id, and to everyone that ties with the last one kept."""
    logits = torch.zeros((5, WIDTH), device=device)
    logits[:, [700, 800, 1290]] = 5.0
    settings = [Setting(temperature=0.0), *(Setting(top_k=1, seed=seed) for seed in range(3))]
    actual, expected = run(sampling, logits, settings, [1, 2, 3, 4], candidates=2)
    assert actual == expected
    assert actual[0] == 700
    assert set(actual) <= {700, 800, 1290}
    assert len(set(actual)) > 1


def test_suppressed_ids(device: torch.device) -> None:
    logits = torch.zeros((4, WIDTH), device=device)
    logits[:, 600] = 9.0
    logits[:, 20] = 8.0
    logits[:, 1299] = 7.0
    banned = Setting(temperature=0.0, suppress_before=10, suppressed=(20, 600))
    actual, expected = run(sampling, logits, [banned, banned, replace(banned, temperature=0.1)], [9, 10, 9])
    assert actual == expected == [1299, 600, 1299]


NUMBERLESS = [
    Setting(temperature=0.0),
    Setting(temperature=0.6),
    Setting(top_k=3),
    Setting(top_p=0.5),
    Setting(min_p=0.1),
    Setting(top_k=900, top_p=0.9),
    Setting(suppress_before=100, suppressed=(5, 6, 7)),
]


def tokens_of_rows_without_numbers(module: ModuleType, device: torch.device, *, filters: bool) -> list[int]:
    """Rows of which nothing is a number, nothing is allowed, or nothing but one token; and infinite ones."""
    kinds = NUMBERLESS if filters else [setting for setting in NUMBERLESS if setting.top_k + setting.min_p == 0]
    kinds = [setting for setting in kinds if filters or setting.top_p == 1]
    settings = [setting for setting in kinds for _ in range(5)]
    logits = make_logits(len(settings) + 1, torch.float32).to(device)
    logits[0:-1:5] = torch.nan
    logits[1:-1:5, :VOCABULARY] = -torch.inf
    logits[2:-1:5, :VOCABULARY] = torch.nan
    logits[2:-1:5, 900] = -3.0
    logits[3:-1:5, 700] = torch.inf
    logits[4:-1:5] = torch.nan
    logits[4:-1:5, ::2] = -torch.inf
    actual, expected = run(module, logits, settings, [8] * len(settings), filters=filters)
    assert actual == expected
    return actual


@pytest.mark.parametrize("filters", [True, False])
def test_a_row_without_a_number_has_no_token(filters: bool, device: torch.device) -> None:
    """And one that has any draws of those."""
    actual = tokens_of_rows_without_numbers(sampling, device, filters=filters)
    assert actual == [NO_TOKEN, NO_TOKEN, 900, 700, NO_TOKEN] * (len(actual) // 5)


@pytest.mark.parametrize(
    ("module", "right", "wrong"),
    [
        (sampling, "token = tl.where(filled > 0, token, _NO_TOKEN)\n", "token += 0\n"),
        (sampling, "tl.store(row_token_ids + row, tl.maximum(token, 0))", "tl.store(row_token_ids + row, token)"),
        (logit_tiles, 'tl.where(tl.max(tile_maxima, axis=0) == float("-inf"), NO_TOKEN, ', "tl.where(False, 0, "),
        (logit_tiles, "tl.store(row_token_ids + row, tl.maximum(token, 0))", "tl.store(row_token_ids + row, token)"),
    ],
)
def test_fault_in_what_has_no_token_is_caught(
    module: ModuleType, right: str, wrong: str, tmp_path: Path, device: torch.device
) -> None:
    user = None if module is sampling else sampling
    with mutant(module, tmp_path, right, wrong, user=user) as copy, pytest.raises(AssertionError):
        tokens_of_rows_without_numbers(copy, device, filters=module is sampling)


def test_equals_the_cpu_sampler(device: torch.device) -> None:
    logits = make_logits(len(SETTINGS), torch.float32, seed=4)
    positions = [40 + i for i in range(len(SETTINGS))]
    actual, _ = run(sampling, torch.cat((logits, logits[:1])).to(device), SETTINGS, positions)
    rows = SampledRows(
        temperature=np.array([each.temperature for each in SETTINGS], np.float32),
        top_k=np.array([each.top_k for each in SETTINGS], np.int64),
        top_p=np.array([each.top_p for each in SETTINGS], np.float32),
        min_p=np.array([each.min_p for each in SETTINGS], np.float32),
        seed=np.array([each.seed for each in SETTINGS], np.uint64),
        choice=np.array([each.choice for each in SETTINGS], np.int64),
        position=np.array(positions, np.int64),
    )
    assert actual == sample_on_cpu(logits[:, :VOCABULARY].clone(), rows).tolist()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_random_settings(seed: int, device: torch.device) -> None:
    generator = np.random.default_rng(seed)
    settings = [
        Setting(
            temperature=float(np.float32(generator.uniform(0.1, 2.0))),
            top_k=int(generator.integers(1, 1400)) if generator.integers(2) else 0,
            top_p=float(np.float32(generator.uniform(0.05, 1.0))) if generator.integers(2) else 1.0,
            min_p=float(np.float32(generator.uniform(0.0, 0.5))) if generator.integers(2) else 0.0,
            seed=int(generator.integers(2**63)),
        )
        for _ in range(8)
    ]
    logits = make_logits(9, torch.float32, seed=seed, scale=float(generator.uniform(0.3, 6.0))).to(device)
    positions = generator.integers(0, 100_000, 8).tolist()
    actual, expected = run(sampling, logits, settings, positions, candidates=int(2 ** generator.integers(3, 12)))
    assert actual == expected


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("inside = (slots < listed)[:, None] & (ids < VOCABULARY)", "inside = (slots < listed)[:, None]"),
        ("kept = tl.where(x >= threshold, weights, 0.0)", "kept = tl.where(x > threshold, weights, 0.0)"),
        ("0.0, top_p * total, threshold", "0.0, top_p, threshold"),
        ("seed, position.to(tl.int64), choice, 0", "seed, position.to(tl.int64), choice + 1, 0"),
    ],
)  # fmt: skip
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(sampling, tmp_path, right, wrong) as module:
        assert not all_as_expected(module, device)


@pytest.mark.parametrize(
    ("module", "right", "wrong"),
    [
        (logit_tiles, "ids < VOCABULARY, ADJUSTED)\n        _sum", "ids < 20 + VOCABULARY, ADJUSTED)\n        _sum"),
        (logit_tiles, "tl.where(tile_maxima == highest, tiles, TILES - 1)", "TILES - 1 + 0 * tiles"),
        (logit_tiles, "tl.where(x == highest, places, TILE - 1)", "TILE - 1 - tl.where(x == highest, places, 0)"),
        (logit_tiles, "before = tl.max(tl.where(tiles < tile", "before = tl.max(tl.where(tiles < tile - 1"),
        (thresholds, "(above + sums >= need)", "(above + sums + 1.0 >= need)"),
    ],
)
def test_fault_in_what_it_uses_is_caught(
    module: ModuleType, right: str, wrong: str, tmp_path: Path, device: torch.device
) -> None:
    with mutant(module, tmp_path, right, wrong, user=sampling) as user:
        assert not all_as_expected(user, device)


def all_as_expected(module: ModuleType, device: torch.device) -> bool:
    settings = [
        Setting(temperature=0.0),
        Setting(top_p=0.6, seed=1),
        Setting(top_k=2, seed=4),
        Setting(choice=5),
    ]
    logits = make_logits(13, torch.float16, seed=3).to(device)
    logits[0, [40, 45, 1000]] = 20.0
    logits[2, 1290] = 9.0  # beside what is no token
    for start in range(3, 7):
        actual, expected = run(module, logits, settings, [start] * 4)
        if actual != expected:
            return False
    return True
