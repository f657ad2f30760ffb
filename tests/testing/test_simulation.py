from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncllm.engine.plan import CacheGroup, RowSampling, StepPlan
from asyncllm.engine.scheduling.scheduler import RequestSpec, Scheduler, SchedulerConfig
from asyncllm.testing.simulation import Simulation
from asyncllm.testing.strategies import VOCABULARY, RequestShape, request_shapes, scheduler_configs

ROOMY = SchedulerConfig(
    max_num_seqs=8,
    max_batched_tokens=64,
    mixed_chunk_tokens=16,
    full_step_tokens=32,
    block_size=4,
    num_blocks=200,
    groups=(CacheGroup(),),
    max_model_len=48,
    run_ahead=0,
    prefix_caching=False,
)
VARIANTS = {
    "warm cache": {"prefix_caching": True},
    "run-ahead 1": {"run_ahead": 1, "prefix_caching": True},
    "run-ahead 2": {"run_ahead": 2, "prefix_caching": True},
    "small chunks": {"max_batched_tokens": 3, "prefix_caching": True},
    "one at a time": {"max_num_seqs": 1},
    "small chunks beside decoding rows": {"mixed_chunk_tokens": 1, "run_ahead": 1},
    "small full steps": {"mixed_chunk_tokens": 1, "full_step_tokens": 1, "max_num_seqs": 2, "run_ahead": 1},
    "filled steps": {"mixed_chunk_tokens": 1, "filled_steps": True, "run_ahead": 1},
    "small pool": {"num_blocks": 12, "run_ahead": 1, "prefix_caching": True},
    "windows": {"groups": (CacheGroup(), CacheGroup(5)), "run_ahead": 2, "num_blocks": 30, "prefix_caching": True},
}


def outputs(config: SchedulerConfig, shapes: list[RequestShape]) -> dict[int, tuple[list[int], str]]:
    """What each request gets, and how it ends; the simulation itself compares the ids with the reference."""
    simulation = Simulation(config, VOCABULARY)
    for request, shape in enumerate(shapes):
        for spec in shape.specs(10 * request, arrival=0.0, capacity=48):
            simulation.add(spec)
    simulation.finish()
    ended = {request: expected.ended for request, expected in simulation.requests.items()}
    return {r: (simulation.requests[r].output, end.reason.value) for r, end in ended.items() if end is not None}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=st.lists(request_shapes(), min_size=4, max_size=8))
def test_result_is_independent_of_everything_else(shapes: list[RequestShape]) -> None:
    shapes = [replace(shape, patience=None) for shape in shapes]
    expected = outputs(ROOMY, shapes)
    assert len(expected) == sum(shape.choices for shape in shapes)
    for name, changes in VARIANTS.items():
        assert outputs(replace(ROOMY, **changes), shapes) == expected, name


def random_specs(dice: random.Random, capacity: int) -> Iterator[RequestSpec]:
    """Requests that often begin alike, of up to 60 tokens."""
    beginnings = [[dice.randrange(VOCABULARY) for _ in range(40)] for _ in range(3)]
    request = 0
    while True:
        prompt = dice.choice(beginnings)[: dice.choice((0, 8, 16, 40))] + [
            dice.randrange(VOCABULARY) for _ in range(dice.choice((0, 1, 5, 20)))
        ]
        yield RequestSpec(
            request=request,
            token_ids=np.array(prompt[: capacity - 1] or [request % VOCABULARY], dtype=np.int32),
            sampling=RowSampling(dice.choice((0.0, 1.0)), 0, 1.0, 0.0, seed=dice.randrange(4)),
            max_tokens=dice.randint(1, 60),
            min_tokens=0,
            stop_token_ids=frozenset(dice.sample(range(VOCABULARY), dice.choice((0, 0, 0, 0, 1)))),
            arrival=request / 10,
            priority=dice.choice((0, 0, 0, 1, -1)),
            deadline=dice.choice((None, None, None, None, request / 10 + 1)),
            cache_salt=dice.choice((None, None, "a")),
        )
        request += 1


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 12)], ids=["full", "full and window"])
def test_storm_of_cancels_leaks_nothing(run_ahead: int, windows: tuple[int | None, ...]) -> None:
    """Half of the requests are aborted at a random moment of their lives; steps fail now and then."""
    dice = random.Random(run_ahead)
    config = SchedulerConfig(
        max_num_seqs=8,
        max_batched_tokens=40,
        mixed_chunk_tokens=16,
        full_step_tokens=16,
        block_size=8,
        num_blocks=14 * len(windows),
        groups=tuple(CacheGroup(window) for window in windows),
        max_model_len=100,
        run_ahead=run_ahead,
    )
    simulation = Simulation(config, VOCABULARY)
    specs = random_specs(dice, config.capacity)
    for _ in range(80):
        simulation.add(next(specs))
        simulation.wait(0.1)
        simulation.run(dice.randint(0, 4))
        simulation.launch()
        if dice.random() < 0.4 and simulation.live:
            simulation.abort(dice.choice(simulation.live))
        if dice.random() < 0.04 and simulation.steps_in_flight:
            simulation.fail(dice.choice(simulation.steps_in_flight))
    simulation.finish()
    reasons = {str(expected.ended.reason) for expected in simulation.requests.values() if expected.ended is not None}
    assert reasons == {"stop", "length", "abort", "deadline"}
    assert simulation.scheduler.counts().preemptions > 0
    assert simulation.scheduler.counts().prompt_tokens_cached > 0


