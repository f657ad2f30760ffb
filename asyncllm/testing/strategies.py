"""Hypothesis strategies for the scheduler: small configurations, and requests that get in each other's way.

Sizes are small on purpose: pools that overflow, windows shorter than prompts, prompts that share beginnings and end
on and beside the borders of blocks. Needs the `testing` extra.

```python
@given(scheduler_configs(), st.lists(request_shapes(), max_size=8))
def test_my_scheduler(config, shapes):
    simulation = Simulation(config, VOCABULARY)
    for request, shape in enumerate(shapes):
        simulation.add(shape.spec(request, arrival=0.0, capacity=config.capacity))
    simulation.finish()
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from asyncllm.engine.plan import CacheGroup, RowSampling
from asyncllm.engine.scheduling.request import RequestSpec
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig

VOCABULARY = 7
"""Ids of the tiny vocabulary: 0 to 6. So few that stop ids come up, and prompts agree by chance."""

_SHARED = ((1, 0, 2, 2, 1, 0, 0, 2), (1, 0, 2, 2, 1, 1, 1, 0))
_WINDOWS = (2, 3, 4, 5, 7)


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a request looks like, apart from who and when."""

    family: int  # prompts of a family have the same beginning
    shared: int  # this many tokens of it
    own: int  # tokens of its own after that
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    seed: int | None  # None is greedy
    priority: int
    patience: float | None  # seconds from arrival to deadline
    cache_salt: str | None
    late: bool = False  # each token waits for the host's word

    choices: int = 1  # so many requests of this prompt, the others further choices of the first

    def specs(
        self, request: int, *, arrival: float, capacity: int, earlier: Sequence[int] | None = None
    ) -> list[RequestSpec]:
        """As `spec`, and its further choices, whose ids follow."""
        first = self.spec(request, arrival=arrival, capacity=capacity, earlier=earlier)
        return [first, *(fork_spec(first, choice) for choice in range(1, self.choices))]

    def spec(self, request: int, *, arrival: float, capacity: int, earlier: Sequence[int] | None = None) -> RequestSpec:
        """The request of this shape; its prompt is cut so that it fits `capacity` tokens with one to generate.
        `earlier` is another beginning than the family's, such as the history of a request before it."""
        family = _SHARED[self.family]
        beginning = [family[i % len(family)] for i in range(self.shared)] if earlier is None else list(earlier)
        own = [(request + i) % VOCABULARY for i in range(self.own)]
        prompt = np.array([*beginning, *own][: capacity - 1] or [request % VOCABULARY], dtype=np.int32)
        min_tokens = min(self.min_tokens, self.max_tokens)
        return RequestSpec(
            request=request,
            token_ids=prompt,
            sampling=RowSampling(
                temperature=0.0 if self.seed is None else 1.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                seed=self.seed or 0,
                suppress_before=len(prompt) + min_tokens if self.stop_token_ids else 0,
                suppressed=tuple(sorted(self.stop_token_ids)),
                late=self.late,
            ),
            max_tokens=self.max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=self.stop_token_ids,
            arrival=arrival,
            priority=self.priority,
            deadline=None if self.patience is None else arrival + self.patience,
            cache_salt=self.cache_salt,
        )


def fork_spec(spec: RequestSpec, choice: int) -> RequestSpec:
    """A further choice of this request; its id is so much higher."""
    sampling = replace(spec.sampling, choice=choice)
    return replace(spec, request=spec.request + choice, sampling=sampling, fork_of=spec.request)


def request_shapes() -> st.SearchStrategy[RequestShape]:
    """Short prompts, often with a shared beginning; now and then a stop id, a deadline, a salt, a late
    request, or several choices of one."""
    return st.builds(
        RequestShape,
        family=st.integers(0, 1),
        shared=st.sampled_from((4, 2, 0, 3, 6, 8, 12)),
        own=st.sampled_from((0, 0, 1, 3)),
        max_tokens=st.sampled_from((20, 20, 16, 9, 2, 1)),
        min_tokens=st.sampled_from((0, 0, 2)),
        stop_token_ids=st.sampled_from(
            (frozenset[int](), frozenset[int](), frozenset[int](), frozenset((3,)), frozenset((4, 5)))
        ),
        seed=st.sampled_from((None, None, 0, 1)),
        priority=st.sampled_from((0, 0, 0, 1, -1)),
        patience=st.sampled_from((None, None, None, None, None, None, 0.0, 4.0)),
        cache_salt=st.sampled_from((None, None, None, "a")),
        late=st.sampled_from((False, False, True)),
        choices=st.sampled_from((1, 1, 1, 2, 3)),
    )


def cache_groups() -> st.SearchStrategy[tuple[CacheGroup, ...]]:
    """One full group most of the time; windows beside it, or alone."""
    window = st.builds(CacheGroup, st.sampled_from(_WINDOWS))
    full = st.just(CacheGroup())
    return st.one_of(
        st.tuples(full), st.tuples(full), st.tuples(window), st.tuples(full, window), st.tuples(window, full, window)
    )


@st.composite
def scheduler_configs(draw: st.DrawFn, run_ahead: Sequence[int] = (0, 1, 2)) -> SchedulerConfig:
    """Few rows, small blocks, and a pool that holds from two blocks a group to about all that is asked for."""
    groups = draw(cache_groups())
    return SchedulerConfig(
        max_num_seqs=draw(st.sampled_from((4, 5, 3, 2, 1))),
        max_batched_tokens=draw(st.sampled_from((4, 12, 7, 2, 16, 1))),
        mixed_chunk_tokens=draw(st.sampled_from((2, 1, 64))),
        full_step_tokens=draw(st.sampled_from((8, 1, 64))),
        filled_steps=draw(st.booleans()),
        block_size=draw(st.sampled_from((2, 4, 3))),
        num_blocks=len(groups) * draw(st.sampled_from((8, 10, 6, 5, 14, 4, 2))),
        groups=groups,
        max_model_len=draw(st.sampled_from((40, 40, 40, 33, 17, 3))),
        run_ahead=draw(st.sampled_from(run_ahead)),
        prefix_caching=draw(st.sampled_from((True, True, True, False))),
        ageing_seconds=draw(st.sampled_from((1.0, 10.0))),
    )
