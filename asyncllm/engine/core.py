"""Core: the engine's own loop. schedule → launch → (next schedule) → apply → deliver, and again.

Everything here runs on the engine's thread, as callbacks of the engine's event loop: one when a step's result is there,
one when commands are. Only the methods under "from any thread" may be called elsewhere. The next steps are launched
before the last one's tokens are delivered, so that the device does not wait for consumers.

Does not belong here: deciding (the scheduler), computing (the runner), tokenising and validating (`preparation`), who
listens (`live_requests`), what becomes of a token (`delivery`), what a late request's host has to say (`guidance`), the
caller's side (`stream`, `async_engine`).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.engine.alarm import Alarm
from asyncllm.engine.command_queue import CommandQueue
from asyncllm.engine.consumers import Consumers, LoopConsumers
from asyncllm.engine.delivery import Delivery
from asyncllm.engine.execution.runner import Embeds
from asyncllm.engine.guidance import CoreTurns, Guidance
from asyncllm.engine.hook_place import HookPlace
from asyncllm.engine.live_requests import LiveRequests, Request
from asyncllm.engine.mailbox import Mailbox, Stage
from asyncllm.engine.model import ServedModel, scheduler_config
from asyncllm.engine.plan import Float32Array, Int32Array, LateTokens, StepResult
from asyncllm.engine.preparation import Preparation, Prepared, Submission, TextWork
from asyncllm.engine.scheduling.reports import Ended
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.side_work import SideWork
from asyncllm.engine.statistics import engine_statistics
from asyncllm.engine.step_pipeline import StepPipeline, clock
from asyncllm.engine.workers import Workers
from asyncllm.errors import AsyncLLMError, EngineClosed, EngineDead, InvalidParamsError, RequestError, RequestFailed
from asyncllm.metrics import EngineState, EngineStatistics, Inspection, ModelDescription
from asyncllm.results import FinishReason

logger = logging.getLogger("asyncllm")


class Core:
    """Serves one model. Made on the engine's thread, inside its running event loop."""

    def __init__(
        self, model: ServedModel, config: EngineConfig, workers: Workers, consumers: Consumers | None = None
    ) -> None:
        self.model, self._config = model, config
        self._workers = workers
        self._scheduler = Scheduler(scheduler_config(model.facts, config))
        self._preparation = Preparation(model, config, self._scheduler.config.capacity)
        self._loop = asyncio.get_running_loop()
        # One context for all callbacks: a caller's context variables must not live on in the engine's.
        self._context = contextvars.Context()
        self._pipeline = StepPipeline(
            self._scheduler, model.runner, done=self._step_done, late_done=self._late_done, context=self._context
        )
        self._commands = CommandQueue(self._loop, self._context, self._run_turn)
        self._beside = SideWork(self._loop, self._context)
        self._ids = count()
        self._live = LiveRequests(consumers or LoopConsumers())
        self._failing: list[tuple[Request, AsyncLLMError]] = []  # see `_tell_failed`
        self._delivery = Delivery(self._scheduler, self._live, self._fail_soon)
        turns = CoreTurns(self._loop, self._context, self._run_turn, self._fail_soon, config.hook_timeout)
        self._guidance = Guidance(self._scheduler, self._live, self._delivery, workers.guides, turns)
        self._deadline = Alarm(self._loop, self._context, self._turn)  # the next one
        self._hold = Alarm(self._loop, self._context, self._turn)  # for a plan that was put off
        self._closing = False
        self._dead: EngineDead | None = None
        self._counts = self._scheduler.counts()  # of the last turn: read by other threads
        self._served: asyncio.Future[None] = self._loop.create_future()

    async def serve(self) -> None:
        """Return once the engine was closed and no request or step is left."""
        await self._served
        await self._beside.aclose()
        await self._guidance.aclose()

    def end(self) -> None:
        """Answer the commands that came too late. After the loop was closed, on its thread."""
        self._closing = True
        self._beside.end()
        while (command := self._commands.take()) is not None:
            method, argument = command
            if method == self._open:
                method(argument)
        for request in self._live:  # none, unless the thread failed
            self._refuse(request, EngineDead("the engine's thread has failed"))
        self._live.send()

    # --- from any thread; none of them waits for anything ---

    def open(
        self, mailbox: Mailbox, submission: Submission, loop: asyncio.AbstractEventLoop, place: HookPlace | None = None
    ) -> int:
        """As `CoreAccess.open`; `place`: see `Request`."""
        request = next(self._ids)
        opening = Request(request, mailbox, submission, loop, place)
        if not self._commands.post(self._open, (opening, submission)):
            raise EngineClosed("the engine is closed")
        return request

    def abandon(self, request: int) -> None:
        """Nobody reads this request any more. A finalizer calls it, so it takes no lock."""
        self._commands.post(self._abandon, request)

    def abort(self, request_id: str) -> None:
        """End the live request of this name, if there is one."""
        self._commands.post(self._abort_named, request_id)

    def close(self, drain: float) -> None:
        """Take no more requests, and end those that are still there after `drain` seconds with `EngineClosed`."""
        self._commands.post(self._close, drain)

    def text(self, work: TextWork) -> Future[Any]:
        """As `CoreAccess.text`."""
        try:
            return self._workers.submit(work.characters, self._preparation.carry_out, work)
        except RuntimeError as error:
            raise EngineClosed("the engine is closed") from error

    def embed(self, token_ids: Int32Array) -> Future[Float32Array]:
        """As `CoreAccess.embed`."""
        runner = self.model.runner
        if not isinstance(runner, Embeds):
            raise InvalidParamsError(f"there are no embeddings on {self.model.facts.device}: its runner has none")
        return self._beside.begin(runner.embed(token_ids))

    @property
    def state(self) -> EngineState:
        """As `CoreAccess.state`."""
        return EngineState.RUNNING if self._dead is None else EngineState.DEAD

    def describe(self, name: str) -> ModelDescription:
        """What is served, under that name."""
        return self.model.describe(name)

    def statistics(self) -> EngineStatistics:
        """A snapshot as of the last turn."""
        return engine_statistics(
            self._counts,
            self._live,
            tokens_generated=self._delivery.tokens,
            memory_bytes=self.model.facts.memory_bytes,
            step_times=self._pipeline.times(),
        )

    def inspect(self, limit: int) -> Future[Inspection]:
        """As `CoreAccess.inspect`."""
        found: Future[Inspection] = Future()
        found.set_result(Inspection(self._scheduler.cache.pool.states(), self._live.views(limit)))
        return found

    # --- turns ---

    def _run_turn(self, work: Callable[[], object]) -> None:
        """A turn that is not a step's: do this, then what follows from it."""
        try:
            work()
            if self._dead is None:
                self._launch()
                self._tell_failed()
                self._settle()
            else:
                self._rest()
        except Exception as error:
            self._die(error)

    def _turn(self) -> None:
        """One for what every turn does."""
        self._run_turn(lambda: None)

    def _step_done(self, future: asyncio.Future[StepResult]) -> None:
        """Apply the oldest launched step, launch what can be launched now, then deliver."""
        if self._dead is not None:
            return
        try:
            tokens = self._pipeline.take(future)
            self._launch()
            start = clock()
            self._delivery.note_ended()
            if tokens is not None:
                self._delivery.deliver(tokens)
                if tokens.logits:
                    self._guidance.take_logits(tokens)
            self._tell_failed()  # after the delivery: a token that came is not lost with the step after it
            self._settle()
            self._pipeline.rest(start)
        except Exception as error:
            self._die(error)

    def _late_done(self, future: asyncio.Future[LateTokens]) -> None:
        if self._dead is None:
            self._run_turn(lambda: self._take_late(future))

    def _take_late(self, future: asyncio.Future[LateTokens]) -> None:
        tokens = self._pipeline.take_late(future)
        if tokens is not None:
            self._guidance.take_late(tokens)

    def _launch(self) -> None:
        """Launch what can be launched now, with the words that are there; what is put off, then."""
        guidance, launches = self._guidance, self._pipeline.launches
        guidance.take_words()
        for request in self._pipeline.launch(guidance.awaited):
            self._live[request].mailbox.stage = Stage.RUNNING
        if self._pipeline.launches != launches:
            guidance.let_pass()
        self._hold.set(self._pipeline.hold_until(guidance.awaited()))

    def _tell_failed(self) -> None:
        """End the requests that have failed, alone or with their step, and go on with the others. Every token that has
        come is delivered by then, so that errors follow it."""
        while self._failing or self._pipeline.is_lost:
            self._tell_ended()
            failing, self._failing = self._failing, []
            for request, failure in failing:
                self._fail(request, failure)
            if (lost := self._pipeline.take_lost()) is not None:
                for branch in lost.requests:
                    failure = RequestFailed.caused("the step that carried this request failed", lost.cause)
                    self._fail(self._live[branch].request, failure)
            self._launch()

    def _settle(self) -> None:
        """End a turn: tell the streams, and set the timer when no step will end that."""
        while True:
            self._tell_ended()
            for request in self._scheduler.take_released():
                self._live.release_branch(request)
            self._counts = self._scheduler.counts()
            orphans = self._live.send()
            if not orphans:
                break
            for orphan in orphans:
                self._abort(orphan)
        if not self._pipeline.busy:
            self._delivery.rest()
            self._deadline.set(self._scheduler.next_deadline())
            if self._closing and not len(self._live) and not self._served.done():
                self._served.set_result(None)

    def _rest(self) -> None:
        """End a turn of a dead engine."""
        self._live.send()
        if self._closing and not self._served.done():
            self._served.set_result(None)

    # --- commands ---

    def _open(self, opening: tuple[Request, Submission]) -> None:
        request, submission = opening
        try:
            self._live.admit(request)
            if self._dead is not None or self._closing:
                raise EngineClosed("the engine is closed") if self._dead is None else self.death()
            if not request.mailbox.aborted:
                if self._preparation.is_quick(submission):
                    return self._add((request, submission, self._prepared(submission)))
                self._workers.submit(submission.characters, self._prepare, request, submission)
        except AsyncLLMError as error:
            self._refuse(request, error)
        except RuntimeError as error:  # the workers are gone: the interpreter is about to end
            self._refuse(request, EngineClosed(f"the engine is closed: {error}"))
        except Exception as error:  # of the caller's own objects, whose text is counted
            self._refuse(request, RequestFailed.caused("the request could not be prepared", error))
        if request.mailbox.aborted:
            self._live.end_unscheduled(request, FinishReason.ABORT)

    def _prepare(self, request: Request, submission: Submission) -> None:
        """On a worker thread: no harm comes of a request that ends meanwhile."""
        if request.mailbox.stage is Stage.DONE:
            return
        self._commands.post(self._add, (request, submission, self._prepared(submission)))

    def _prepared(self, submission: Submission) -> Prepared | BaseException:
        try:
            return self._preparation.prepare(submission)
        except BaseException as error:  # a panic in Rust is no Exception
            return error

    def _add(self, addition: tuple[Request, Submission, Prepared | BaseException]) -> None:
        request, submission, prepared = addition
        if request.mailbox.done:
            return  # its abort came first
        try:
            if isinstance(prepared, BaseException):
                raise prepared
            self._queue(request, submission, prepared)
        except RequestError as error:
            self._refuse(request, error)
        except BaseException as error:
            self._refuse(request, RequestFailed.caused("the request could not be prepared", error))

    def _queue(self, request: Request, submission: Submission, prepared: Prepared) -> None:
        mailbox = request.mailbox
        self._scheduler.check_admissible(len(prepared.token_ids))
        request.queued = clock()
        mailbox.prompt = prepared.token_ids
        first = prepared.choices[0].sampling
        mailbox.take_logprobs(prepared.logprobs, first)
        if prepared.max_tokens == 0 and first.prompt_logprobs is None:
            return self._live.end_unscheduled(request, FinishReason.LENGTH)
        ids = [request.id, *(next(self._ids) for _ in prepared.choices[1:])]
        branches = zip(self._live.begin(request, ids), prepared.choices, strict=True)
        for index, (branch, choice) in enumerate(branches):
            self._scheduler.add(prepared.spec(index, ids, submission, self.model.facts.max_model_len))
            branch.take_text(choice, prepared.min_tokens, self._delivery.found)
            self._guidance.begin(branch, choice)
        mailbox.begin()

    def _abandon(self, request: int) -> None:
        self._abort(self._live.get(request))

    def _abort_named(self, request_id: str) -> None:
        self._abort(self._live.named(request_id))

    def _abort(self, request: Request | None) -> None:
        if request is None:
            return
        if request.mailbox.stage is Stage.PREPARING:
            self._live.end_unscheduled(request, FinishReason.ABORT)
        else:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        for branch in request.branches:
            self._scheduler.finish(branch.id, FinishReason.ABORT)
            self._guidance.drop(branch)

    def _close(self, drain: float) -> None:
        self._closing = True
        if drain > 0:
            self._loop.call_later(drain, self._run_turn, self._cut_off, context=self._context)
        else:
            self._cut_off()

    def _cut_off(self) -> None:
        self._tell_ended()
        for request in self._live:
            self._fail(request, EngineClosed("the engine was closed"))

    # --- endings ---

    def _refuse(self, request: Request, error: AsyncLLMError) -> None:
        self._live.fail(request, error)
        self._live.release(request)

    def _fail_soon(self, request: Request, error: AsyncLLMError) -> None:
        """In this turn, see `_tell_failed`."""
        self._failing.append((request, error))

    def _fail(self, request: Request, error: AsyncLLMError) -> None:
        if request.mailbox.stage is Stage.PREPARING:
            self._refuse(request, error)
        else:
            self._live.fail(request, error)
            self._finish(request)

    def _die(self, error: Exception) -> None:
        """Nothing can be relied upon any more: every stream is told, and new ones are refused."""
        if self._dead is not None:
            return
        logger.error("the engine died", exc_info=error)
        self._dead = EngineDead(f"the engine has died: {error}")
        self._dead.__cause__ = error
        for request in self._live:
            self._refuse(request, self.death())
        self._deadline.set(None)
        self._hold.set(None)
        self._rest()

    def death(self) -> EngineDead:
        """An exception of its own for each stream, since each gets its own traceback."""
        death = EngineDead(str(self._dead))
        death.__cause__ = None if self._dead is None else self._dead.__cause__
        return death

    def _tell_ended(self) -> None:
        """Who has ended hears of it, before anything that comes later may end them otherwise."""
        for end in self._delivery.take_ended():
            self._end(end)

    def _end(self, ended: Ended) -> None:
        self._guidance.end(ended)
        branch = self._live.branch(ended.request)
        if branch is not None:
            try:
                self._live.conclude(branch, ended)
            except Exception as error:
                self._fail(branch.request, RequestFailed.caused("the tokens could not be turned into text", error))
