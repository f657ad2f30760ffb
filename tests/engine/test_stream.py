from __future__ import annotations

import asyncio
import threading
from collections import UserDict
from typing import Any

import pytest

from asyncllm import AsyncEngine, SamplingParams, TokenStream
from asyncllm.engine import consumers
from asyncllm.engine.core import Core
from asyncllm.engine.plan import CacheGroup
from asyncllm.errors import (
    ConfigError,
    EngineClosed,
    EngineError,
    EngineNotStarted,
    InvalidParamsError,
    InvalidPromptError,
    RequestFailed,
)
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.offline import LLM
from asyncllm.testing.shadow_engine import ShadowModel

LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)


async def test_an_abort_from_another_thread_during_submission_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncEngine(ShadowModel(latency=0.002)) as engine:
        opening = Core.open

        def abort_meanwhile(core: Core, *args: Any) -> int:
            thread = threading.Thread(target=engine.abort, args=("it",))
            thread.start()
            thread.join()
            return opening(core, *args)

        monkeypatch.setattr(Core, "open", abort_meanwhile)
        assert (await engine.generate([1, 2, 3], LONG, request_id="it")).finish_reason == "abort"


class Hostile(UserDict[str, Any]):
    def get(self, key: str, default: Any = None) -> Any:
        raise LookupError("a mapping of the caller's own")


async def test_a_prompt_that_raises_fails_alone(tokenizer: Tokenizer) -> None:
    async with AsyncEngine(ShadowModel(tokenizer=tokenizer, latency=0.001)) as engine:
        other = engine.stream([1, 2, 3], SamplingParams(max_tokens=50, seed=1))
        await other.start()
        with pytest.raises((RequestFailed, InvalidPromptError)):
            await engine.generate([Hostile(role="user", content="x")])
        assert (await other.result()).usage.completion_tokens == 50


@pytest.mark.parametrize("drain", ["5", None, -1, float("nan"), float("inf"), True])
async def test_an_impossible_drain_is_refused_and_harms_nobody(drain: Any) -> None:
    async with AsyncEngine(ShadowModel()) as engine:
        with pytest.raises(ConfigError, match="drain"):
            await engine.aclose(drain)
        assert (await engine.generate([1, 2], SamplingParams(max_tokens=3))).finish_reason == "length"


async def test_windows_let_a_prompt_be_longer_than_the_pool() -> None:
    model = ShadowModel(groups=(CacheGroup(window=32),))
    async with AsyncEngine(model, num_blocks=8, block_size=16, max_model_len=500, max_batched_tokens=16) as engine:
        completion = await engine.generate([3] * 200, SamplingParams(max_tokens=20))
        assert completion.usage.completion_tokens == 20
    assert model.runner is not None
    assert not model.runner.faults


async def test_a_foreign_loop_is_refused_and_ends_nothing() -> None:
    async with AsyncEngine(ShadowModel(latency=0.002)) as engine:
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=60, seed=1))
        await stream.start()

        def elsewhere() -> None:
            for method in (stream.start, stream.result):
                with pytest.raises(EngineError, match="another event loop"):
                    asyncio.run(method())

        await asyncio.to_thread(elsewhere)
        assert (await stream.result()).finish_reason == "length"


async def test_a_refusal_is_told_once_to_who_reads() -> None:
    async with AsyncEngine(ShadowModel()) as engine:
        stream = engine.stream([])
        with pytest.raises(InvalidPromptError, match="empty"):
            await anext(stream)
        assert [delta async for delta in stream] == []
        with pytest.raises(InvalidPromptError, match="empty"):
            await stream.result()
        await stream.aclose()


