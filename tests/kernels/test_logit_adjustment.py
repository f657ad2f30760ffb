from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from asyncllm.engine.execution.logit_adjustment import LogitAdjustment
from asyncllm.engine.plan import RowJoin, RowSampling
from asyncllm.kernels import logit_adjustment, sampling
from asyncllm.kernels.sampled_rows import ADJUSTS, COUNTS, MASKS, NO_TOKEN, AdjustedLogits
from tests.kernels.adjusted_rows import (
    ROWS,
    VOCABULARY,
    Case,
    joined,
    make_logits,
    records_of,
    row_of,
    rows_of,
    settings_of,
)
from tests.kernels.mutants import mutant

SEEN = ((7, 2), (250, 0), (8, 1), (299, 5))
CASES = [
    Case(),
    Case(duties=ADJUSTS, biases=((3, 2.5), (299, -1.0), (8, 100.0))),
    Case(duties=ADJUSTS | COUNTS, repetition=1.3, frequency=0.5, presence=-1.0, seen=SEEN, counted=60),
    Case(duties=ADJUSTS | MASKS, allowed=(3, 31, 32, 64, 299), biases=((64, 3.0), (65, 50.0))),
    Case(
        duties=ADJUSTS | COUNTS | MASKS,
        allowed=tuple(range(0, 300, 2)),
        suppressed=(8, 250),
        biases=((8, 4.0), (10, 2.0)),
        seen=SEEN,
        repetition=0.7,
        presence=0.3,
        counted=55,
    ),
    Case(suppressed=(1, 2)),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every loop turns more than once."""
    monkeypatch.setattr(logit_adjustment, "_BLOCK", 2)
    monkeypatch.setattr(logit_adjustment, "_SPREAD", 128)


def adjust(module: ModuleType, cases: list[Case], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernels, and by the reference; what nobody writes is 7."""
    device = logits.device
    state, settings, where = joined(cases, device), settings_of(cases, device), rows_of(cases, device)
    results = []
    for function in (module.adjust_logits, module.adjust_logits_reference):
        adjusted = torch.full(logits.shape, 7.0, device=device)
        function(adjusted, logits, where, settings, state)
        results.append(adjusted)
    return results[0], results[1]


def test_adjusted_logits(device: torch.device, dtype: torch.dtype) -> None:
    logits = make_logits(len(CASES), dtype, device)
    before = logits.clone()
    actual, expected = adjust(logit_adjustment, CASES, logits)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)
    untouched = [0, 5, 6]  # rows without a duty, and the one beyond those that count
    assert bool((actual[untouched] == 7).all())
    assert bool((actual[:, VOCABULARY:] == 7).all())


def test_equals_the_cpu(device: torch.device) -> None:
    case = Case(duties=ADJUSTS | COUNTS, repetition=1.7, frequency=0.25, presence=0.5, seen=((5, 2), (9, 0), (11, 1)))
    logits = make_logits(1, torch.float32, device)
    actual, _ = adjust(logit_adjustment, [replace(case, biases=((9, 1.5), (20, -3.0)))], logits)
    sampling = RowSampling(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        repetition_penalty=1.7,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        logit_bias=((9, 1.5), (20, -3.0)),
    )
    history = np.array([9, 9, 5, 11, 5], np.int32)
    cpu = LogitAdjustment.of(RowJoin(0, 0, sampling, prompt_tokens=2, history=history), VOCABULARY)
    assert cpu is not None
    expected = logits[0, :VOCABULARY].cpu().clone()
    cpu.apply(expected)
    torch.testing.assert_close(actual[0, :VOCABULARY].cpu(), expected, rtol=1e-6, atol=1e-6)


def check_joins(module: ModuleType, device: torch.device) -> None:
    records, words = (each.to(device) for each in records_of(CASES))
    states = []
    for function in (module.join_adjustments, module.join_adjustments_reference):
        state = joined([replace(CASES[4], seen=((1, 1),))] * 6, device)
        function(state, records, words)
        states.append(state)
    for name in ("fields", "biased", "biases", "seen", "seen_counts", "masks"):
        assert torch.equal(getattr(states[0], name), getattr(states[1], name)), name


def test_joins(device: torch.device) -> None:
    check_joins(logit_adjustment, device)


def check_counts(module: ModuleType, device: torch.device) -> None:
    """Known and new tokens, positions that are counted already, and rows that count nothing."""
    cases = [
        Case(duties=ADJUSTS | COUNTS, seen=SEEN, counted=50),
        Case(duties=ADJUSTS | COUNTS, seen=SEEN, counted=51),
        Case(duties=ADJUSTS, seen=SEEN),
        Case(duties=ADJUSTS | COUNTS, seen=SEEN, counted=90),
        Case(duties=ADJUSTS | COUNTS),
    ]
    where = rows_of(cases, device)
    states = [joined(cases, device), joined(cases, device)]
    for turn in range(3):
        ids = [299, 100 + turn % 2, 8, 8, 44 if turn else NO_TOKEN, 5]
        tokens = torch.tensor(ids, dtype=torch.int32, device=device)
        module.count_tokens(states[0], tokens, where)
        module.count_tokens_reference(states[1], tokens, where)
        where.positions.add_(1)
    for name in ("fields", "seen", "seen_counts"):
        assert torch.equal(getattr(states[0], name), getattr(states[1], name)), name
    row = row_of(1)
    assert states[0].seen[row, :6].tolist() == [7, 250, 8, 299, 100, 101]
    assert states[0].seen_counts[row, :6].tolist() == [2, 0, 1, 5, 2, 1]
    assert states[0].integers("num_seen")[row_of(4)] == 1


