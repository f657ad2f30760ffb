"""Property-testing the scheduler: hypothesis invents loads, and a shadow of the device checks every step.

Run it with `pytest examples/property_test.py`, or as a script.
"""

import unittest

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.testing.simulation import Simulation
from asyncllm.testing.state_machine import SchedulerMachine
from asyncllm.testing.strategies import VOCABULARY, RequestShape, request_shapes, scheduler_configs

SETTINGS = settings(max_examples=25, deadline=None)

# Anything may happen, in any order: arrivals, aborts, steps that complete late or fail. All is checked after each.
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS


class TestLoad(unittest.TestCase):
    """A property of one's own: whatever comes, every request gets its tokens and the pool is empty at the end."""

    @SETTINGS
    @given(config=scheduler_configs(), shapes=st.lists(request_shapes(), min_size=1, max_size=8))
    def test_every_request_is_served(self, config: SchedulerConfig, shapes: list[RequestShape]) -> None:
        simulation = Simulation(config, VOCABULARY)
        for request, shape in enumerate(shapes):
            simulation.add(shape.spec(request, arrival=0.0, capacity=config.capacity))
        simulation.finish()
        assert all(expected.ended is not None for expected in simulation.requests.values())
        assert simulation.scheduler.counts().blocks_used == 0


if __name__ == "__main__":
    unittest.main()
