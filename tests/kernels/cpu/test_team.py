"""How large a team is, by what the last ones took."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.matrix import KernelMatrix, aligned, kernel_product, pack_bfloat16
from asyncllm.kernels.cpu.team import TeamSize, TeamTime


class Machine:
    """A processor that lets kernels take what a test says; a call alone takes eight milliseconds."""

    def __init__(self, team_speed: float, lost: float) -> None:
        self.now, self.team_speed, self.lost = 0.0, team_speed, lost
        self.team = TeamSize(lambda: self.now)

    def run(self, calls: int) -> list[int]:
        """The sizes of the teams, of eight threads, that so many steps of two kinds were computed by."""
        sizes: list[int] = []

        def kernel(threads: int, seconds: float) -> TeamTime:
            sizes.append(threads)
            self.now += seconds / (1.0 + (threads - 1) * self.team_speed)
            return TeamTime(self.lost if threads > 1 else 0.0)

        for _ in range(calls):
            self.team.run(lambda threads: kernel(threads, 0.008), "layers")
            self.team.run(lambda threads: kernel(threads, 0.002), "head")
            self.team.run(lambda threads: kernel(threads, 0.001))
        return sizes


@pytest.fixture(autouse=True)
def eight_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "library" not in request.fixturenames:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)


def test_a_team_that_loses_little_stays() -> None:
    assert set(Machine(0.9, lost=0.3).run(500)) == {8}


def test_one_that_loses_much_and_is_the_fastest_stays() -> None:
    sizes = Machine(0.3, lost=0.6).run(5000)
    assert sizes.count(8) > 0.9 * len(sizes)
    assert set(sizes) == {8, 4}  # which was tried


def test_one_that_is_slower_than_a_thread_shrinks_to_it_and_grows_again() -> None:
    machine = Machine(-0.1, lost=0.9)
    sizes = machine.run(3000)
    assert sizes[-1] == 1
    assert sizes.count(1) > 0.85 * len(sizes)
    machine.team_speed, machine.lost = 0.9, 0.0
    assert set(machine.run(5000)[-1000:]) == {8}


def test_one_bad_call_says_little() -> None:
    machine, sizes = Machine(0.9, lost=0.0), []
    for step in range(200):
        machine.lost = float(step % 8 == 0)
        sizes += machine.run(1)
    assert set(sizes) == {8}


def test_a_trial_of_other_calls_is_given_up() -> None:
    machine = Machine(-0.1, lost=0.9)
    assert machine.run(2)[-1] == 4
    for kind in range(220):  # none of which was before
        machine.team.run(lambda threads: TeamTime(0.9), kind)
    assert machine.run(1)[0] == 8


def test_a_call_from_before_a_trial_is_no_part_of_it() -> None:
    """Of another engine of the process."""
    machine = Machine(-0.1, lost=0.9)

    def kernel(threads: int) -> TeamTime:
        assert machine.run(2)[-1] == 4  # a trial
        machine.now += 100.0
        return TeamTime(0.9)

    machine.team.run(kernel, "layers")
    assert max(machine.run(8)) == 4


def test_kinds_are_forgotten_before_they_are_many() -> None:
    machine = Machine(0.9, lost=0.0)
    for kind in range(2500):
        machine.team.run(lambda threads: TeamTime(0.0), kind)
        assert len(machine.team._seconds) <= 1000


def test_threads_without_a_processor_are_told(library: Library) -> None:
    """A team of more threads than processors waits for those that do not run."""
    weight = torch.randn(1024, 256).bfloat16()
    blocks = pack_bfloat16(weight)
    matrix = KernelMatrix(aligned(blocks.nbytes).copy_(blocks), None, 1024, 256, 16, None)
    told: list[float] = []

    class Noted(TeamSize):
        def _note(self, trial: object, kind: object, took: TeamTime, seconds: float) -> None:
            told.append(took.lost)

    noted = replace(library, team=Noted())
    before = torch.get_num_threads()

    def compute() -> None:  # torch keeps a number of threads for each thread
        torch.set_num_threads(4 * (os.cpu_count() or 1))
        expected = (torch.ones(2, 256).bfloat16() @ weight.T).float()
        for _ in range(50):
            found = kernel_product(noted, torch.ones(2, 256).bfloat16(), matrix, dtype=torch.float32)
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.5)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert len(told) == 50
    assert all(0.0 <= lost <= 1.0 for lost in told)
    assert max(told) > 0.05