def test_drawn_tokens_are_counted(device: torch.device) -> None:
    check_counts(logit_adjustment, device)


def test_draws_are_those_of_adjusted_logits(device: torch.device, dtype: torch.dtype) -> None:
    """Beside rows that adjust nothing; greedy, drawn, filtered."""
    cases = [
        replace(CASES[i % len(CASES)], temperature=0.0 if i % 3 == 0 else 1.0, top_k=(0, 4)[i % 2], seed=i)
        for i in range(ROWS)
    ]
    logits = make_logits(len(cases), dtype, device)
    state, settings, where = joined(cases, device), settings_of(cases, device), rows_of(cases, device)
    adjusted = torch.full(logits.shape, torch.nan, device=device)
    logit_adjustment.adjust_logits(adjusted, logits, where, settings, state)
    mixed = logits.float()
    logit_adjustment.adjust_logits_reference(mixed, logits, where, settings, state)
    expected = sampling.sample_reference(mixed, where, settings)
    tokens = torch.full((len(cases) + 1,), -7, dtype=torch.int32, device=device)
    sampling.sample(
        logits,
        where,
        settings,
        sampling.make_sampling_workspace(len(cases) + 1, VOCABULARY, device),
        token_ids=tokens,
        row_token_ids=torch.zeros(ROWS, dtype=torch.int32, device=device),
        adjusted=AdjustedLogits(state.integers("duties"), adjusted),
    )
    assert tokens[:-1].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if (duty == 0) | ((duty & SKIP) != 0):\n        return\n    ids", "if duty == 3:\n        return\n    ids"),
        ("(word >> (ids % 32)) & 1", "(word >> (ids % 31)) & 1"),
        ("tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)", "tl.div_rn(x, factor)"),
        ("tl.where(times > 0, for_any, 0.0)", "for_any"),
        ("x + tl.load(biases + places", "tl.load(biases + places"),
        ("x -= for_each * times.to(tl.float32)", "x -= for_each"),
        ("if tl.load(positions + index) < tl.load(suppress_before + row)", "if tl.load(positions + index) < 0"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    logits = make_logits(len(CASES), torch.float32, device)
    with mutant(logit_adjustment, tmp_path, right, wrong) as module:
        actual, expected = adjust(module, CASES, logits)
        assert not torch.allclose(actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


JOIN_FAULTS = [
    ("records + tl.program_id(0) * _WORDS", "records"),
    ("fields + lines * rows + row", "fields + lines * rows + row + 1"),
    ("_copy(biased + row.to(tl.int64) * most_biases", "_copy(biased + row.to(tl.int64) // 2 * most_biases"),
    ("words, first + count, count, BLOCK)\n    count =", "words, first, count, BLOCK)\n    count ="),
    ("_copy(seen_counts + row.to(tl.int64) * most_seen", "_copy(seen_counts + row.to(tl.int64)"),
    ("tl.load(record + _FIRST_MASK), mask_words", "tl.load(record + _FIRST_MASK) + 1, mask_words - 1"),
    ("tl.load(source + first + places,", "tl.load(source + first + places // 2,"),
    ("start + tl.arange(0, BLOCK)\n        tl.store(target", "tl.arange(0, BLOCK)\n        tl.store(target"),
]
COUNT_FAULTS = [
    ("(position < tl.load(counted + row))", "(position <= tl.load(counted + row))"),
    ("if token < 0:", "if token < -9:"),
    ("seen += row.to(tl.int64) * MOST_SEEN", "seen += row.to(tl.int64) // 2 * MOST_SEEN"),
    ("places = start + tl.arange(0, BLOCK)\n        same", "places = tl.arange(0, BLOCK)\n        same"),
    ("mask=places < count, other=-1)", "mask=places < count - 1, other=-1)"),
    ("tl.where(is_new, count, place)", "tl.where(is_new, count - 1, place)"),
    ("tl.store(counted + row, position + 1)", "tl.store(counted + row, position + 2)"),
]


@pytest.mark.parametrize(
    ("check", "fault"),
    [*((check_joins, fault) for fault in JOIN_FAULTS), *((check_counts, fault) for fault in COUNT_FAULTS)],
)
def test_planted_fault_in_state_is_caught(
    check: Callable[[ModuleType, torch.device], None],
    fault: tuple[str, str],
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mutant(logit_adjustment, tmp_path, *fault) as module:
        monkeypatch.setattr(module, "_BLOCK", 2)  # as the fixture does for the module that this is a copy of
        with pytest.raises(AssertionError):
            check(module, device)
