"""Late requests through the core, the scheduler and the shadow device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.engine.guide import Guide, Guidelines, Word
from asyncllm.engine.model import ModelLoader
from asyncllm.engine.plan import Adjustment, RowBias, RowSampling
from asyncllm.errors import InvalidParamsError, RequestFailed
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.outputs.bad_words import BadSequences
from asyncllm.outputs.constraint import Constraint
from asyncllm.testing.shadow_engine import ShadowModel
from asyncllm.testing.shadow_tokens import Word as ShadowWord
from asyncllm.testing.shadow_tokens import reference_output
from tests.engine.conftest import settled
from tests.engine.constraints import Rounds, constrained

VOCAB_SIZE = 512
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1, 2])
ROUNDS = Rounds(VOCAB_SIZE, [range(10, 20), range(300, 320), None])
FORCED = Rounds(VOCAB_SIZE, [range(100)], forces={0: (7, 8, 9), 5: (11,), 9: tuple(range(60, 80))})


LATE = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, late=True)


def model(constraint: Constraint, latency: float = 0.0, **changes: Any) -> tuple[ShadowModel, ModelLoader]:
    """Requests with a seed are constrained."""
    shadow = ShadowModel(vocab_size=VOCAB_SIZE, latency=latency, **changes)
    return shadow, constrained(shadow, lambda params: None if params.seed is None else constraint.copy())


def params(length: int, **changes: Any) -> SamplingParams:
    """Of a constrained request."""
    return SamplingParams(temperature=0, seed=1, max_tokens=length, **changes)


def expected(prompt: Sequence[int], constraint: Rounds, length: int) -> list[int]:
    """What a constrained request comes to, token by token."""

    def host(output: Sequence[int]) -> ShadowWord:
        told = constraint.copy()
        told.accept(output)
        return told.forced() or Adjustment(told.mask())

    return reference_output(prompt, LATE, VOCAB_SIZE, length, host)


@RUN_AHEAD
@pytest.mark.parametrize("constraint", [ROUNDS, FORCED], ids=["masks", "forced"])
async def test_constrained_and_free_requests_share_steps(constraint: Rounds, run_ahead: int) -> None:
    shadow, load = model(constraint)
    async with AsyncEngine(load, run_ahead=run_ahead, max_num_seqs=6) as engine:

        async def one(n: int) -> None:
            late, length = n % 2 == 0, 5 + n
            free = SamplingParams(temperature=0, max_tokens=length)
            done = await engine.generate([n, 3, 4], params(length) if late else free)
            ids = expected([n, 3, 4], constraint, length) if late else shadow.expected([n, 3, 4], length)
            assert list(done.token_ids) == ids
            assert done.finish_reason == "length"
            assert done.usage.completion_tokens == length

        await asyncio.gather(*(one(n) for n in range(20)))
        await settled(engine, shadow)


@RUN_AHEAD
async def test_preempted_and_recomputed(run_ahead: int) -> None:
    """The pool holds hardly more than one of them: logits are lost, words are not."""
    shadow, load = model(FORCED)
    async with AsyncEngine(load, run_ahead=run_ahead, num_blocks=6) as engine:

        async def one(n: int) -> None:
            done = await engine.generate([n, 3, 4], params(60))
            assert list(done.token_ids) == expected([n, 3, 4], FORCED, 60)

        await asyncio.gather(*(one(n) for n in range(6)))
        assert engine.statistics().preemptions > 0
        await settled(engine, shadow)


async def test_a_quick_word_is_waited_for_while_the_device_is_busy() -> None:
    """A constrained row takes part in nearly every step, though its mask comes after the step before has begun."""
    shadow, load = model(replace(ROUNDS, delay=0.002), latency=0.02)
    async with AsyncEngine(load) as engine:
        free = asyncio.create_task(engine.generate([1, 2], SamplingParams(temperature=0, max_tokens=40)))
        await engine.generate([5, 6], params(30))
        assert shadow.runner is not None
        assert shadow.runner.steps < 40
        await free
        await settled(engine, shadow)


async def test_a_slow_row_stalls_no_other() -> None:
    shadow, load = model(replace(ROUNDS, delay=0.5), latency=0.002)
    async with AsyncEngine(load) as engine:
        slow = asyncio.create_task(engine.generate([5, 6], params(3)))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        await engine.generate([1, 2], SamplingParams(temperature=0, max_tokens=50))
        assert time.monotonic() - start < 0.45
        assert not slow.done()
        assert list((await slow).token_ids) == expected([5, 6], ROUNDS, 3)
        await settled(engine, shadow)


async def test_a_broken_constraint_ends_its_request_alone() -> None:
    shadow, load = model(replace(ROUNDS, breaks=4))
    async with AsyncEngine(load) as engine:
        free = asyncio.create_task(engine.generate([1, 2], SamplingParams(temperature=0, max_tokens=40)))
        stream = engine.stream([5, 6], params(30))
        with pytest.raises(RequestFailed, match="no mask today") as caught:
            await stream.result()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert list((await free).token_ids) == shadow.expected([1, 2], 40)
        await settled(engine, shadow)


@pytest.mark.parametrize("ends", [0, 1, 4, 9, 12])
async def test_a_finished_constraint_stops_its_request(ends: int) -> None:
    constraint = replace(FORCED, ends=ends)
    shadow, load = model(constraint)
    async with AsyncEngine(load) as engine:
        done = await engine.generate([5, 6], params(50))
        length = 3 if 0 < ends < 3 else 29 if ends > 9 else ends  # forced tokens come all at once
        assert list(done.token_ids) == expected([5, 6], FORCED, length)
        assert done.finish_reason == "stop"
        await settled(engine, shadow)


@RUN_AHEAD
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 11, 40])
async def test_max_tokens_cuts_forced_tokens(length: int, run_ahead: int) -> None:
    shadow, load = model(FORCED)
    async with AsyncEngine(load, run_ahead=run_ahead) as engine:
        done = await engine.generate([5, 6], params(length))
        assert list(done.token_ids) == expected([5, 6], FORCED, length)
        assert done.finish_reason == "length"
        await settled(engine, shadow)


async def test_a_forced_stop_id_ends_the_request() -> None:
    shadow, load = model(FORCED)
    async with AsyncEngine(load) as engine:
        done = await engine.generate([5, 6], params(40, stop_token_ids=[63]))
        ids = expected([5, 6], FORCED, 40)
        assert list(done.token_ids) == ids[: ids.index(63) + 1]
        assert (done.finish_reason, done.stop_reason) == ("stop", 63)
        await settled(engine, shadow)


async def test_forced_tokens_have_their_text(tokenizer: Tokenizer) -> None:
    """A stop string that spans them ends the request, and what was forced behind it is not there."""
    word = tuple(tokenizer.encode("Hello big world", add_special_tokens=False))
    constraint = Rounds(VOCAB_SIZE, [[65]], forces={2: word})
    shadow, load = model(constraint, tokenizer=tokenizer)
    async with AsyncEngine(load) as engine:
        whole = await engine.generate([5, 6], params(2 + len(word)))
        assert whole.text == tokenizer.decode([65, 65, *word])
        cut = await engine.generate([5, 6], params(60, stop=["big"]))
        assert cut.text == whole.text[: whole.text.index("big")]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", "big")
        assert 2 < cut.usage.completion_tokens < len(whole.token_ids)
        text = "".join([delta.text async for delta in engine.stream([5, 6], params(60, stop=["big"]))])
        assert text == cut.text
        await settled(engine, shadow)


async def test_a_forced_stop_id_is_not_shown(tokenizer: Tokenizer) -> None:
    shadow, load = model(Rounds(VOCAB_SIZE, [[65]], forces={2: (66, 67, 68)}), tokenizer=tokenizer)
    async with AsyncEngine(load) as engine:
        hidden = await engine.generate([5, 6], params(9, stop_token_ids=[67]))
        assert hidden.token_ids == (65, 65, 66, 67)
        assert hidden.text == tokenizer.decode([65, 65, 66])
        shown = await engine.generate([5, 6], params(9, stop_token_ids=[67], include_stop_str_in_output=True))
        assert shown.text == tokenizer.decode([65, 65, 66, 67])
        await settled(engine, shadow)


async def test_aborted_at_any_moment() -> None:
    shadow, load = model(replace(FORCED, delay=0.001), latency=0.001)
    async with AsyncEngine(load, num_blocks=40) as engine:

        async def one(n: int) -> None:
            async with engine.stream([n, 3, 4], params(60)) as stream:
                async for delta in stream:
                    if len(delta.token_ids) > n % 5 or n % 3 == 0:
                        break
                await asyncio.sleep(0.001 * (n % 7))

        await asyncio.gather(*(one(n) for n in range(60)))
        await settled(engine, shadow)


async def test_a_failed_step_takes_its_late_rows_with_it() -> None:
    shadow, load = model(ROUNDS, latency=0.001)
    async with AsyncEngine(load) as engine:
        stream = engine.stream([5, 6], params(200))
        await anext(stream)
        assert shadow.runner is not None
        shadow.runner.fail_next(RuntimeError("the device stumbled"))
        with pytest.raises(RequestFailed, match="stumbled"):
            async for _ in stream:
                pass
        done = await engine.generate([5, 6], params(9))
        assert list(done.token_ids) == expected([5, 6], ROUNDS, 9)
        await settled(engine, shadow)


# --- the guide itself ---


def guide_of(constraint: Constraint, min_tokens: int = 0) -> Guide:
    sampling = replace(LATE, suppress_before=3 + min_tokens, suppressed=(2,)) if min_tokens else LATE
    return Guide(Guidelines(constraint), prompt=[1, 1, 1], sampling=sampling, vocab_size=VOCAB_SIZE)


def test_min_tokens_bans_an_end_unless_nothing_else_is_legal() -> None:
    constraint = Rounds(VOCAB_SIZE, [[2, 7], [2]])
    guide = guide_of(constraint, min_tokens=4)
    assert guide.advance(()).adjustment is not None
    assert guide.advance((7,)) == Word(None)
    later = guide_of(Rounds(VOCAB_SIZE, [[2, 7], [2]]), min_tokens=1)
    assert later.advance((7, 2)).adjustment is not None


def bounded(constraint: Constraint, **changes: Any) -> Guide:
    """Beside a constraint whose outputs may end with token 2."""
    sequences = changes.pop("sequences", None)
    lines = Guidelines(constraint, None if sequences is None else BadSequences(sequences), end_ids=(2,))
    return Guide(lines, prompt=[1], sampling=replace(LATE, **changes), vocab_size=VOCAB_SIZE)


BOUNDS = pytest.mark.parametrize(
    "changes", [{"allowed": (1, 3, 4)}, {"banned": (7, 8)}, {"sequences": [(1, 7), (1, 8)]}], ids=str
)


@BOUNDS
def test_what_a_constraint_leaves_must_be_legal(changes: dict[str, Any]) -> None:
    guide = bounded(Rounds(VOCAB_SIZE, [[1], [7, 8]]), **changes)
    guide.advance(())
    with pytest.raises(InvalidParamsError, match="structured_output with allowed_token_ids or bad_words"):
        guide.advance((1,))


@BOUNDS
def test_forced_tokens_must_be_legal(changes: dict[str, Any]) -> None:
    for forces in ({0: (1, 7)}, {1: (7, 3)}):
        guide = bounded(Rounds(VOCAB_SIZE, [[1, 3, 7]], forces=forces), **changes)
        with pytest.raises(InvalidParamsError, match="structured_output with allowed_token_ids or bad_words"):
            guide.advance(guide.advance(()).forced or (1,))


@BOUNDS
def test_a_complete_output_ends_where_nothing_else_is_legal(changes: dict[str, Any]) -> None:
    guide = bounded(Rounds(VOCAB_SIZE, [[1], [2, 7, 8]]), **changes)
    guide.advance(())
    word = guide.advance((1,))
    assert word == Word(None) if "allowed" in changes else word.adjustment is not None


def test_what_may_come_is_what_all_leave() -> None:
    guide = bounded(Rounds(VOCAB_SIZE, [[1, 5], [5, 6, 7]]), allowed=(1, 5, 7), sequences=[(1, 5), (5, 6)])
    assert guide.advance(()).adjustment is not None
    adjustment = guide.advance((1,)).adjustment
    assert adjustment is not None
    assert isinstance(adjustment.bias, RowBias)
    assert adjustment.bias.token_ids.tolist() == [5]
    assert adjustment.bias.values.tolist() == [-np.inf]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros(16, np.uint32), "leaves no token"),
        (np.ones(15, np.uint32), "16 words"),
        (np.ones(16, np.int64), "uint32"),
    ],
)
def test_a_mask_must_fit(mask: np.ndarray, message: str) -> None:
    class Odd(Rounds):
        def mask(self) -> np.ndarray:
            return mask

    with pytest.raises(ValueError, match=message):
        guide_of(Odd(VOCAB_SIZE, [None])).advance(())
