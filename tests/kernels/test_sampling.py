from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.engine.execution.sampler import SampledRows
from asyncllm.engine.execution.sampler import sample as sample_on_cpu
from asyncllm.kernels import sampling
from tests.kernels.mutants import mutant

VOCABULARY, WIDTH = 1300, 1340  # three tiles, and a tail that is no token


@dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    choice: int = 0
    suppress_before: int = 0
    suppressed: tuple[int, ...] = ()


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


def make_settings(module: ModuleType, settings: list[Setting], rows: list[int], device: torch.device) -> Any:
    """setting i in row rows[i]."""
    count = max(rows) + 1

    def spread(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        row = torch.zeros((count, *torch.tensor(values).shape[1:]), dtype=dtype)
        row[rows] = torch.tensor(values, dtype=dtype)
        return row.to(device)

    signed = [int(np.uint64(each.seed).astype(np.int64)) for each in settings]
    return module.RowSettings(
        temperature=spread([each.temperature for each in settings], torch.float32),
        top_k=spread([each.top_k for each in settings], torch.int32),
        top_p=spread([each.top_p for each in settings], torch.float32),
        min_p=spread([each.min_p for each in settings], torch.float32),
        seed=spread(signed, torch.int64),
        choice=spread([each.choice for each in settings], torch.int32),
        suppress_before=spread([each.suppress_before for each in settings], torch.int32),
        num_suppressed=spread([len(each.suppressed) for each in settings], torch.int32),
        suppressed=spread([[*each.suppressed, *[0] * (3 - len(each.suppressed))] for each in settings], torch.int32),
    )


def make_logits(count: int, dtype: torch.dtype, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    logits = scale * torch.randn((count, WIDTH), generator=torch.Generator().manual_seed(seed))
    logits[:, VOCABULARY:] = 50.0  # what is no token would win
    return logits.to(dtype)


def run(
    module: ModuleType,
    logits: torch.Tensor,
    settings: list[Setting],
    positions: list[int],
    *,
    candidates: int = 4096,
    spare: int = 1,
    filters: bool = True,
) -> tuple[list[int], list[int]]:
    """Tokens of the kernels, and of the reference; `spare` rows of logits exist beyond those that count."""
    device, count = logits.device, len(settings)
    rows = [count + 2 - i for i in range(count)]
    stored = make_settings(module, settings, rows, device)
    workspace = module.make_sampling_workspace(count + spare, VOCABULARY, device, candidates)
    arguments = {
        "rows": torch.tensor(rows + [0] * spare, dtype=torch.int32, device=device),
        "positions": torch.tensor(positions + [0] * spare, dtype=torch.int32, device=device),
        "num_rows": torch.tensor([count], dtype=torch.int32, device=device),
        "vocabulary": VOCABULARY,
    }
    expected = module.sample_reference(logits, stored, **arguments)
    tokens = torch.full((count + spare,), -7, dtype=torch.int32, device=device)
    by_row = torch.full((len(stored.seed),), -7, dtype=torch.int32, device=device)
    module.sample(
        logits.clone(), stored, workspace, token_ids=tokens, row_token_ids=by_row, filters=filters, **arguments
    )
    assert tokens[count:].tolist() == [-7] * spare
    assert by_row[torch.tensor(rows, device=device)].tolist() == tokens[:count].tolist()
    assert int((by_row == -7).sum()) == len(by_row) - count
    return tokens[:count].tolist(), expected.tolist()


def test_every_filter(device: torch.device, dtype: torch.dtype) -> None:
    logits = make_logits(len(SETTINGS) + 1, dtype).to(device)
    actual, expected = run(sampling, logits, SETTINGS, [3, 2**31 - 1, 5, 6, 7, 8, 9, 10])
    assert actual == expected


def test_many_draws_without_filters(device: torch.device) -> None:
    settings = [Setting(temperature=0.5 + 0.1 * i, seed=i, choice=i % 3) for i in range(20)]
    logits = make_logits(21, torch.float32, seed=1).to(device)
    actual, expected = run(sampling, logits, settings, list(range(20)), filters=False)
    assert actual == expected


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


def test_broken_logits_give_some_token(device: torch.device) -> None:
    logits = make_logits(4, torch.float32).to(device)
    logits[0] = torch.nan
    logits[1] = torch.inf
    logits[2] = -torch.inf
    stored = make_settings(sampling, [Setting(), Setting(top_p=0.5), Setting(temperature=0.0)], [0, 1, 2], device)
    tokens = torch.full((4,), -7, dtype=torch.int32, device=device)
    numbers = torch.arange(4, dtype=torch.int32, device=device)
    sampling.sample(
        logits,
        stored,
        sampling.make_sampling_workspace(4, VOCABULARY, device),
        rows=numbers,
        positions=numbers,
        num_rows=numbers[3:],
        vocabulary=VOCABULARY,
        token_ids=tokens,
        row_token_ids=tokens.clone(),
    )
    assert all(0 <= token < VOCABULARY for token in tokens[:3].tolist())


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


def test_generator_gives_the_published_words() -> None:
    """The known answers of Random123 for counter and key 0, and for all ones."""
    assert sampling.philox4x32(0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


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
        ("ids < VOCABULARY, ADJUSTED)\n    else", "ids < 20 + VOCABULARY, ADJUSTED)\n    else"),
        ("tile = tl.min(tl.where(peaks == highest, tiles, TILES - 1), axis=0)", "tile = tl.program_id(0) + TILES - 1"),
        ("tl.where(x == highest, places, TILE - 1)", "tl.where(x == highest, TILE - 1 - places, TILE - 1)"),
        ("before = tl.max(tl.where(tiles < tile", "before = tl.max(tl.where(tiles < tile - 1"),
        ("kept = tl.where(x >= threshold, weights, 0.0)", "kept = tl.where(x > threshold, weights, 0.0)"),
        ("(above + sums >= need)", "(above + sums + 1.0 >= need)"),
        ("0.0, nucleus * total, threshold", "0.0, nucleus, threshold"),
        ("tl.load(choice + row), 0)\n        if filtered", "tl.load(choice + row) + 1, 0)\n        if filtered"),
    ],
)  # fmt: skip
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    settings = [Setting(temperature=0.0), Setting(top_k=2, seed=4), Setting(top_p=0.6, choice=2), Setting(choice=5)]
    logits = make_logits(13, torch.float16, seed=3).to(device)
    logits[0, [40, 45, 1000]] = 20.0
    with mutant(sampling, tmp_path, right, wrong) as module:
        outcomes = []
        for start in (3, 4):
            actual, expected = run(module, logits, settings, [start] * 4)
            outcomes.append(actual == expected)
        assert not all(outcomes)
