from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from asyncllm import AsyncEngine, SamplingParams, TokenDelta
from asyncllm.api.admission import Admission
from asyncllm.api.generation import Generation
from asyncllm.api.service_metrics import ServiceMetrics
from asyncllm.api.sse import compact
from asyncllm.api.token_events import TokenEvents
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.byte_tokenizer import byte_tokenizer
from asyncllm.testing.shadow_engine import ShadowModel
from tests.api.conftest import MakeEngine
from tests.api.servers import serving

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)


class Serving:
    """All that a generation asks of one."""

    metrics = ServiceMetrics("m")


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(ShadowModel(latency=0.001)) as running:
        yield running


async def events_of(engine: AsyncEngine, prompts: int = 1, n: int = 1, **options: Any) -> TokenEvents:
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1, n=n)
    streams = [engine.stream([5, 6, 7 + prompt], params) for prompt in range(prompts)]
    ticket = Admission(100).enter(prompts * n, 100)
    generation = Generation(Serving(), streams, ticket, request_id="r", server_limits=False)  # type: ignore[arg-type]  # all it asks for
    await generation.start()

    def render(delta: TokenDelta, position: int) -> str:
        return "".join(f"{position}.{delta.index}:{token} " for token in delta.token_ids)

    return TokenEvents(generation, render, str, n=n, **options)


