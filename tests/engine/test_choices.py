"""Several choices of one request, through the core, the scheduler and the shadow device."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from asyncllm import AsyncEngine, Completion, SamplingParams, TokenDelta
from asyncllm.errors import RequestFailed
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.shadow_engine import ShadowModel
from tests.engine.conftest import settled
from tests.engine.constraints import Rounds, constrained

RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1, 2])


def params(n: int, length: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"n": n, "seed": 5, "temperature": 1.0, "max_tokens": length, **changes})


def expected(shadow: ShadowModel, prompt: list[int], n: int, length: int) -> list[list[int]]:
    return [shadow.expected(prompt, length, temperature=1.0, seed=5, choice=choice) for choice in range(n)]


def ids(completion: Completion) -> list[list[int]]:
    return [list(choice.token_ids) for choice in completion.choices]


@RUN_AHEAD
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
async def test_the_prompt_is_computed_once(length: int, run_ahead: int) -> None:
    shadow, prompt = ShadowModel(), list(range(5, 5 + length))
    async with AsyncEngine(shadow, run_ahead=run_ahead, prefix_caching=False, block_size=16) as engine:
        done = await engine.generate(prompt, params(4))
        assert ids(done) == expected(shadow, prompt, 4, 12)
        assert engine.statistics().tokens_computed == length + 4 * 11
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (length, 48)
        assert [choice.finish_reason for choice in done.choices] == ["length"] * 4
        await settled(engine, shadow)


@RUN_AHEAD
@pytest.mark.parametrize("settings", [{"max_num_seqs": 2}, {"num_blocks": 6}, {"max_batched_tokens": 7}], ids=str)
async def test_more_choices_than_there_is_room_for_queue(settings: dict[str, int], run_ahead: int) -> None:
    shadow = ShadowModel()
    prompts = [list(range(n, n + 20)) for n in (3, 90)]
    async with AsyncEngine(shadow, run_ahead=run_ahead, block_size=16, **settings) as engine:
        done = await asyncio.gather(*(engine.generate(prompt, params(7, 20)) for prompt in prompts))
        assert [ids(each) for each in done] == [expected(shadow, prompt, 7, 20) for prompt in prompts]
        await settled(engine, shadow)


async def test_every_choice_has_its_deltas_and_one_end() -> None:
    shadow = ShadowModel(latency=0.001)
    async with AsyncEngine(shadow) as engine:
        deltas = [delta async for delta in engine.stream([3, 4], params(3))]
        for choice, tokens in enumerate(expected(shadow, [3, 4], 3, 12)):
            own = [delta for delta in deltas if delta.index == choice]
            assert [i for delta in own for i in delta.token_ids] == tokens
            assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]
        usages = [delta.usage for delta in deltas]
        assert usages[:-1] == [None] * (len(deltas) - 1)
        assert usages[-1] is not None
        assert usages[-1].completion_tokens == 36
        assert len(deltas) > 20  # they come as they are made


async def test_an_unread_stream_holds_one_delta_a_choice() -> None:
    shadow = ShadowModel()
    async with AsyncEngine(shadow) as engine:
        stream = engine.stream([3, 4], params(3))
        await stream.start()
        await settled(engine, shadow)
        deltas = [delta async for delta in stream]
        assert [delta.index for delta in deltas] == [0, 1, 2]
        assert [list(delta.token_ids) for delta in deltas] == expected(shadow, [3, 4], 3, 12)
        assert ids(await stream.result()) == expected(shadow, [3, 4], 3, 12)


async def test_choices_end_on_their_own(tokenizer: Tokenizer) -> None:
    """A stop id or a stop string ends the choice that it comes up in."""
    shadow = ShadowModel(tokenizer=tokenizer)
    async with AsyncEngine(shadow) as engine:
        whole = expected(shadow, [3, 4], 4, 30)
        stop = whole[1][6]
        done = await engine.generate([3, 4], params(4, 30, stop_token_ids=[stop]))
        cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in whole]
        assert ids(done) == cut
        assert [choice.stop_reason for choice in done.choices] == [stop if stop in tokens else None for tokens in whole]
        assert done.usage.completion_tokens == sum(map(len, cut))
        piece = tokenizer.decode([whole[2][3]])
        text = await engine.generate([3, 4], params(4, 30, stop=[piece]))
        assert text.choices[2].stop_reason == piece
        assert all(piece not in choice.text for choice in text.choices)
        await settled(engine, shadow)


@pytest.mark.parametrize("way", ["abort", "close", "drop", "deadline"])
async def test_all_choices_end_together(way: str) -> None:
    shadow = ShadowModel(latency=0.002)
    async with AsyncEngine(shadow, max_num_seqs=3) as engine:  # two of five are waiting
        deadline = 0.1 if way == "deadline" else None
        stream = engine.stream([3, 4], params(5, 400), request_id="r", deadline=deadline)
        deltas: list[TokenDelta] = [await anext(stream) for _ in range(3)]
        if way == "close":
            await stream.aclose()
            assert engine.statistics().blocks_used == 0
        elif way == "drop":
            del stream
            gc.collect()
        else:
            if way == "abort":
                engine.abort("r")
            deltas += [delta async for delta in stream]
            reasons = {delta.index: delta.finish_reason for delta in deltas if delta.finish_reason is not None}
            assert reasons == dict.fromkeys(range(5), way)
            assert sum(delta.usage is not None for delta in deltas) == 1
        await settled(engine, shadow)
        assert ids(await engine.generate([3, 4], params(2))) == expected(shadow, [3, 4], 2, 12)


async def test_a_lost_step_fails_every_choice() -> None:
    shadow = ShadowModel(latency=0.001)
    async with AsyncEngine(shadow, max_num_seqs=2) as engine:
        stream = engine.stream([3, 4], params(4, 400))
        await anext(stream)
        assert shadow.runner is not None
        shadow.runner.fail_next(RuntimeError("the device stumbled"))
        with pytest.raises(RequestFailed, match="stumbled"):
            await stream.result()
        await settled(engine, shadow)


@RUN_AHEAD
async def test_constrained_choices(run_ahead: int) -> None:
    """Each has a constraint of its own, which begins with forced tokens."""
    constraint = Rounds(512, [range(300), range(200, 500)], forces={0: (7, 8), 4: (9,)})
    shadow = ShadowModel()
    load = constrained(shadow, lambda params: constraint.copy())
    async with AsyncEngine(load, run_ahead=run_ahead) as engine:
        together = await engine.generate([3, 4], params(3))
        assert len({choice.token_ids for choice in together.choices}) == 3
        for choice in together.choices:
            constraint.copy().accept(choice.token_ids)
            assert choice.token_ids[:2] == (7, 8)
        await settled(engine, shadow)
    async with AsyncEngine(load, run_ahead=run_ahead, max_num_seqs=1) as engine:
        assert (await engine.generate([3, 4], params(3))).choices == together.choices
