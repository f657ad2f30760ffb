from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest

from asyncllm import AsyncEngine, EngineConfig, SamplingParams
from asyncllm.engine.mailbox import Stage
from asyncllm.engine.model import ModelLoader, ServedModel
from asyncllm.engine.plan import CacheGroup
from asyncllm.engine.stream import TokenStream
from asyncllm.errors import (
    ChatTemplateError,
    ConfigError,
    ContextLengthError,
    DuplicateRequestError,
    EngineClosed,
    EngineDead,
    EngineError,
    EngineNotStarted,
    InsufficientMemoryError,
    InvalidParamsError,
    InvalidPromptError,
    RequestError,
    RequestFailed,
)
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.shadow_engine import ShadowModel, ShadowRunner
from tests.engine.conftest import eventually

pytestmark = pytest.mark.usefixtures("no_thread_left")

GREEDY = SamplingParams(temperature=0, max_tokens=10)
LONG = SamplingParams(temperature=0, max_tokens=400)


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer | None = None, *, latency: float = 0.0, **settings: Any
) -> AsyncIterator[tuple[AsyncEngine, ShadowModel]]:
    """An engine over the shadow device. Nothing may be left in it when the block ends."""
    model = ShadowModel(tokenizer=tokenizer, latency=latency)
    async with AsyncEngine(model, **settings) as engine:
        yield engine, model
        await eventually(lambda: is_idle(engine))
    assert runner_of(model).closed
    assert not runner_of(model).faults


def runner_of(model: ShadowModel) -> ShadowRunner:
    assert model.runner is not None
    return model.runner


def is_idle(engine: AsyncEngine) -> bool:
    statistics = engine.statistics()
    assert statistics.blocks_used + statistics.blocks_cached + statistics.blocks_free == statistics.blocks_total
    return statistics.blocks_used == statistics.rows_used == statistics.requests_running == 0


