"""Threads that join a step late: after each of its barriers, with the same results to the bit.

The kernels are compiled anew for it, with threads that wait until a test lets them join.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.decoder import Draws
from asyncllm.kernels.cpu.team import TeamSize
from tests.kernels.cpu.altered_sources import altered
from tests.kernels.cpu.test_decoder import CASES, LAYERS, Model
from tests.kernels.cpu.test_logits import Steps, no_logits, some_draws

pytestmark = pytest.mark.full

DELAYS = [
    (
        "team.h",
        "namespace asyncllm {\n",
        "namespace asyncllm {\ninline std::uint64_t late[8], turns;  // that threads wait for; of the last team\n",
    ),
    (
        "team.h",
        "  std::uint64_t stalled() const",
        "  std::uint64_t past() const { return state_.load() / kTurn; }\n  std::uint64_t stalled() const",
    ),
    (
        "team.h",
        "    if (threads > 1) progress->joined",
        "    while (barrier->past() < late[thread]) sched_yield();\n    if (threads > 1) progress->joined",
    ),
    ("team.h", "  const auto others = ", "  turns = call.barrier.past();\n  const auto others = "),
    (
        "decoder.cpp",
        'extern "C" {\n',
        'extern "C" {\nvoid asyncllm_delay(int64_t thread, int64_t until) { late[thread] = until; }\n'
        "int64_t asyncllm_turns() { return turns; }\n",
    ),
]
"""Edits of the sources."""
FAULTS = [
    ("team.h", "* (from_end ? kBehind : 1)", "* 1"),
    ("decoder.cpp", "team_.divide(rows, kRowsAtOnce, put_rows)", "put_rows(rows * team_.thread / 2, rows)"),
    ("decoder.cpp", "function(first + task / tasks", "if (team_.thread == task % 2) function(first + task / tasks"),
]


def of_one_size(library: Library) -> Library:
    """With a team that stays: a thread that is alone would wait for ever."""
    return replace(library, team=TeamSize(clock=lambda: -1.0))


@pytest.fixture(scope="module")
def compiled(compiled: Library, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """In place of the package's own; where it has none, the tests are skipped."""
    return of_one_size(altered(tmp_path_factory.mktemp("delayed"), DELAYS))


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Two, or as many as the test says."""
    before, count = torch.get_num_threads(), getattr(request, "param", 2)
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


def delay(library: Library, thread: int, until: int) -> None:
    library.functions.asyncllm_delay(ctypes.c_int64(thread), ctypes.c_int64(until))


def joined_late(library: Library, threads: int, compute: Callable[[], list[Tensor]], turns: int) -> None:
    """Each thread by itself, and all but the first, once the others have waited so many times: up to the last.

    `turns`: barriers that there are at least.
    """
    expected = compute()
    last = library.functions.asyncllm_turns()
    assert last >= turns
    late = [[thread] for thread in range(threads)] + ([[*range(1, threads)]] if threads > 2 else [])
    for until in range(1, last):
        for some in late:
            for thread in some:
                delay(library, thread, until)
            try:
                found = compute()
            finally:
                for thread in some:
                    delay(library, thread, 0)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (until, some)


def steps_of_single_tokens(library: Library, threads: int, rows: int) -> None:
    steps = Steps(library, rows, 4)
    before = [cache.clone() for cache in steps.model.caches]

    def compute(wanted: Tensor | Draws) -> list[Tensor]:
        for cache, kept in zip(steps.model.caches, before, strict=True):
            cache.copy_(kept)
        step = steps.describe(wanted)
        steps.model.kernel(step)
        found = wanted.token_ids if isinstance(wanted, Draws) else wanted
        return [step.residual, found, *(cache.clone() for cache in steps.model.caches)]

    joined_late(library, threads, lambda: compute(some_draws(rows)), 5 * LAYERS + 3)
    joined_late(library, threads, lambda: compute(no_logits(rows)), 5 * LAYERS + 2)


@pytest.mark.parametrize("threads", [2, 3], indirect=True)
@pytest.mark.parametrize("rows", [1, 3, 16, 33])
def test_steps_of_single_tokens(library: Library, threads: int, rows: int) -> None:
    """Layers, logits and draws."""
    steps_of_single_tokens(library, threads, rows)


@pytest.mark.parametrize("threads", [2, 3], indirect=True)
@pytest.mark.parametrize("name", ["smollm2", "window", "small blocks"])
def test_chunks_beside_single_tokens(library: Library, threads: int, name: str) -> None:
    """Of so many tokens that they are multiplied some after others."""
    model = Model(library, CASES[name], 3, 400)
    for row, length in enumerate((40, 3, 20)):
        model.run([(row, 0, length)])
    before = [cache.clone() for cache in model.caches]

    def compute() -> list[Tensor]:
        for cache, kept in zip(model.caches, before, strict=True):
            cache.copy_(kept)
        found = model.run([(0, 40, 1), (1, 3, 33), (2, 20, 350)])
        return [found, *(cache.clone() for cache in model.caches)]

    joined_late(library, threads, compute, 6 * LAYERS + 2)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2])
def test_planted_fault_is_caught(compiled: Library, fault: tuple[str, str, str], tmp_path: Path) -> None:
    faulty = of_one_size(altered(tmp_path, [*DELAYS, fault]))
    with pytest.raises(AssertionError):
        steps_of_single_tokens(faulty, 2, 9)