def by_choice(sent: list[bytes]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for item in b"".join(sent).decode().split():
        choice, _, token = item.partition(":")
        found.setdefault(choice, []).append(token)
    return found


@pytest.mark.parametrize(("prompts", "n"), [(1, 1), (1, 3), (3, 1), (2, 2)])
async def test_poured_and_iterated_are_the_same(engine: AsyncEngine, prompts: int, n: int) -> None:
    iterated = [event async for event in await events_of(engine, prompts, n)]
    poured: list[bytes] = []

    async def send(event: bytes) -> None:
        assert asyncio.current_task() is None  # no task was woken for it
        poured.append(event)

    await (await events_of(engine, prompts, n)).pour(send)
    assert by_choice(poured) == by_choice(iterated)
    assert [len(tokens) for tokens in by_choice(poured).values()] == [40] * prompts * n
    assert len(poured) <= 41  # what comes in one step leaves together


async def test_what_comes_first_comes_first(engine: AsyncEngine) -> None:
    events = await events_of(engine, first="0.0:begin ")
    assert by_choice([event async for event in events])["0.0"][0] == "begin"


@pytest.mark.parametrize("pours", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_what_comes_last_may_take_its_time(engine: AsyncEngine, pours: bool, fails: bool) -> None:
    sent: list[bytes] = []

    async def send(event: bytes) -> None:
        sent.append(event)

    async def last() -> str:
        await asyncio.sleep(0.01)
        if fails:
            raise OSError("no room")
        return "0.0:end"

    events = await events_of(engine, last=last)
    if pours:
        await events.pour(send)
    else:
        sent = [event async for event in events]
    assert len(by_choice(sent[:-1])["0.0"]) == 40
    assert sent[-1] == (b"no room" if fails else b"0.0:end")


async def test_a_send_that_waits_is_gone_on_with_in_the_task(engine: AsyncEngine) -> None:
    sent: list[bytes] = []

    async def send(event: bytes) -> None:
        if len(sent) % 3 == 1:
            await asyncio.sleep(0)
            await asyncio.sleep(0.005)  # some tokens come meanwhile
            assert asyncio.current_task() is not None
        sent.append(event)

    await (await events_of(engine)).pour(send)
    assert [len(tokens) for tokens in by_choice(sent).values()] == [40]
    assert len(sent) < 40  # those merged


@pytest.mark.parametrize("waits", [False, True])
async def test_a_send_that_fails_ends_it_and_nobody_else(engine: AsyncEngine, waits: bool) -> None:
    other = asyncio.create_task(engine.generate([9], PARAMS))

    async def send(event: bytes) -> None:
        if waits:
            await asyncio.sleep(0.001)
        raise ConnectionResetError

    events = await events_of(engine)
    with pytest.raises(ConnectionResetError):
        await events.pour(send)
    await events.aclose()
    assert (await other).usage.completion_tokens == 40


@pytest.mark.parametrize("gone_on_with", [False, True])
async def test_cancelling_reaches_a_send_that_waits(engine: AsyncEngine, gone_on_with: bool) -> None:
    waiting, left = asyncio.Event(), False

    async def send(event: bytes) -> None:
        nonlocal left
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            left = True

    pouring = asyncio.create_task((await events_of(engine)).pour(send))
    await waiting.wait()
    if gone_on_with:
        await asyncio.sleep(0.01)
    pouring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pouring
    assert left


@pytest.mark.parametrize("pours", [False, True])
async def test_cancelling_between_two_tokens(pours: bool) -> None:
    async with AsyncEngine(ShadowModel(latency=0.05)) as engine:
        events = await events_of(engine)
        sent: list[bytes] = []

        async def send(event: bytes) -> None:
            sent.append(event)

        async def iterate() -> None:
            async for event in events:
                sent.append(event)

        sending = asyncio.create_task(events.pour(send) if pours else iterate())
        while not sent:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        count = len(sent)
        await asyncio.sleep(0.12)
        assert len(sent) == count
        await events.aclose()


@pytest.mark.parametrize("prompts", [1, 2])
async def test_an_error_is_the_last_event(engine: AsyncEngine, prompts: int) -> None:
    events = await events_of(engine, prompts)

    def render(delta: TokenDelta, position: int) -> str:
        raise ValueError("it cannot be told")

    events._render = render
    assert [event async for event in events] == [b"it cannot be told"]


@pytest.mark.parametrize("prompts", [1, 2])
async def test_an_error_that_comes_together_with_tokens_is_told(prompts: int) -> None:
    """A host that lags behind hears of both at once."""
    shadow = ShadowModel(latency=0.01)
    async with AsyncEngine(shadow) as engine:
        events = await events_of(engine, prompts)
        sent = [await anext(events)]
        assert shadow.runner is not None
        before = engine.statistics().tokens_generated
        time.sleep(0.05)  # noqa: ASYNC251
        assert engine.statistics().tokens_generated > before
        shadow.runner.fail_next(RuntimeError("the device is tired"))
        time.sleep(0.05)  # noqa: ASYNC251
        async with asyncio.timeout(5):
            sent += [event async for event in events]
    assert b"the device is tired" in sent[-1]


async def test_an_error_that_comes_together_with_one_framed_text_is_told() -> None:
    shadow = ShadowModel(latency=0.05, tokenizer=byte_tokenizer())
    async with AsyncEngine(shadow) as engine:
        events = await events_of(engine, frame=lambda: ("", ""))
        sent = [await anext(events)]
        assert shadow.runner is not None
        before = engine.statistics().tokens_generated
        while engine.statistics().tokens_generated == before:
            time.sleep(0.001)  # noqa: ASYNC251  # the loop is to be busy
        shadow.runner.fail_next(RuntimeError("the device is tired"))
        time.sleep(0.2)  # noqa: ASYNC251  # likewise
        async with asyncio.timeout(5):
            sent += [event async for event in events]
    assert b"the device is tired" in sent[-1]


@pytest.mark.parametrize("pours", [False, True])
async def test_a_framed_text_is_what_rendering_would_be(pours: bool) -> None:
    """Each delta takes the short way or the long one, as it comes; together they say the same."""
    tokenizer = byte_tokenizer()
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
    async with AsyncEngine(ShadowModel(latency=0.002, tokenizer=tokenizer)) as engine:
        expected = (await engine.generate("Hi", params)).text
        stream = engine.stream("Hi", params)
        generation = Generation(Serving(), [stream], Admission(9).enter(1, 9), request_id="r", server_limits=False)  # type: ignore[arg-type]  # as above
        await generation.start()
        rendered: list[TokenDelta] = []

        def render(delta: TokenDelta, position: int) -> str:
            rendered.append(delta)
            return f"<{compact(delta.text)}>\n" if delta.text else ""

        events = TokenEvents(generation, render, str, frame=lambda: ("<", ">\n") if len(rendered) > 3 else None)
        sent: list[bytes] = []
        if pours:
            await events.pour(sent.append)  # it returns None: nothing is left to do
        else:
            sent = [event async for event in events]
    lines = b"".join(sent).decode().splitlines()
    assert "".join(json.loads(line[1:-1]) for line in lines) == expected
    assert len(rendered) < len(lines)


@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn"])
async def test_every_chunk_is_framed_whichever_way_it_is_written(shadow: MakeEngine, kind: str) -> None:
    async with serving(kind, shadow()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"model": "", "prompt": "Hi", "max_tokens": 400, "stream": True, "ignore_eos": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"chunked" in head.lower()
        data = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            data += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert data.endswith(b"data: [DONE]\n\n")  # and an empty chunk behind it
        assert data.count(b'"finish_reason":"length"') == 1
        writer.close()


@pytest.mark.parametrize("asks", [b"", b"Connection: keep-alive\r\n"])
async def test_a_client_that_knows_no_chunks_gets_none(shadow: MakeEngine, asks: bytes) -> None:
    """Then the end of the connection is the end of the answer, whatever it asks for."""
    async with serving("aiohttp", shadow()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"model": "", "prompt": "Hi", "max_tokens": 50, "stream": True, "ignore_eos": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n" % (asks, len(body)) + body)
        async with asyncio.timeout(10):
            whole = await reader.read()
        head, data = whole.split(b"\r\n\r\n", 1)
        assert b"chunked" not in head.lower()
        assert all(event.startswith(b"data: ") for event in data.split(b"\n\n")[:-1])
        assert data.endswith(b"data: [DONE]\n\n")
        writer.close()


@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn"])
async def test_both_shells_pour(tokenizer: Tokenizer, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that changes must not take away unseen what the benchmark of HTTP's cost relies on."""
    model = ShadowModel(tokenizer=tokenizer)
    poured = at_once = 0
    pour = TokenEvents.pour

    async def counted(events: TokenEvents, send: Any) -> None:
        def looked_at(event: bytes) -> Any:
            nonlocal at_once
            rest = send(event)
            at_once += rest is None
            return rest

        nonlocal poured
        poured += 1
        assert model.runner is not None
        asyncio.get_running_loop().call_soon(model.runner.resume)  # when it is poured already, so no event has all
        await pour(events, looked_at)

    monkeypatch.setattr(TokenEvents, "pour", counted)
    async with AsyncEngine(model, max_model_len=2048, num_blocks=64) as engine, serving(kind, engine) as port:
        assert model.runner is not None
        model.runner.hold()
        asyncio.get_running_loop().call_later(10, model.runner.resume)  # for a server that does not pour
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.completions.create(
                model="", prompt="Hi", max_tokens=9, stream=True, extra_body={"ignore_eos": True}
            )
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
    assert poured == 1
    assert at_once
