from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.scheduling.ordered_queue import OrderedQueue

KEYS = st.tuples(st.integers(-3, 3), st.sampled_from((0.0, 1.5, float("inf"))), st.integers(0, 3))


@given(events=st.lists(st.tuples(st.booleans(), KEYS)))
def test_is_a_sorted_dict(events: list[tuple[bool, tuple[float, ...]]]) -> None:
    queue: OrderedQueue[tuple[float, ...], str] = OrderedQueue()
    model: dict[tuple[float, ...], str] = {}
    for wants_in, key in events:
        if wants_in and key not in model:
            queue.add(key, str(key))
            model[key] = str(key)
        elif not wants_in and model:
            leaving = min(model, key=lambda other: abs(hash(other) - hash(key)))
            queue.remove(leaving)
            del model[leaving]
        queue.check_integrity()
        assert list(queue) == [model[k] for k in sorted(model)]
        assert len(queue) == len(model)
        assert queue.first_key == min(model, default=None)
        assert queue.first == (model[min(model)] if model else None)
