"""A form behind a model's reasoning: random walks come to a complete form, with or without reasoning before it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from asyncllm.errors import InvalidParamsError
from asyncllm.outputs.reasoned_form import ReasonedForm
from asyncllm.outputs.thinking_budget import ThinkingBudget
from tests.outputs.grammars import EOS, SIZE, constraint, legal, tokenizer


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


START, END = ids("<t>"), ids("</t>")


def reasoned(
    regex: str, start: Sequence[int] = START, budget: int | None = None, *, begun: bool = False
) -> ReasonedForm:
    thinking = ThinkingBudget(start, END, budget, SIZE, begun=begun)
    return ReasonedForm(constraint(regex=regex), thinking, {EOS}, SIZE)


def walk(state: ReasonedForm, seed: int, *, jumps: bool, reason: bool) -> tuple[str, int]:
    """A random output that begins with the tag, or does not, and reasons for at most ten tokens if it may;
    and how many tokens it reasoned."""
    rng, output, count = random.Random(seed), list[int](), 0
    while not state.finished:
        state = state.copy()
        choices = legal(state.mask()).tolist()  # type: ignore[arg-type]
        assert max(choices) < SIZE
        forced = state.forced()
        if forced:
            assert choices == [forced[0]]
        if forced and jumps:
            token_ids = forced
        elif len(choices) > SIZE // 2:  # it reasons
            assert EOS not in choices
            count += 1
            left = END if count > 10 else [rng.choice([i for i in choices if i > 200])]
            token_ids = tuple(left)
        else:
            pool = [i for i in choices if (i == START[0]) == reason] if not output else choices
            token_ids = (rng.choice(pool or choices),)
        state.accept(token_ids)
        output += token_ids
    return tokenizer().decode([i for i in output if i != EOS]), count


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("reason", [True, False])
@pytest.mark.parametrize("budget", [None, 3])
def test_the_form_is_what_follows(jumps: bool, reason: bool, budget: int | None) -> None:
    for seed in range(10):
        text, count = walk(reasoned(r"\[[0-9]{2,4}\]", budget=budget), seed, jumps=jumps, reason=reason)
        thought, tag, answer = text.rpartition("</t>")
        assert re.fullmatch(r"\[[0-9]{2,4}\]", answer)
        assert bool(tag) == reason
        assert thought.startswith("<t>") == reason
        if budget is not None:
            assert count == budget * reason


def test_the_prompt_may_have_begun_it() -> None:
    state = reasoned("[0-9]{2}", begun=True)
    state.accept(ids("hm 12") + END)
    assert set(legal(state.mask()).tolist()) == set(legal(constraint(regex="[0-9]{2}").mask()).tolist())  # type: ignore[arg-type]
    copy = state.copy()
    state.accept(ids("1"))
    state.accept(ids("2"))
    assert state.finished
    assert not copy.finished


def test_a_tag_that_may_be_the_form_is_refused() -> None:
    with pytest.raises(InvalidParamsError, match="after_reasoning"):
        reasoned("<[a-z]>")
    one = ids("<")
    state = reasoned("<[a-z]>", start=one)  # of one token: what it says is what it is
    state.accept(one)
    state.accept([*ids("x"), *END])
    assert legal(state.mask()).tolist() == one  # type: ignore[arg-type]
