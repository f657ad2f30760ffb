"""How large a team is, by what the last ones have lost."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.matrix import KernelMatrix, aligned, kernel_product, pack_bfloat16
from asyncllm.kernels.cpu.team import TeamSize


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    return Clock()


def run(team: TeamSize, clock: Clock, lost: float, seconds: float = 0.005) -> int:
    sizes = []

    def kernel(threads: int) -> float:
        sizes.append(threads)
        clock.now += seconds
        return lost if threads > 1 else 0.0

    team.run(kernel)
    return sizes[0]


def test_a_team_that_loses_nothing_stays(clock: Clock) -> None:
    team = TeamSize(clock)
    assert [run(team, clock, 0.2) for _ in range(100)] == [8] * 100


def test_one_that_loses_most_of_its_time_shrinks_to_a_thread_and_is_tried_again(clock: Clock) -> None:
    team = TeamSize(clock)
    sizes = [run(team, clock, 0.9) for _ in range(2000)]  # ten seconds
    assert sizes[:50] == sorted(sizes[:50], reverse=True)
    assert sizes[49] == 1
    assert sizes.count(1) > 1700  # what is tried in between costs little
    assert 2 in sizes[-700:]
    sizes = [run(team, clock, 0.0) for _ in range(5000)]
    assert sizes[-1] == 8


def test_one_bad_call_says_little(clock: Clock) -> None:
    team = TeamSize(clock)
    assert [run(team, clock, float(i % 5 == 0), 0.03) for i in range(50)] == [8] * 50


def test_a_short_kernel_says_little(clock: Clock) -> None:
    team = TeamSize(clock)
    assert [run(team, clock, 1.0, 0.0001) for _ in range(20)] == [8] * 20


def test_threads_without_a_processor_are_told(library: Library) -> None:
    """A team of more threads than processors waits for those that do not run."""
    weight = torch.randn(1024, 256).bfloat16()
    blocks = pack_bfloat16(weight)
    matrix = KernelMatrix(aligned(blocks.nbytes).copy_(blocks), None, 1024, 256, 16, None)
    told: list[float] = []

    class Noted(TeamSize):
        def note(self, lost: float, seconds: float) -> None:
            told.append(lost)

    before = torch.get_num_threads()

    def compute() -> None:  # torch keeps a number of threads for each thread
        torch.set_num_threads(4 * (os.cpu_count() or 1))
        object.__setattr__(library, "team", Noted())
        expected = (torch.ones(2, 256).bfloat16() @ weight.T).float()
        for _ in range(50):
            found = kernel_product(library, torch.ones(2, 256).bfloat16(), matrix, dtype=torch.float32)
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.5)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert len(told) == 50
    assert all(0.0 <= lost <= 1.0 for lost in told)
    assert max(told) > 0.05
