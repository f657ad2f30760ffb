from __future__ import annotations

import pytest

from asyncllm.engine.step_pace import StepPace


def test_steps_of_a_size_take_as_long_as_before() -> None:
    pace = StepPace()
    pace.launched(64, 10.0)
    assert pace.busy_until() == 10.0  # nothing is known of such a step
    pace.launched(1, 10.1)
    pace.done(10.5)
    pace.done(10.52)
    pace.launched(64, 20.0)
    assert pace.busy_until() == pytest.approx(20.5)
    pace.launched(1, 20.1)
    pace.launched(65, 20.1)
    assert pace.busy_until() == pytest.approx(20.5 + 0.02 + 0.5)
    pace.done(20.4)
    assert pace.busy_until() == pytest.approx(20.4 + 0.02 + 0.4)  # the shorter of two guesses


def test_one_slow_step_does_not_make_the_next_ones_wait() -> None:
    pace = StepPace()
    for begin, seconds in ((0.0, 1.0), (10.0, 5.0)):
        pace.launched(8, begin)
        pace.done(begin + seconds)
    pace.launched(8, 20.0)
    assert 21.0 < pace.busy_until() < 22.5