async def test_who_reads_too_early_may_try_again() -> None:
    engine = AsyncEngine(ShadowModel())
    stream = engine.stream([1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(EngineNotStarted):
        await anext(stream)
    async with engine:
        assert sum([len(delta.token_ids) async for delta in stream]) == 3


async def test_min_tokens_needs_an_id_that_does_not_stop() -> None:
    async with AsyncEngine(ShadowModel(vocab_size=8)) as engine:
        with pytest.raises(InvalidParamsError, match="whole vocabulary"):
            await engine.generate([1], SamplingParams(stop_token_ids=list(range(8)), min_tokens=2))


async def test_detokenize_refuses_what_is_no_list(tokenizer: Tokenizer) -> None:
    async with AsyncEngine(ShadowModel(tokenizer=tokenizer)) as engine:
        with pytest.raises(InvalidPromptError):
            await engine.detokenize(5)  # type: ignore[arg-type]
        assert await engine.detokenize([]) == ""


def test_one_mapping_is_no_list_of_prompts() -> None:
    with LLM(ShadowModel()) as llm, pytest.raises(InvalidPromptError):
        llm.generate({"role": "user", "content": "x"}, progress=False)


@pytest.mark.parametrize("prompt", [[[1] * 1000] * 1000, bytearray(b"hi"), memoryview(b"hi"), b"hi", [True, 5], [1.5]])
async def test_what_is_no_prompt_is_refused_at_once(prompt: Any) -> None:
    async with AsyncEngine(ShadowModel(), max_model_len=4096, num_blocks=1024) as engine:
        with pytest.raises(InvalidPromptError, match="a prompt is a text"):
            await engine.generate(prompt)


async def test_template_arguments_are_names_to_values() -> None:
    async with AsyncEngine(ShadowModel()) as engine:
        for wrong in (5, [1], {5: 6}):
            with pytest.raises(InvalidParamsError, match="chat_template_kwargs"):
                engine.stream("x", chat_template_kwargs=wrong)  # type: ignore[arg-type]


def test_a_config_is_an_engine_config() -> None:
    for wrong in ({"a": 1}, {}, 5):
        with pytest.raises(ConfigError, match="EngineConfig"):
            AsyncEngine("nowhere", config=wrong)  # type: ignore[arg-type]


async def test_a_stream_has_its_times_once_it_has_ended() -> None:
    async with AsyncEngine(ShadowModel()) as engine:
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
        assert stream.metrics is None
        async for _ in stream:
            pass
        assert stream.metrics is not None
        assert stream.metrics == (await stream.result()).metrics
        assert stream.metrics.first_token is not None


async def test_the_engine_shows_what_it_holds() -> None:
    async with AsyncEngine(ShadowModel(), num_blocks=16, block_size=8) as engine:
        async with engine.stream(list(range(3, 30)), LONG):
            inspection = await engine.inspect(limit=5)
            assert sum(state > 1 for state in inspection.blocks) >= 4
            (request,) = inspection.requests
            assert (request.prompt_tokens, request.age >= 0) == (27, True)
        assert (await engine.inspect()).requests == ()
    with pytest.raises(EngineClosed):
        await engine.inspect()


class Listener:
    """Takes tokens in the very call that tells of them."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.ids: list[int] = []
        self.over = asyncio.get_running_loop().create_future()

    def done(self) -> bool:
        return self.over.done()

    def set_result(self, result: None) -> bool:
        while (delta := self.stream.take()) is not None:
            self.ids += delta.token_ids
            if delta.usage is not None:
                self.over.set_result(delta.usage.completion_tokens)
                return False
        return True


@pytest.mark.parametrize("n", [1, 3])
async def test_tokens_are_taken_without_a_task(n: int) -> None:
    async with AsyncEngine(ShadowModel(latency=0.001)) as engine:
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True, n=n, seed=1))
        await stream.start()
        listener = Listener(stream)
        if not stream.arm(listener):
            listener.set_result(None)
        assert await listener.over == len(listener.ids) == 20 * n
        with pytest.raises(StopAsyncIteration):
            stream.take()


async def test_one_at_a_time_waits_for_a_stream() -> None:
    async with AsyncEngine(ShadowModel(latency=0.002)) as engine:
        stream = engine.stream([1, 2, 3], LONG)
        await stream.start()
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="another task waits"):
            await anext(stream)
        assert (await reading).token_ids  # which is none the worse for it
        assert (await stream.result()).usage.completion_tokens == 400


async def test_many_streams_are_told_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "WOKEN_AT_ONCE", 2)
    async with AsyncEngine(ShadowModel()) as engine:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        done = await asyncio.gather(*(engine.generate([number], params) for number in range(1, 8)))
        assert [each.usage.completion_tokens for each in done] == [20] * 7