@given(config=scheduler_configs(), shape=request_shapes())
def test_shapes_fit_their_configuration(config: SchedulerConfig, shape: RequestShape) -> None:
    spec = shape.spec(3, arrival=1.0, capacity=config.capacity)
    Scheduler(config).add(spec)
    assert len(spec.token_ids) < config.capacity


class Forgetful(Scheduler):
    """Plans otherwise every second time: as if it had looked at a clock."""

    instances = 0

    def __init__(self, config: SchedulerConfig) -> None:
        Forgetful.instances += 1
        super().__init__(replace(config, max_batched_tokens=2) if Forgetful.instances % 2 == 0 else config)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_a_fork_whose_copy_has_failed_fails_with_it(late: bool, run_ahead: int) -> None:
    """Late ones have no other part in the step that copies: the host has not said its word."""
    simulation = Simulation(replace(ROOMY, run_ahead=run_ahead), VOCABULARY)
    sampling = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, late=late)
    first = RequestSpec(
        request=0,
        token_ids=np.array([1, 2, 3, 4, 5, 6], np.int32),
        sampling=sampling,
        max_tokens=8,
        min_tokens=0,
        stop_token_ids=frozenset(),
        arrival=0.0,
    )
    fork = replace(first, request=1, sampling=replace(sampling, choice=1), fork_of=0)
    other = replace(first, request=2, token_ids=np.array([3, 3], np.int32))
    simulation.add(first)
    simulation.add(fork)
    simulation.launch()
    simulation.complete()
    simulation.add(other)
    plan = simulation.launch()
    assert plan is not None
    assert len(plan.copies) == 1
    simulation.fail(plan.step)
    assert simulation.requests[1].failed
    assert simulation.requests[0].failed is not late  # it goes on in a block of its own
    simulation.finish()


def test_replay_finds_a_scheduler_that_is_not_deterministic() -> None:
    simulation = Simulation(ROOMY, VOCABULARY, Forgetful)
    simulation.add(next(random_specs(random.Random(3), 40)))
    with pytest.raises(AssertionError, match="replayed plan differs"):
        simulation.finish()


class HoldsUp(Scheduler):
    """Computes a prompt in as few steps as there is room for, whoever decodes meanwhile."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, mixed_chunk_tokens=config.max_batched_tokens))


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_scheduler_that_holds_rows_up_is_found(run_ahead: int) -> None:
    config = replace(ROOMY, mixed_chunk_tokens=4, run_ahead=run_ahead)
    shape = RequestShape(0, 0, 1, 40, 0, frozenset(), None, 0, None, None)
    for kind in (Scheduler, HoldsUp):
        simulation = Simulation(config, VOCABULARY, kind)
        for request in range(6):
            simulation.add(shape.spec(request, arrival=0.0, capacity=48))
        simulation.run(4)
        simulation.add(replace(shape, own=40, max_tokens=4).spec(6, arrival=0.0, capacity=48))
        if kind is Scheduler:
            simulation.finish()
        else:
            with pytest.raises(AssertionError, match="6 rows are held up by 40 tokens"):
                simulation.finish()


class Sleeper(Scheduler):
    """Never plans anything."""

    def schedule(self, now: float) -> StepPlan | None:
        return None


def test_a_scheduler_that_stops_is_found() -> None:
    simulation = Simulation(ROOMY, VOCABULARY, Sleeper)
    simulation.add(next(random_specs(random.Random(3), 40)))
    with pytest.raises(AssertionError, match="nothing is planned"):
        simulation.finish()


def test_only_the_strategies_need_hypothesis() -> None:
    code = "import sys, asyncllm.testing.simulation; sys.exit('hypothesis' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
