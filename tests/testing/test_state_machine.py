"""Hundreds of runs of the scheduler's state machine, shared out by how far it runs ahead."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from asyncllm.testing.state_machine import SchedulerMachine
from asyncllm.testing.strategies import scheduler_configs


@pytest.mark.parametrize(("ahead", "examples"), [(0, 200), (1, 250), (2, 250)])
def test_scheduler_holds(ahead: int, examples: int) -> None:
    class Machine(SchedulerMachine):
        configs = scheduler_configs(run_ahead=(ahead,))

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
