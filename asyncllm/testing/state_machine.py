"""SchedulerMachine: hypothesis drives a scheduler through anything that can happen to it.

Requests come and are aborted, time passes, steps are launched, complete late or fail, the host says its word about late
requests, in any order; after each event
everything is checked that `Simulation` can check, and at the end of each run all requests are brought to their end.

```python
TestScheduler = SchedulerMachine.TestCase  # under pytest or unittest
```

A scheduler of your own, or with a fault to find, is a subclass with `scheduler_type`. Needs the `testing` extra.
"""

from __future__ import annotations

import sys
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.testing.simulation import Simulation
from asyncllm.testing.strategies import VOCABULARY, RequestShape, request_shapes, scheduler_configs

_ANY = st.integers(0, 2**16)  # picks one of however many there are


class SchedulerMachine(RuleBasedStateMachine):
    """A simulation whose events hypothesis chooses."""

    scheduler_type: ClassVar[type[Scheduler]] = Scheduler
    configs: ClassVar[st.SearchStrategy[SchedulerConfig]] = scheduler_configs()

    simulation: Simulation

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """A new scheduler and a new device."""
        self.simulation = Simulation(data.draw(self.configs), VOCABULARY, self.scheduler_type)

    def _add(self, shape: RequestShape, earlier: list[int] | None = None) -> None:
        simulation = self.simulation
        specs = shape.specs(
            len(simulation.requests), arrival=simulation.now, capacity=simulation.config.capacity, earlier=earlier
        )
        for spec in specs:
            simulation.add(spec)

    @rule(shapes=st.lists(request_shapes(), min_size=1, max_size=3))
    def add(self, shapes: list[RequestShape]) -> None:
        """Requests arrive."""
        for shape in shapes:
            self._add(shape)

    @precondition(lambda self: self.simulation.requests)
    @rule(shape=request_shapes(), which=_ANY)
    def follow_up(self, shape: RequestShape, which: int) -> None:
        """A request arrives whose prompt goes on from what another was given."""
        requests = list(self.simulation.requests.values())
        self._add(shape, requests[which % len(requests)].history)

    @rule()
    def launch(self) -> None:
        """One more step is launched, if it may be."""
        self.simulation.launch()

    @rule()
    def complete(self) -> None:
        """The oldest launched step completes, if there is one."""
        self.simulation.complete()

    @rule()
    def complete_late(self) -> None:
        """The late tokens of the oldest launched step are there, and its result is not."""
        self.simulation.complete_late()

    @precondition(lambda self: any(self.simulation.requests[r].awaiting for r in self.simulation.live))
    @rule(which=_ANY)
    def speak(self, which: int) -> None:
        """The host says its word about the next token of a late request."""
        awaiting = [request for request in self.simulation.live if self.simulation.requests[request].awaiting]
        self.simulation.speak(awaiting[which % len(awaiting)])

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        """The engine's loop goes round."""
        self.simulation.run(steps)

    @precondition(lambda self: self.simulation.requests)
    @rule(which=_ANY)
    def abort(self, which: int) -> None:
        """A request is aborted, which may have ended already."""
        self.simulation.abort(which % len(self.simulation.requests))

    @rule(which=_ANY)
    def fail(self, which: int) -> None:
        """Another step is launched, if it may be; then a launched step fails, and those after it."""
        self.simulation.launch()
        steps = self.simulation.steps_in_flight
        if steps:
            self.simulation.fail(steps[which % len(steps)])

    @rule(seconds=st.sampled_from((0.5, 2.0)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.simulation.wait(seconds)

    def teardown(self) -> None:
        """Bring everything to its end, unless a fault was found already."""
        if sys.exc_info()[0] is None and hasattr(self, "simulation"):
            self.simulation.finish()
