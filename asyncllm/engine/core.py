"""Core: the engine's own loop. schedule → launch → (next schedule) → apply → deliver, and again.

Everything here runs on the engine's thread, as callbacks of the engine's event loop: one when a step's result is there,
one when commands are. Only the methods under "from any thread" may be called elsewhere. The next steps are launched
before the last one's tokens are delivered, so that the device does not wait for consumers.

Does not belong here: deciding (the scheduler), computing (the runner), tokenising and validating (`preparation`), who
listens (`live_requests`), the caller's side (`stream`, `async_engine`). What is done for every token is done in
`_deliver`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, TypeVar

from asyncllm.config import EngineConfig
from asyncllm.engine.live_requests import LiveRequests, Request
from asyncllm.engine.mailbox import Mailbox, Stage
from asyncllm.engine.model import ServedModel, scheduler_config
from asyncllm.engine.plan import StepResult
from asyncllm.engine.preparation import Preparation, Prepared, Submission, count_characters
from asyncllm.engine.scheduling.reports import Ended, StepTokens
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.step_pipeline import StepPipeline, clock
from asyncllm.engine.workers import Workers
from asyncllm.errors import AsyncLLMError, EngineClosed, EngineDead, RequestError, RequestFailed
from asyncllm.metrics import EngineStatistics
from asyncllm.results import FinishReason

logger = logging.getLogger("asyncllm")

Result = TypeVar("Result")

COMMANDS_A_TURN = 64
"""So that a thousand requests at once do not hold up the steps of those that run."""


class Core:
    """Serves one model. Made on the engine's thread, inside its running event loop."""

    def __init__(self, model: ServedModel, config: EngineConfig, workers: Workers) -> None:
        self.model = self._model = model
        self._workers = workers
        self._scheduler = Scheduler(scheduler_config(model.facts, config))
        self._preparation = Preparation(model, self._scheduler.config.capacity)
        self._loop = asyncio.get_running_loop()
        # One context for all callbacks: a caller's context variables must not live on in the engine's.
        self._context = contextvars.Context()
        self._pipeline = StepPipeline(self._scheduler, model.runner, self._step_done, self._context)
        self._commands: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._yielding = False  # there are more commands than one turn takes
        self._ids = count()
        self._live = LiveRequests()
        self._routes: list[Request] = []  # the requests of `_routed`, in its order
        self._routed: Sequence[int] | None = None
        self._found: list[int] = []  # requests whose stop string was found in this delivery
        self._timer: asyncio.TimerHandle | None = None  # for the next deadline
        self._closing = False
        self._dead: EngineDead | None = None
        self._tokens = 0
        self._counts = self._scheduler.counts()  # of the last turn: read by other threads
        self._served: asyncio.Future[None] = self._loop.create_future()

    async def serve(self) -> None:
        """Return once the engine was closed and no request or step is left."""
        await self._served

    def end(self) -> None:
        """Answer the commands that came too late. After the loop was closed, on its thread."""
        self._closing = True
        while self._commands:
            method, argument = self._commands.popleft()
            if method == self._open:
                method(argument)
        for request in self._live:  # none, unless the thread failed
            self._refuse(request, EngineDead("the engine's thread has failed"))
        self._live.send()

    # --- from any thread; none of them waits for anything ---

    def open(self, mailbox: Mailbox, submission: Submission, loop: asyncio.AbstractEventLoop) -> int:
        """A stream begins; what comes of it is left in its mailbox and told to `loop`. Returns the internal id.

        Raises `EngineClosed` where nobody would answer any more.
        """
        request = next(self._ids)
        if not self._command(self._open, (Request(request, mailbox, submission), submission, loop)):
            raise EngineClosed("the engine is closed")
        return request

    def abandon(self, request: int) -> None:
        """Nobody reads this request any more. A finalizer calls it, so it takes no lock."""
        self._command(self._abandon, request)

    def abort(self, request_id: str) -> None:
        """End the live request of this name, if there is one."""
        self._command(self._abort_named, request_id)

    def close(self, drain: float) -> None:
        """Take no more requests, and end those that are still there after `drain` seconds with `EngineClosed`."""
        self._command(self._close, drain)

    def on_worker(self, characters: int, work: Callable[[Preparation], Result]) -> Future[Result]:
        """Tokenising, rendering and the like, beside any request. Raises `EngineClosed`."""
        try:
            return self._workers.submit(characters, work, self._preparation)
        except RuntimeError as error:
            raise EngineClosed("the engine is closed") from error

    @property
    def is_dead(self) -> bool:
        """Whether a fault has ended it."""
        return self._dead is not None

    def statistics(self) -> EngineStatistics:
        """A snapshot as of the last turn."""
        counts, live = self._counts, self._live
        return EngineStatistics(
            requests_running=counts.running,
            requests_waiting=counts.waiting,
            rows_used=counts.rows_used,
            blocks_total=counts.blocks_total,
            blocks_used=counts.blocks_used,
            blocks_cached=counts.blocks_cached,
            blocks_free=counts.blocks_free,
            prompt_tokens=counts.prompt_tokens,
            prompt_tokens_cached=counts.prompt_tokens_cached,
            tokens_generated=self._tokens,
            tokens_computed=counts.tokens_computed,
            requests_finished=live.finished,
            requests_aborted=live.aborted,
            preemptions=counts.preemptions,
            memory_bytes=dict(self._model.facts.memory_bytes),
            step_times=self._pipeline.times(),
        )

    def _command(self, method: Callable[[Any], None], argument: Any) -> bool:
        # Each command wakes the loop. A flag that a turn is due already would save little, and a KeyboardInterrupt
        # between the flag and the wake-up would leave the engine deaf.
        self._commands.append((method, argument))
        try:
            self._loop.call_soon_threadsafe(self._run_commands, context=self._context)
        except RuntimeError:  # the loop is closed: the engine has ended, and every stream with it
            return False
        return True

    # --- turns ---

    def _run_commands(self) -> None:
        if self._commands and not self._yielding:
            self._run_turn(self._take_commands)

    def _take_commands(self) -> None:
        for _ in range(min(COMMANDS_A_TURN, len(self._commands))):
            method, argument = self._commands.popleft()
            method(argument)
        if self._commands:
            self._yielding = True
            self._loop.call_soon(self._go_on, context=self._context)

    def _go_on(self) -> None:
        self._yielding = False
        self._run_commands()

    def _run_turn(self, work: Callable[[], object]) -> None:
        """A turn that is not a step's: do this, then what follows from it."""
        try:
            work()
            if self._dead is None:
                self._launch()
                self._tell_lost()
                self._settle(self._scheduler.take_ended())
            else:
                self._rest()
        except Exception as error:
            self._die(error)

    def _step_done(self, future: asyncio.Future[StepResult]) -> None:
        """Apply the oldest launched step, launch what can be launched now, then deliver."""
        if self._dead is not None:
            return
        try:
            tokens = self._pipeline.take(future)
            self._launch()
            start = clock()
            ended = self._scheduler.take_ended()
            if tokens is not None:
                self._deliver(tokens, ended)
            self._tell_lost()  # after the delivery: a token that came is not lost with the step after it
            self._settle(ended + self._scheduler.take_ended())  # with those whose stop string came
            self._pipeline.rest(start)
        except Exception as error:
            self._die(error)

    def _launch(self) -> None:
        for request in self._pipeline.launch():
            self._live[request].mailbox.stage = Stage.RUNNING

    def _tell_lost(self) -> None:
        """End the requests of a failed step, and go on with the others."""
        while (lost := self._pipeline.take_lost()) is not None:
            for request in lost.requests:
                failure = RequestFailed.caused("the step that carried this request failed", lost.cause)
                self._live.fail(self._live[request], failure)
            self._launch()

    def _deliver(self, tokens: StepTokens, ended: Sequence[Ended]) -> None:
        """Leave each request's token, and the text that it adds, in its mailbox."""
        if tokens.requests is not self._routed:
            self._route(tokens.requests)
        for end in ended:
            request = self._live.get(end.request)
            if request is not None and end.stop_token_id is not None and not request.params.include_stop_str_in_output:
                request.mute()
        self._tokens += len(tokens.token_ids)
        self._live.take_scores(tokens)
        for request, token_id in zip(self._routes, tokens.token_ids, strict=True):
            mailbox = request.mailbox
            if request.push is not None:
                try:
                    text = request.push((token_id,))
                except Exception as error:
                    self._fail(request, RequestFailed.caused("the tokens could not be turned into text", error))
                    continue
                mailbox.texts.append(text)
            mailbox.ids.append(token_id)
            if mailbox.waiter is not None and not mailbox.signalled:
                mailbox.notify()
        for stopped in self._found:
            self._scheduler.finish(stopped, FinishReason.STOP)
        self._found.clear()

    def _route(self, requests: Sequence[int]) -> None:
        self._routed = requests
        routes = [self._live[request] for request in requests]
        now = clock()
        for request in routes:
            if request.first_token is None:
                request.first_token = now
        self._routes = [request.addressee for request in routes]

    def _settle(self, ended: Sequence[Ended]) -> None:
        """End a turn: tell the streams, and set the timer when no step will end that."""
        while True:
            for end in ended:
                self._end(end)
            for request in self._scheduler.take_released():
                self._live.release(request)
            self._counts = self._scheduler.counts()
            orphans = self._live.send()
            if not orphans:
                break
            for orphan in orphans:
                self._abort(orphan)
            ended = self._scheduler.take_ended()
        if not self._pipeline.busy:
            self._routed, self._routes = None, []  # nothing of the last step is kept
            self._set_timer()
            if self._closing and not len(self._live) and not self._served.done():
                self._served.set_result(None)

    def _rest(self) -> None:
        """End a turn of a dead engine."""
        self._live.send()
        if self._closing and not self._served.done():
            self._served.set_result(None)

    def _set_timer(self) -> None:
        deadline = self._scheduler.next_deadline()
        if self._timer is not None:
            if self._timer.when() == deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._run_turn, self._drop_timer, context=self._context)

    def _drop_timer(self) -> None:
        self._timer = None

    # --- commands ---

    def _open(self, opening: tuple[Request, Submission, asyncio.AbstractEventLoop]) -> None:
        request, submission, loop = opening
        try:
            self._live.admit(request, loop)
            if self._dead is not None or self._closing:
                raise EngineClosed("the engine is closed") if self._dead is None else self._death()
            if not request.mailbox.aborted:
                self._workers.submit(count_characters(submission.prompt), self._prepare, request, submission)
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
        try:
            prepared: Prepared | BaseException = self._preparation.prepare(submission)
        except BaseException as error:  # a panic in Rust is no Exception
            prepared = error
        self._command(self._add, (request, submission, prepared))

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
        if prepared.max_tokens == 0 and prepared.sampling.prompt_logprobs is None:
            return self._live.end_unscheduled(request, FinishReason.LENGTH)
        self._scheduler.add(prepared.spec(request.id, submission, self._model.facts.max_model_len))
        request.take_text(prepared, self._found)
        mailbox.stage = Stage.QUEUED
        mailbox.notify()

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
            self._scheduler.finish(request.id, FinishReason.ABORT)

    def _close(self, drain: float) -> None:
        self._closing = True
        if drain > 0:
            self._loop.call_later(drain, self._run_turn, self._cut_off, context=self._context)
        else:
            self._cut_off()

    def _cut_off(self) -> None:
        for request in self._live:
            self._fail(request, EngineClosed("the engine was closed"))

    # --- endings ---

    def _refuse(self, request: Request, error: AsyncLLMError) -> None:
        self._live.fail(request, error)
        self._live.release(request.id)

    def _fail(self, request: Request, error: AsyncLLMError) -> None:
        if request.mailbox.stage is Stage.PREPARING:
            self._refuse(request, error)
        else:
            self._live.fail(request, error)
            self._scheduler.finish(request.id, FinishReason.ABORT)

    def _die(self, error: Exception) -> None:
        """Nothing can be relied upon any more: every stream is told, and new ones are refused."""
        if self._dead is not None:
            return
        logger.error("the engine died", exc_info=error)
        self._dead = EngineDead(f"the engine has died: {error}")
        self._dead.__cause__ = error
        for request in self._live:
            self._refuse(request, self._death())
        if self._timer is not None:
            self._timer.cancel()
        self._rest()

    def _death(self) -> EngineDead:
        """An exception of its own for each stream, since each gets its own traceback."""
        death = EngineDead(str(self._dead))
        death.__cause__ = None if self._dead is None else self._dead.__cause__
        return death

    def _end(self, ended: Ended) -> None:
        request = self._live.get(ended.request)
        if request is not None:
            try:
                self._live.conclude(request, ended)
            except Exception as error:
                self._fail(request, RequestFailed.caused("the tokens could not be turned into text", error))
