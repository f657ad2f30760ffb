"""The benchmark of what HTTP costs: it runs, and every token goes over the wire on its own."""

from __future__ import annotations

import pytest

from asyncllm.api.answers import PlainAnswer
from asyncllm.api.chat_chunks import ChatChunks
from asyncllm.api.identifiers import identifier
from asyncllm.results import TokenDelta
from benchmarks.http_cost import event, measure


@pytest.mark.parametrize("shell", ["aiohttp", pytest.param("uvicorn", marks=pytest.mark.full)])
def test_measures_both_handlers(shell: str) -> None:
    costs = measure(shell, streams=4, tokens=16, repeats=1)  # asserts that the events came one by one
    assert set(costs) == {"bare", "asyncllm"}
    assert all(cost > 0 for times in costs.values() for cost in times)


def test_events_are_of_the_same_size() -> None:
    """The bare handler writes as much as the app, to the byte."""
    head = {"id": identifier("chatcmpl-"), "object": "chat.completion.chunk", "created": 1700000000, "model": "bench"}
    chunks = ChatChunks(
        head=head,
        n=1,
        make_answer=PlainAnswer,
        plain=True,
        logprobs=False,
        token_ids=False,
        include_usage=False,
        continuous_usage=False,
        show_reasoning=True,
        prompt_token_ids=(),
    )
    chunks.render(TokenDelta("", (1,)))  # opens the choice
    assert len(chunks.render(TokenDelta("a", (5,))).encode()) == len(event("a"))
