from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.testing.state_machine import SchedulerMachine
from tests.testing import planted_faults

FAULTY = [
    kind
    for kind in vars(planted_faults).values()
    if isinstance(kind, type) and issubclass(kind, Scheduler) and kind is not Scheduler
]


def test_there_are_seventeen_faults() -> None:
    assert len(FAULTY) == 17


SLOW = [planted_faults.LogitsOutliveRow]
"""Found only after hundreds of runs."""
CASES = [pytest.param(faulty, marks=[pytest.mark.full] * (faulty in SLOW), id=faulty.__name__) for faulty in FAULTY]


@pytest.mark.parametrize("faulty", CASES)
def test_state_machine_finds(faulty: type[Scheduler]) -> None:
    """Within as many runs as the sound scheduler gets; it takes 50 on average, and which check it is varies."""

    class Machine(SchedulerMachine):
        scheduler_type = faulty

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=1000,
                stateful_step_count=25,
                deadline=None,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            ),
        )