# --- reading ---


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_streamed_equals_collected(run_ahead: int, tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, run_ahead=run_ahead) as (engine, model):
        deltas = [delta async for delta in engine.stream([5, 6, 7], GREEDY)]
        completion = await engine.generate([5, 6, 7], GREEDY)
        expected = model.expected([5, 6, 7], 10)
        assert [token_id for delta in deltas for token_id in delta.token_ids] == expected
        assert list(completion.token_ids) == expected
        text = await engine.detokenize(expected)
        assert "".join(delta.text for delta in deltas) == completion.text == text
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert [delta.usage for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        last = deltas[-1]
        assert (last.finish_reason, last.stop_reason) == ("length", None)
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (3, 10, 13)
        assert completion.usage == last.usage
        assert completion.finish_reason == "length"
        assert completion.prompt_token_ids == (5, 6, 7)
        metrics = completion.metrics
        assert metrics.queued is not None
        assert metrics.scheduled is not None
        assert metrics.first_token is not None
        assert metrics.last_token is not None
        stages = [metrics.arrival, metrics.queued, metrics.scheduled, metrics.first_token, metrics.last_token]
        assert stages == sorted(stages)


async def test_an_attentive_reader_gets_every_token_by_itself(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, latency=0.02) as (engine, _):
        deltas = [delta async for delta in engine.stream([5], GREEDY)]
        assert len(deltas) >= 8
        assert all(len(delta.token_ids) <= 2 for delta in deltas)


async def test_an_unread_stream_holds_one_delta(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (engine, model):
        stream = engine.stream([5, 6], GREEDY)
        await stream.start()
        await eventually(lambda: stream._mailbox.done)
        deltas = [delta async for delta in stream]
        assert len(deltas) == 1
        assert list(deltas[0].token_ids) == model.expected([5, 6], 10)
        assert deltas[0].text == await engine.detokenize(deltas[0].token_ids)
        assert deltas[0].finish_reason == "length"
        assert [delta async for delta in stream] == []  # it is over


async def test_a_slow_reader_loses_nothing(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, latency=0.001) as (engine, model):
        params = SamplingParams(temperature=0, max_tokens=60)
        ids: list[int] = []
        counts = []
        async for delta in engine.stream([5], params):
            ids += delta.token_ids
            counts.append(len(delta.token_ids))
            await asyncio.sleep(0.02)
        assert ids == model.expected([5], 60)
        assert max(counts) > 1


async def test_a_reader_slower_than_the_engine_leaves_the_loop_to_others() -> None:
    async with serving(latency=0.001) as (engine, _):
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(other())
        deltas = 0
        async for _delta in engine.stream([5], SamplingParams(max_tokens=100)):
            deltas += 1
            time.sleep(0.005)  # noqa: ASYNC251  # there is always something to read when it comes back
        others.cancel()
        assert turns >= deltas - 1


async def test_result_is_whole_whatever_was_read_before(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (engine, _):
        whole = await engine.generate([5, 6, 7], GREEDY)
        stream = engine.stream([5, 6, 7], GREEDY)
        async for _delta in stream:
            break
        for _ in range(2):
            completion = await stream.result()
            assert completion.choices == whole.choices
        assert [delta async for delta in stream] == []


async def test_result_does_not_wake_up_for_each_token() -> None:
    async with serving(latency=0.001) as (engine, _):
        stream = engine.stream([5], SamplingParams(max_tokens=100))
        task = asyncio.create_task(stream.result())
        wake_ups = 0
        while not task.done():
            await asyncio.sleep(0)
            if stream._mailbox.waiter is not None:
                wake_ups += 1
        assert wake_ups == 0
        assert len((await task).token_ids) == 100


async def test_a_stream_is_submitted_when_it_is_used() -> None:
    async with serving() as (engine, model):
        stream = engine.stream([5], GREEDY)
        await asyncio.sleep(0.02)
        assert runner_of(model).steps == 0
        assert stream._mailbox.stage is Stage.NEW
        await stream.start()
        assert stream._mailbox.stage in (Stage.QUEUED, Stage.RUNNING, Stage.DONE)
        await stream.start()  # once is enough
        assert len((await stream.result()).token_ids) == 10
        assert engine.statistics().requests_finished == 1


async def test_max_tokens_of_zero() -> None:
    async with serving() as (engine, model):
        (delta,) = [delta async for delta in engine.stream([5, 6], SamplingParams(max_tokens=0))]
        assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (), "length")
        completion = await engine.generate([5, 6], SamplingParams(max_tokens=0))
        assert (completion.token_ids, completion.finish_reason) == ((), "length")
        assert completion.usage.prompt_tokens == 2
        assert runner_of(model).steps == 0


async def test_no_max_tokens_goes_on_to_the_end_of_the_context() -> None:
    async with serving(max_model_len=64) as (engine, _):
        completion = await engine.generate([5, 6, 7], SamplingParams(temperature=0))
        assert len(completion.token_ids) == 61
        assert completion.finish_reason == "length"


async def test_two_tasks_may_not_wait_for_the_same_token() -> None:
    async with serving(latency=0.05) as (engine, _), engine.stream([5], LONG) as stream:
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        assert (await first).token_ids


async def test_a_stream_belongs_to_one_event_loop() -> None:
    async with serving(latency=0.01) as (engine, _), engine.stream([5], LONG) as stream:

        async def elsewhere() -> None:
            await stream.aclose()

        with pytest.raises(EngineError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())


# --- prompts and parameters ---


async def test_prompts_of_every_shape(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi!"}]
    async with serving(tokenizer) as (engine, _):
        text_ids = await engine.tokenize("The quick brown fox")
        chat_ids = await engine.tokenize(messages)
        rendered = await engine.apply_chat_template(messages)
        assert rendered == "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
        assert await engine.detokenize(text_ids) == "The quick brown fox"
        assert await engine.detokenize(chat_ids, skip_special_tokens=False) == rendered
        for prompt, ids in (
            ("The quick brown fox", text_ids),
            (messages, chat_ids),
            (tuple(messages), chat_ids),
            (text_ids, text_ids),
            (tuple(text_ids), text_ids),
            (np.array(text_ids), text_ids),
            (np.array(text_ids, dtype=np.uint16), text_ids),
            (range(5, 9), [5, 6, 7, 8]),
        ):
            completion = await engine.generate(prompt, GREEDY)
            assert list(completion.prompt_token_ids) == ids


async def test_a_tokenizer_that_knows_more_than_the_model(tokenizer: Tokenizer) -> None:
    async with AsyncEngine(ShadowModel(vocab_size=300, tokenizer=tokenizer)) as engine:
        ids = await engine.tokenize("the answer")
        assert max(ids) >= 300
        with pytest.raises(InvalidPromptError, match="outside the vocabulary"):
            await engine.generate("the answer", GREEDY)
        assert await engine.detokenize([]) == ""


async def test_chat_options(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Well"}]
    template = "{{ tools | length if tools else 0 }}{{ flag }}{% for m in messages %}{{ m['content'] }};{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    async with AsyncEngine(ShadowModel(tokenizer=tokenizer, chat_template=template)) as engine:
        assert await engine.apply_chat_template(messages) == "0Hi!;Well;>"
        assert await engine.apply_chat_template(messages, continue_final_message=True) == "0Hi!;Well"
        text = await engine.apply_chat_template(messages, tools=[tool], chat_template_kwargs={"flag": "F"})
        assert text == "1FHi!;Well;>"
        kwargs = {"add_generation_prompt": False}
        assert await engine.apply_chat_template(messages, chat_template_kwargs=kwargs) == "0Hi!;Well;"
        completion = await engine.generate(messages, GREEDY, tools=[tool], chat_template_kwargs={"flag": "F"})
        assert list(completion.prompt_token_ids) == await engine.tokenize(text)


async def test_without_a_tokenizer() -> None:
    async with serving() as (engine, _):
        completion = await engine.generate([5], GREEDY)
        assert completion.text == ""
        assert len(completion.token_ids) == 10
        deltas = [delta async for delta in engine.stream([5], GREEDY)]
        assert "".join(delta.text for delta in deltas) == ""
        messages = [{"role": "user", "content": "x"}]
        for prompt in ("text", messages):
            with pytest.raises(InvalidPromptError, match="no tokenizer"):
                await engine.generate(prompt, GREEDY)
        with pytest.raises(ChatTemplateError):
            await engine.apply_chat_template(messages)
        with pytest.raises(InvalidParamsError, match="tokenizer"):
            await engine.generate([5], SamplingParams(stop="x"))
        with pytest.raises(InvalidPromptError):
            await engine.detokenize([5])


async def test_seeds() -> None:
    async with serving() as (engine, model):
        params = SamplingParams(temperature=1.0, max_tokens=20)
        outcomes = {(await engine.generate([5], params)).token_ids for _ in range(4)}
        assert len(outcomes) == 4  # a missing seed is drawn for each request
        for seed in (7, -3, 2**64 - 1):
            params = SamplingParams(temperature=1.0, max_tokens=20, seed=seed)
            expected = model.expected([5], 20, temperature=1.0, seed=seed)
            mixed = await asyncio.gather(*(engine.generate([5], params) for _ in range(3)), engine.generate([5], LONG))
            assert all(list(completion.token_ids) == expected for completion in mixed[:3])


async def test_the_models_defaults_apply_where_the_caller_set_nothing() -> None:
    model = ShadowModel(sampling_defaults={"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1})
    async with AsyncEngine(model) as engine:
        runner, joined = runner_of(model), []
        launch = runner.launch

        def spy(plan: Any) -> Any:
            joined.extend(join.sampling for join in plan.joins)
            return launch(plan)

        runner.launch = spy  # type: ignore[method-assign]
        await engine.generate([5], SamplingParams(max_tokens=1))
        await engine.generate([5], SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1.0, min_p=0))
        by_model, by_caller = joined
        assert (by_model.temperature, by_model.top_k, by_model.top_p, by_model.min_p) == (0.5, 7, 0.9, 0.1)
        assert (by_caller.temperature, by_caller.top_k, by_caller.top_p, by_caller.min_p) == (0.0, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"params": {"temperature": 0}},
        {"request_id": ""},
        {"request_id": 5},
        {"priority": 1.5},
        {"priority": True},
        {"deadline": "soon"},
        {"deadline": math.nan},
        {"deadline": True},
        {"cache_salt": 5},
    ],
)
async def test_impossible_options_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParamsError):
        AsyncEngine(ShadowModel()).stream([5], **options)


async def test_a_refused_request_says_why_wherever_it_is_used(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, num_blocks=8) as (engine, _):
        uses: list[Callable[[TokenStream], Awaitable[object]]] = [
            TokenStream.start,
            TokenStream.__anext__,
            TokenStream.result,
            TokenStream.__aenter__,
        ]
        refused: list[tuple[Any, type[RequestError]]] = [
            ("", InvalidPromptError),
            ([], InvalidPromptError),
            ([600], InvalidPromptError),
            ([3] * 200, ContextLengthError),
            ([{"role": 5}], InvalidPromptError),
        ]
        for prompt, error in refused:
            for use in uses:
                stream = engine.stream(prompt, GREEDY)
                with pytest.raises(error):
                    await use(stream)
                await stream.aclose()
        assert (await engine.generate("ok", GREEDY)).finish_reason == "length"


async def test_a_request_over_the_pool_does_not_hold_up_the_next() -> None:
    async with serving(num_blocks=8, max_model_len=512) as (engine, _):
        start = time.monotonic()
        big = asyncio.create_task(engine.generate([3] * 200, GREEDY))
        assert len((await engine.generate([3] * 10, GREEDY)).token_ids) == 10
        with pytest.raises(ContextLengthError):
            await big
        assert time.monotonic() - start < 1


async def test_a_long_prompt_delays_only_its_like(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 22_000
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    async with serving(tokenizer) as (engine, _):
        long: list[asyncio.Task[Any]] = [asyncio.create_task(engine.tokenize(text)) for _ in range(4)]
        long.append(asyncio.create_task(engine.tokenize(messages)))
        await asyncio.sleep(0.01)
        start = time.monotonic()
        assert (await engine.generate("short", GREEDY)).text
        assert time.monotonic() - start < 1.0
        assert not long[1].done()
        for task in long[1:]:
            task.cancel()
        await asyncio.wait(long)


async def test_a_deadline_ends_a_request() -> None:
    async with serving(latency=0.01) as (engine, _):
        completion = await engine.generate([5], LONG, deadline=0.2)
        assert completion.finish_reason == "deadline"
        assert 0 < len(completion.token_ids) < 100


async def test_a_duplicate_request_id_is_refused_while_the_first_lives() -> None:
    async with serving(latency=0.005) as (engine, _):
        first = asyncio.create_task(engine.generate([5], GREEDY, request_id="mine"))
        await asyncio.sleep(0.01)
        with pytest.raises(DuplicateRequestError):
            await engine.generate([5], GREEDY, request_id="mine")
        assert len((await first).token_ids) == 10
        assert (await engine.generate([5], GREEDY, request_id="mine")).request_id == "mine"


# --- leaving ---


async def test_every_way_of_leaving_ends_the_request() -> None:
    async def break_off(stream: TokenStream) -> None:
        async for _ in stream:
            break

    async def close(stream: TokenStream) -> None:
        await anext(stream)
        await stream.aclose()

    async def cancel_in_the_stream(stream: TokenStream) -> None:
        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    async def cancel_a_sleeping_consumer(stream: TokenStream) -> None:
        async def read(streams: list[TokenStream]) -> None:
            async for _ in streams.pop():
                await asyncio.sleep(60)

        task = asyncio.create_task(read([stream]))
        del stream
        await asyncio.sleep(0.03)
        task.cancel()
        await asyncio.wait([task])

    async def time_out(stream: TokenStream) -> None:
        async def read() -> None:
            async with asyncio.timeout(0.03):
                async for _ in stream:
                    pass

        with pytest.raises(TimeoutError):
            await read()

    async def time_out_a_result(stream: TokenStream) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.03):
                await stream.result()

    async def time_out_at_start(stream: TokenStream) -> None:
        task = asyncio.create_task(stream.start())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    async def drop(stream: TokenStream) -> None:
        await anext(stream)

    async def drop_in_a_cycle(stream: TokenStream) -> None:
        await anext(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del cycle
        gc.collect()

    async def leave_the_block(stream: TokenStream) -> None:
        with pytest.raises(KeyError):
            async with stream:
                raise KeyError("of the application")

    async def use_aclosing(stream: TokenStream) -> None:
        async with aclosing(stream):
            await anext(stream)

    ways = [
        break_off,
        close,
        cancel_in_the_stream,
        cancel_a_sleeping_consumer,
        time_out,
        time_out_a_result,
        time_out_at_start,
        drop,
        drop_in_a_cycle,
        leave_the_block,
        use_aclosing,
    ]
    async with serving(latency=0.002, num_blocks=100) as (engine, model):
        for count, leave in enumerate(ways, 1):
            await leave(engine.stream([5], LONG))
            gc.collect()
            await eventually(lambda n=count: is_idle(engine) and engine.statistics().requests_aborted == n, 1.0)
        other = await engine.generate([5], GREEDY)
        assert list(other.token_ids) == model.expected([5], 10)


async def test_the_block_ends_when_the_cache_is_free() -> None:
    async with serving(latency=0.02) as (engine, _):
        for _ in range(5):
            async with engine.stream([5], LONG) as stream:
                await anext(stream)
                assert engine.statistics().blocks_used == 1
            assert is_idle(engine)
            stream = engine.stream([5], LONG)
            await anext(stream)
            await stream.aclose()
            assert is_idle(engine)
            await stream.aclose()


async def test_aclose_survives_cancellation() -> None:
    async with serving(latency=0.1) as (engine, _):
        stream = engine.stream([5], LONG)
        await anext(stream)
        task = asyncio.create_task(stream.aclose())
        for _ in range(5):
            await asyncio.sleep(0.005)
            task.cancel()
            assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_idle(engine)


async def test_aclose_in_a_cancelled_scope_of_anyio_waits_quietly() -> None:
    async with serving(latency=0.1) as (engine, _):
        cpu = time.thread_time()
        with anyio.move_on_after(0.15) as scope:
            async with engine.stream([5], LONG) as stream:
                async for _ in stream:
                    pass
        assert scope.cancelled_caught
        assert is_idle(engine)
        assert time.thread_time() - cpu < 0.1


async def test_a_closed_stream_is_over() -> None:
    async with serving(latency=0.005) as (engine, _):
        stream = engine.stream([5], LONG)
        first = await anext(stream)
        await stream.aclose()
        assert [delta async for delta in stream] == []
        completion = await stream.result()
        assert completion.finish_reason == "abort"
        assert completion.token_ids[: len(first.token_ids)] == first.token_ids
        never = engine.stream([5], LONG)
        await never.aclose()
        assert [delta async for delta in never] == []
        for use in (never.start, never.result):
            with pytest.raises(RequestError, match="closed before"):
                await use()


async def test_a_normal_end_sends_no_abort() -> None:
    async with serving() as (engine, _):
        for _ in range(5):
            await engine.generate([5], GREEDY)
            async for _delta in engine.stream([5], GREEDY):
                pass
            async with engine.stream([5], GREEDY) as stream:
                await stream.result()
        gc.collect()
        statistics = engine.statistics()
        assert (statistics.requests_finished, statistics.requests_aborted) == (15, 0)


async def test_the_engine_holds_no_stream() -> None:
    async with serving(latency=0.005) as (engine, _):
        stream = engine.stream([5], LONG)
        await anext(stream)
        reference = weakref.ref(stream)
        del stream
        assert reference() is None


async def test_a_task_that_waits_keeps_its_stream() -> None:
    async with serving(latency=0.01) as (engine, _):

        async def read() -> int:
            return sum([len(delta.token_ids) async for delta in engine.stream([5], GREEDY)])

        reading = asyncio.create_task(read())
        for _ in range(10):
            gc.collect()
            await asyncio.sleep(0.005)
        assert await reading == 10


# --- abort by name ---


async def test_abort_ends_a_request_wherever_it_stands() -> None:
    async with serving(latency=0.005, max_num_seqs=1) as (engine, _):
        unsubmitted = engine.stream([5], LONG, request_id="new")
        engine.abort("new")
        running = engine.stream([5], LONG, request_id="running")
        await anext(running)
        queued = engine.stream([5], LONG, request_id="queued")
        await queued.start()
        just_submitted = asyncio.create_task(engine.stream([5], LONG, request_id="started").result())
        await asyncio.sleep(0)
        for name in ("queued", "running", "started", "nobody"):
            engine.abort(name)
        for stream in (unsubmitted, running, queued):
            deltas = [delta async for delta in stream]
            assert deltas[-1].finish_reason == "abort"
            assert deltas[-1].usage is not None
        assert (await just_submitted).finish_reason == "abort"
        assert engine.statistics().requests_aborted == 4


async def test_abort_before_the_engine_has_started() -> None:
    engine = AsyncEngine(ShadowModel())
    stream = engine.stream([5], LONG, request_id="early")
    engine.abort("early")
    engine.abort("nobody")
    async with engine:
        assert (await stream.result()).finish_reason == "abort"


# --- failures ---


async def test_a_failed_step_ends_its_streams_and_the_engine_goes_on() -> None:
    async with serving(latency=0.01, max_num_seqs=2) as (engine, model):
        failing = [asyncio.create_task(engine.generate([5, n], LONG)) for n in range(2)]
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(engine.generate([6], GREEDY))
        cause = ValueError("a bad step")
        runner_of(model).fail_next(cause)
        for task in failing:
            with pytest.raises(RequestFailed) as caught:
                await task
            assert caught.value.__cause__ is cause
        assert list((await waiting).token_ids) == model.expected([6], 10)


async def test_a_failing_stream_delivers_what_it_had() -> None:
    async with serving(latency=0.01) as (engine, model):
        ids: list[int] = []

        async def read() -> None:
            async for delta in engine.stream([5], LONG):
                ids.extend(delta.token_ids)
                if len(ids) > 3:
                    runner_of(model).fail_next(ValueError("a bad step"))

        with pytest.raises(RequestFailed):
            await read()
        assert ids == model.expected([5], len(ids))


async def test_a_dead_engine_tells_everybody() -> None:
    model = ShadowModel(latency=0.01)
    async with AsyncEngine(model) as engine:
        streams = [engine.stream([5, n], LONG) for n in range(3)]
        for stream in streams:
            await anext(stream)
        waiting = asyncio.create_task(streams[2].result())
        runner_of(model).fail_next(EngineDead("the device is gone"))
        with pytest.raises(EngineDead):
            async for _ in streams[0]:
                pass
        with pytest.raises(EngineDead):
            await waiting
        await asyncio.wait_for(streams[1].aclose(), 1)
        with pytest.raises(EngineDead):
            await engine.generate([5], GREEDY)
        engine.statistics()


# --- start and close ---


async def test_nothing_is_started_by_making_an_engine() -> None:
    threads = threading.active_count()
    engine = AsyncEngine(ShadowModel())
    stream = engine.stream([5], GREEDY)
    assert threading.active_count() == threads
    for use in (stream.start, stream.result, lambda: engine.generate([5]), lambda: engine.tokenize("x")):
        with pytest.raises(EngineNotStarted):
            await use()
    with pytest.raises(EngineNotStarted):
        engine.statistics()
    async with engine:
        assert len((await stream.result()).token_ids) == 10  # what was made before the start is of use after it


async def test_settings() -> None:
    with pytest.raises(ConfigError, match="did you mean 'run_ahead'"):
        AsyncEngine(ShadowModel(), run_ahed=1)
    async with AsyncEngine(ShadowModel(), config=EngineConfig(num_blocks=7), block_size=8) as engine:
        assert engine.statistics().blocks_total == 7


async def test_closing() -> None:
    engine = AsyncEngine(ShadowModel(latency=0.005))
    await engine.start()
    await engine.start()
    stream, unused = engine.stream([5], LONG), engine.stream([5], LONG)
    await anext(stream)
    result = asyncio.create_task(engine.generate([5], LONG))
    await asyncio.sleep(0.02)
    await engine.aclose()
    with pytest.raises(EngineClosed):
        async for _ in stream:
            pass
    with pytest.raises(EngineClosed):
        await result
    for use in (unused.start, engine.start, lambda: engine.generate([5]), lambda: engine.tokenize("x")):
        with pytest.raises(EngineClosed):
            await use()
    await stream.aclose()
    await engine.aclose()
    engine.abort("nobody")
    assert is_idle(engine)


async def test_an_engine_that_was_closed_before_its_start() -> None:
    engine = AsyncEngine(ShadowModel())
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await engine.start()
    with pytest.raises(EngineClosed):
        await engine.generate([5])


async def test_draining() -> None:
    engine = AsyncEngine(ShadowModel(latency=0.005))
    await engine.start()
    short, long = engine.stream([5], GREEDY), engine.stream([6], LONG)
    await asyncio.gather(short.start(), long.start())
    closing = asyncio.create_task(engine.aclose(drain=0.4))
    await asyncio.sleep(0.01)
    with pytest.raises(EngineClosed):
        await engine.generate([5])
    assert len((await short.result()).token_ids) == 10
    with pytest.raises(EngineClosed):
        await long.result()
    await closing
    quick = AsyncEngine(ShadowModel())
    await quick.start()
    stream = quick.stream([5], GREEDY)
    await stream.start()
    start = time.monotonic()
    await quick.aclose(drain=60)
    assert time.monotonic() - start < 10
    assert len((await stream.result()).token_ids) == 10


async def test_cancelling_aclose_cuts_the_drain_and_still_gives_all_back() -> None:
    engine = AsyncEngine(ShadowModel(latency=0.05))
    await engine.start()
    stream = engine.stream([5], LONG)
    await stream.start()
    closing = asyncio.create_task(engine.aclose(drain=60))
    await asyncio.sleep(0.02)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(EngineClosed):
        await stream.result()
    assert is_idle(engine)


async def test_start_and_close_in_different_tasks_and_loops() -> None:
    engine = AsyncEngine(ShadowModel())
    await asyncio.to_thread(asyncio.run, engine.start())
    assert len((await engine.generate([5], GREEDY)).token_ids) == 10
    await asyncio.create_task(engine.aclose())


async def test_many_may_start_and_close_it_at_once() -> None:
    engine = AsyncEngine(ShadowModel())
    await asyncio.gather(*(engine.start() for _ in range(5)), asyncio.to_thread(asyncio.run, engine.start()))
    assert len((await engine.generate([5], GREEDY)).token_ids) == 10
    await asyncio.gather(*(engine.aclose() for _ in range(5)), asyncio.to_thread(asyncio.run, engine.aclose()))


async def test_a_load_that_fails_is_raised_and_may_be_tried_again() -> None:
    attempts = 0
    shadow = ShadowModel()

    async def load(config: EngineConfig, workers: Executor) -> ServedModel:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise InsufficientMemoryError("the cache does not fit")
        return await shadow(config, workers)

    engine = AsyncEngine(load)
    threads = threading.active_count()
    outcomes = await asyncio.gather(engine.start(), engine.start(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [InsufficientMemoryError] * 2
    await eventually(lambda: threading.active_count() <= threads + 1)  # the exit watcher may be new
    with pytest.raises(EngineNotStarted):
        await engine.generate([5])
    async with engine:
        assert len((await engine.generate([5], GREEDY)).token_ids) == 10


async def test_an_impossible_cache_is_an_error_of_start() -> None:
    shadow = ShadowModel()

    async def load(config: EngineConfig, workers: Executor) -> ServedModel:
        model = await shadow(config, workers)
        return replace(model, facts=replace(model.facts, num_blocks=2, groups=(CacheGroup(),) * 3))

    with pytest.raises(ConfigError, match="num_blocks"):
        await AsyncEngine(load).start()
    assert runner_of(shadow).closed  # the model was there already, and is given back


def after_ever(shadow: ShadowModel) -> ModelLoader:
    """A loader that waits for what never comes, and would then bring up the shadow."""

    async def load(config: EngineConfig, workers: Executor) -> ServedModel:
        await asyncio.get_running_loop().create_future()
        return await shadow(config, workers)

    return load


async def test_cancelling_start_closes_the_engine() -> None:
    shadow = ShadowModel()
    engine = AsyncEngine(after_ever(shadow))
    task = asyncio.create_task(engine.start())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(EngineClosed):
        await engine.start()
    await engine.aclose()
    assert shadow.runner is None  # the load was given up


async def test_closing_while_it_loads() -> None:
    shadow = ShadowModel()
    engine = AsyncEngine(after_ever(shadow))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0.05)
    with pytest.raises(EngineClosed):
        await engine.generate([5])
    with pytest.raises(EngineClosed):
        await starting
    await closing
    assert shadow.runner is None  # the load was given up


# --- loops, threads, engines ---


async def test_one_engine_serves_several_loops_and_threads() -> None:
    async with serving(latency=0.001) as (engine, model):

        async def read(first: int) -> list[list[int]]:
            async def one(n: int) -> list[int]:
                ids: list[int] = []
                async for delta in engine.stream([first, n], SamplingParams(temperature=0, max_tokens=30)):
                    ids += delta.token_ids
                return ids

            return await asyncio.gather(*(one(n) for n in range(8)))

        results = await asyncio.gather(*(asyncio.to_thread(asyncio.run, read(t)) for t in range(3)), read(3))
        for first, lists in enumerate(results):
            assert lists == [model.expected([first, n], 30) for n in range(8)]


async def test_a_closed_loop_ends_its_own_requests_only() -> None:
    async with serving(latency=0.005) as (engine, model):
        here = asyncio.create_task(engine.generate([5], SamplingParams(temperature=0, max_tokens=40)))
        held: list[TokenStream] = []

        def host() -> None:
            loop = asyncio.new_event_loop()
            held.append(engine.stream([6], LONG))
            loop.run_until_complete(anext(held[0]))
            loop.close()  # without a word to anybody

        await asyncio.to_thread(host)
        await eventually(lambda: held[0]._mailbox.released, 1.0)
        assert list((await here).token_ids) == model.expected([5], 40)
        assert engine.statistics().requests_aborted == 1


async def test_two_engines_in_one_process() -> None:
    async with serving() as (first, one), serving(run_ahead=2) as (second, two):
        results = await asyncio.gather(
            *(engine.generate([5, n], GREEDY) for n in range(10) for engine in (first, second))
        )
        for n in range(10):
            for result, model in zip(results[2 * n : 2 * n + 2], (one, two), strict=True):
                assert list(result.token_ids) == model.expected([5, n], 10)


def test_without_an_asyncio_loop_there_is_a_clear_error() -> None:
    engine = AsyncEngine(ShadowModel())
    for coroutine in (engine.start(), engine.aclose(), engine.tokenize("x")):
        with pytest.raises(EngineError, match="asyncio"):
            coroutine.send(None)  # what another async library would do

    async def serve() -> None:
        async with engine:
            with pytest.raises(EngineError, match="asyncio"):
                await asyncio.to_thread(engine.stream([5]).start().send, None)

    asyncio.run(serve())


class BrokenMapping(Mapping[str, Any]):
    """A caller's own kind of message, which fails when it is looked at."""

    def __getitem__(self, name: str) -> Any:
        raise OSError("broken")

    def __iter__(self) -> Iterator[str]:
        raise OSError("broken")

    def __len__(self) -> int:
        return 1


async def test_a_prompt_that_fails_when_looked_at_fails_alone(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as (engine, _):
        other = asyncio.create_task(engine.generate([5], GREEDY))
        with pytest.raises(RequestError):
            await engine.generate([BrokenMapping()])
        assert (await other).finish_reason == "length"


async def test_what_is_no_request_id_kills_nothing() -> None:
    async with serving() as (engine, _):
        wrongs: list[Any] = [[], None, 5]
        for wrong in wrongs:
            with pytest.raises(InvalidParamsError, match="request_id"):
                engine.abort(wrong)
        assert (await engine.generate([5], GREEDY)).finish_reason == "length"


async def test_a_huge_minimum_fails_nobody() -> None:
    async with serving() as (engine, _):
        params = SamplingParams(min_tokens=2**31 - 1, top_k=2**31 - 1, stop_token_ids=[3])
        assert (await engine.generate([5], params)).finish_reason == "length"


@pytest.mark.parametrize("seconds", [None, "1", True, math.nan, math.inf, 10**400])
async def test_impossible_seconds_are_refused(seconds: Any) -> None:
    async with serving() as (engine, _):
        with pytest.raises(ConfigError, match="drain"):
            await engine.aclose(seconds)
        if seconds is not None:
            with pytest.raises(InvalidParamsError, match="deadline"):
                engine.stream([5], deadline=seconds)
        assert (await engine.generate([5], GREEDY)).finish_reason == "length"


async def test_work_that_closing_drops_ends_with_engine_closed(tokenizer: Tokenizer) -> None:
    """Not with a CancelledError, in tasks that nobody has cancelled."""
    engine = AsyncEngine(ShadowModel(tokenizer=tokenizer))
    await engine.start()
    calls = [asyncio.ensure_future(engine.tokenize("word " * 10_000)) for _ in range(40)]
    cancelled = asyncio.ensure_future(engine.detokenize([5]))
    await asyncio.sleep(0)
    cancelled.cancel()
    await engine.aclose()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, list | EngineClosed) for answer in answers)
    assert any(isinstance(answer, EngineClosed) for answer in answers)
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_ids_that_are_cut_away_are_not_converted() -> None:
    """Converting millions of them would hold the interpreter lock, and the host's loop with it."""
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=8)
    ids = ["not an id"] * 1_000_000 + list(range(8))
    async with serving() as (engine, _):
        expected = await engine.generate(list(range(8)), params)
        for prompt in (ids, tuple(ids), np.arange(-8, 8), range(-8, 8)):
            found = await engine.generate(prompt, params)  # type: ignore[arg-type]  # not all of them are ids
            assert found.token_ids == expected.token_ids
        for wrong in ({3: 4}, {3}, 7, b"abc", [True]):
            with pytest.raises(InvalidPromptError):
                await engine.generate(wrong, params)  # type: ignore[arg-type]
        too_many = SamplingParams(truncate_prompt_tokens=5_000_000)
        with pytest.raises(ContextLengthError):
            await engine.generate([3] * 5_000_000, too_many)
