"""Two thousand requests, half of them ended at random moments by every means: nothing leaks, the rest are right."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.engine.core import Core
from asyncllm.engine.live_requests import Request
from asyncllm.engine.mailbox import Mailbox
from asyncllm.engine.plan import CacheGroup
from asyncllm.engine.stream import TokenStream
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.shadow_engine import ShadowModel
from tests.engine.conftest import eventually
from tests.engine.constraints import Rounds, constrained

REQUESTS = 2000
LOOPS, STREAMS_A_LOOP = 5, 20  # closed while their streams run
MOMENT = 4.0
"""Seconds within which the storm happens: some requests end in preparation or in the queue, some while they run."""


CONSTRAINT = Rounds(512, [range(60, 300), range(200, 500), None], forces={3: (70, 71)})


async def look_later(*_: object) -> None:
    await asyncio.sleep(0)


def look(*_: object) -> None:
    pass


KINDS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"seed": 1},  # constrained
    {"logits_processors": [look_later]},
    {"on_token": look},
    {"n": 2, "seed": 1, "on_token": look_later},
    {},
]
"""What requests ask for beside tokens, in turn."""


class Storm:
    """Requests over one engine, each left in its own way."""

    def __init__(self, engine: AsyncEngine, model: ShadowModel, tokenizer: Tokenizer, seed: int) -> None:
        self.engine = engine
        self.model = model
        self.tokenizer = tokenizer
        self.dice = random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.prompts: dict[int, list[int]] = {}

    def stream(self, n: int, length: int) -> TokenStream:
        shared = [7, 8, 9] * 6  # more than a block: the cache is shared
        prompt = [*shared[: self.dice.randrange(19)], n % 500, n // 500]
        params = SamplingParams(temperature=0, max_tokens=length, stop="\x00\x00", **KINDS[n % len(KINDS)])
        self.prompts[n] = prompt
        return self.engine.stream(prompt, params, request_id=f"storm {n}", priority=n % 3)

    async def whole(self, n: int) -> None:
        """Read to the end, and check what came."""
        await asyncio.sleep(self.dice.random() * MOMENT / 2)
        length = self.dice.randrange(1, 30)
        stream, kind = self.stream(n, length), KINDS[n % len(KINDS)]
        if n % 2:
            completion = await stream.result()
            answers = [(list(choice.token_ids), choice.text) for choice in completion.choices]
        else:
            deltas = [delta async for delta in stream]
            answers = []
            for index in range(kind.get("n", 1)):
                own = [delta for delta in deltas if delta.index == index]
                ids = [token_id for delta in own for token_id in delta.token_ids]
                answers.append((ids, "".join(delta.text for delta in own)))
        assert len(answers) == kind.get("n", 1)
        for ids, text in answers:
            if "seed" in kind:
                CONSTRAINT.copy().accept(ids)
                assert len(ids) == length
            else:
                assert ids == self.model.expected(self.prompts[n], length)
            assert text == self.tokenizer.decode(ids)
        self.ended["whole"] += 1

    async def cut(self, n: int) -> None:
        """Leave at a random moment."""
        ways: list[Callable[[TokenStream], Awaitable[None]]] = [
            self.break_off,
            self.close,
            self.leave_block,
            self.cancel,
            self.time_out,
            self.drop,
            self.drop_in_a_cycle,
            self.abort,
        ]
        way = ways[n % len(ways)]
        await asyncio.sleep(self.dice.random() * MOMENT / 2)
        await way(self.stream(n, 200))
        self.ended[way.__name__] += 1

    async def break_off(self, stream: TokenStream) -> None:
        left = self.dice.randrange(4)
        async for _ in stream:
            left -= 1
            if left <= 0:
                break

    async def close(self, stream: TokenStream) -> None:
        if self.dice.random() < 0.8:
            await stream.start()
            await asyncio.sleep(self.dice.random() * 0.5)
        await stream.aclose()
        assert stream._loop is None or stream._mailbox.released

    async def leave_block(self, stream: TokenStream) -> None:
        async with stream:
            if self.dice.random() < 0.5:
                await anext(stream)
        assert stream._mailbox.released

    async def cancel(self, stream: TokenStream) -> None:
        task = asyncio.create_task(stream.result() if self.dice.random() < 0.5 else self.break_off(stream))
        await asyncio.sleep(self.dice.choice([0, self.dice.random() * 0.5]))
        task.cancel()
        await asyncio.wait([task])

    async def time_out(self, stream: TokenStream) -> None:
        try:
            async with asyncio.timeout(self.dice.random() * 0.5):
                async for _ in stream:
                    await asyncio.sleep(self.dice.random() * 0.02)
        except TimeoutError:
            pass

    async def drop(self, stream: TokenStream) -> None:
        if self.dice.random() < 0.8:
            await stream.start()
        if self.dice.random() < 0.5:
            await anext(stream)

    async def drop_in_a_cycle(self, stream: TokenStream) -> None:
        await stream.start()
        cycle: list[object] = [stream]
        cycle.append(cycle)

    async def abort(self, stream: TokenStream) -> None:
        task = asyncio.create_task(stream.result())
        await asyncio.sleep(self.dice.choice([0, self.dice.random() * 0.5]))
        self.engine.abort(stream.request_id)
        assert (await task).finish_reason in ("abort", "length")

    def close_a_loop(self, first: int) -> None:
        """A host thread whose loop is closed while its tasks wait."""
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)  # it would log the tasks that it leaves pending
        streams = [self.stream(n, 200) for n in range(first, first + STREAMS_A_LOOP)]
        tasks = [loop.create_task(self.break_off(stream)) for stream in streams]
        loop.run_until_complete(asyncio.sleep(self.dice.random()))
        loop.close()
        self.ended["closed loop"] += len(tasks)


def living() -> list[object]:
    return [thing for thing in gc.get_objects() if type(thing) in (Mailbox, Request)]


@pytest.mark.parametrize(
    ("run_ahead", "windows"),
    [pytest.param(0, False, marks=pytest.mark.full), (1, True), pytest.param(2, False, marks=pytest.mark.full)],
)
async def test_storm(run_ahead: int, windows: bool, tokenizer: Tokenizer) -> None:
    threads = set(threading.enumerate())
    of_other_tests = living()
    others = set(map(id, of_other_tests))
    groups = (CacheGroup(), CacheGroup(window=20)) if windows else (CacheGroup(),)
    model = ShadowModel(tokenizer=tokenizer, latency=0.0005, groups=groups)
    settings = {"num_blocks": 32 * len(groups), "block_size": 8, "max_num_seqs": 48, "max_batched_tokens": 96}
    load = constrained(model, lambda params: None if params.seed is None else CONSTRAINT.copy())
    async with AsyncEngine(load, run_ahead=run_ahead, **settings) as engine:
        storm = Storm(engine, model, tokenizer, seed=run_ahead)
        by_closed_loops = LOOPS * STREAMS_A_LOOP
        hosts = [asyncio.to_thread(storm.close_a_loop, REQUESTS + STREAMS_A_LOOP * n) for n in range(LOOPS)]
        cuts = [storm.cut(n) for n in range(REQUESTS // 2 - by_closed_loops)]
        wholes = [storm.whole(n) for n in range(REQUESTS // 2, REQUESTS)]
        await asyncio.gather(*hosts, *cuts, *wholes)
        gc.collect()
        assert storm.ended.total() == REQUESTS
        assert storm.ended["whole"] == REQUESTS // 2

        assert engine._home is not None
        core = engine._home.started.result()
        assert isinstance(core, Core)
        await eventually(lambda: not len(core._live) and engine.statistics().blocks_used == 0)
        statistics = engine.statistics()
        print(f"\n{dict(storm.ended)} {statistics}")
        assert statistics.blocks_cached + statistics.blocks_free == statistics.blocks_total
        assert (statistics.rows_used, statistics.requests_running, statistics.requests_waiting) == (0, 0, 0)
        assert statistics.requests_aborted > REQUESTS // 4
        assert statistics.preemptions > 0
        assert model.runner is not None
        assert not model.runner.faults
        core._scheduler.check_integrity()
        assert not core._live._names
        assert not engine._unsubmitted
        assert len(asyncio.all_tasks()) == 1
        await eventually(lambda: not core._live._consumers._loops and not core._commands)

        def nothing_lives() -> bool:
            gc.collect()
            return not [thing for thing in living() if id(thing) not in others]

        await eventually(nothing_lives)

    def nothing_runs() -> bool:
        names = {thread.name for thread in set(threading.enumerate()) - threads}
        return not {name for name in names if name.startswith("asyncllm") and name != "asyncllm-exit"}

    await eventually(nothing_runs)  # a hook that was under way when its request ended may take a moment
