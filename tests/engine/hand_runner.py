"""A core driven by hand: steps complete when the test says so, preparation is done on the spot."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

import numpy as np

from asyncllm.config import EngineConfig
from asyncllm.engine.core import Core
from asyncllm.engine.execution.runner import ModelFacts, StepTicket
from asyncllm.engine.mailbox import Mailbox
from asyncllm.engine.model import ModelLoader, ServedModel
from asyncllm.engine.plan import CacheGroup, LateTokens, StepPlan, StepResult
from asyncllm.engine.preparation import ChatOptions, Prompt, Submission
from asyncllm.engine.step_pipeline import clock
from asyncllm.engine.workers import Workers
from asyncllm.inputs.chat_template import ChatTemplate
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.outputs.token_mask import Mask
from asyncllm.params import SamplingParams


class InlineExecutor(Executor):
    """Does the work at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class HandRunner:
    """Keeps launched plans until `complete` or `fail`; every sampled token is `token`."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.waiting: deque[tuple[StepPlan, StepTicket]] = deque()
        self.token = 7
        self.on_launch: Callable[[StepPlan], object] = lambda plan: None
        self.closed = False

    def launch(self, plan: StepPlan) -> StepTicket:
        self.on_launch(plan)
        self.plans.append(plan)
        loop = asyncio.get_running_loop()
        ticket = StepTicket(loop.create_future(), None if plan.late is None else loop.create_future())
        self.waiting.append((plan, ticket))
        return ticket

    async def complete_late(self) -> None:
        """The late tokens of the oldest launched step are here."""
        plan, ticket = self.waiting[0]
        if plan.late is not None and ticket.late is not None and not ticket.late.done():
            masks = plan.late.masks
            tokens = [self.token] * len(plan.late.rows)
            if masks is not None:
                tokens = [first_legal(mask, self.token) for mask in masks]
            ticket.late.set_result(LateTokens(plan.step, np.array(tokens, np.int32)))
            await settle()

    async def complete(self, steps: int = 1) -> None:
        """Complete the oldest launched steps, one after another, and let the core react."""
        for _ in range(steps):
            await self.complete_late()
            plan, ticket = self.waiting.popleft()
            ticket.result.set_result(StepResult(plan.step, np.full(plan.num_sampled, self.token, np.int32)))
            await settle()

    async def fail(self, error: Exception) -> None:
        _, ticket = self.waiting.popleft()
        if ticket.late is not None and not ticket.late.done():
            ticket.late.set_exception(error)
        ticket.result.set_exception(error)
        await settle()

    async def aclose(self) -> None:
        self.closed = True


def first_legal(mask: Mask, token_id: int) -> int:
    """This token, or the next legal one."""
    legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(legal[np.searchsorted(legal, token_id) % len(legal)])


class ThreadRunner:
    """Answers from a thread of its own, `latency` seconds after the step before; costs next to no Python."""

    def __init__(self, latency: float) -> None:
        self._latency = latency
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[StepPlan, asyncio.Future[StepResult]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="thread-runner")
        self._thread.start()

    def launch(self, plan: StepPlan) -> StepTicket:
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._queue.put((plan, future))
        return StepTicket(future)

    async def aclose(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (launched := self._queue.get()) is not None:
            plan, future = launched
            time.sleep(self._latency)
            result = StepResult(plan.step, np.full(plan.num_sampled, 70 + plan.step % 20, np.int32))
            self._loop.call_soon_threadsafe(future.set_result, result)


def thread_model(latency: float, tokenizer: Tokenizer | None = None) -> ModelLoader:
    """A model for many streams: nothing of it shows in a measurement of the engine."""

    async def load(config: EngineConfig, workers: Executor) -> ServedModel:
        facts = ModelFacts(
            vocab_size=512,
            max_model_len=1024,
            block_size=16,
            num_blocks=8192,
            groups=(CacheGroup(),),
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=1024,
            memory_bytes={},
            dtype="none",
            device="thread",
        )
        template = None if tokenizer is None else ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
        return ServedModel(ThreadRunner(latency), facts, tokenizer, template)

    return load


class HandDriven:
    """A core in the test's own event loop."""

    def __init__(self, tokenizer: Tokenizer | None = None, workers: Executor | None = None, **settings: Any) -> None:
        self.runner = HandRunner()
        config = EngineConfig(**settings)
        facts = ModelFacts(
            vocab_size=512,
            max_model_len=config.max_model_len or 256,
            block_size=16,
            num_blocks=config.num_blocks or 64,
            groups=(CacheGroup(),),
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens or 256,
            memory_bytes={"weights": 5},
            dtype="none",
            device="hand",
        )
        model = ServedModel(self.runner, facts, tokenizer, eos_token_ids=frozenset({2}))
        executor = workers or InlineExecutor()
        self.core = Core(model, config, Workers(executor, executor, executor))

    async def open(
        self,
        prompt: Prompt = (5, 6, 7),
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        deadline: float | None = None,
    ) -> Mailbox:
        """Submit a request, and let the core take it in."""
        mailbox = Mailbox(request_id or f"r{id(object())}-{clock()}")
        submission = Submission(
            prompt=prompt,
            params=params or SamplingParams(max_tokens=8),
            arrival=clock(),
            chat=ChatOptions(),
            deadline=None if deadline is None else clock() + deadline,
        )
        self.core.open(mailbox, submission, loop or asyncio.get_running_loop())
        await settle()
        return mailbox


async def settle() -> None:
    """Let every callback that is ready run, and those that they bring."""
    for _ in range(8):
        await asyncio.sleep(0)
