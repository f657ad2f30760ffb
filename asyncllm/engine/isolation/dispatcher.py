"""Dispatcher: in the host, a thread that tells the child what callers want of it.

Callers only put commands into a queue, which takes no lock. While there is no child, or it is loading, what is for it
waits here. The dispatcher also ends a child that does not end by itself.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Literal

from asyncllm.engine.isolation.channel import encode
from asyncllm.engine.isolation.child_process import ChildProcess
from asyncllm.engine.isolation.messages import Abandon, Abort, Answer, Ask, Begin, Close, HookReturned, Open
from asyncllm.engine.isolation.remote_hooks import without_functions
from asyncllm.engine.isolation.remote_streams import RemoteStream, RemoteStreams
from asyncllm.engine.isolation.travel import pack_plain
from asyncllm.errors import AsyncLLMError, EngineClosed, InvalidPromptError, shown
from asyncllm.results import FinishReason

logger = logging.getLogger("asyncllm")

PATIENCE = 30.0
"""Seconds that a child may take to give everything back once no request may go on; then it is killed."""

SENT_AT_ONCE = 1 << 20
"""Bytes that are not held back for what else there is to do."""

LOOK_EVERY = 500
"""Milliseconds between looks at whether a child that reads nothing should be killed."""


@dataclass(eq=False, slots=True)
class Question:
    """Something that is asked beside the requests."""

    number: int
    method: Literal["text", "embed", "inspect"]
    argument: Any
    answer: Future[Any]


class Dispatcher:
    """Only `post` and what is said to be may be called on other threads."""

    def __init__(self, streams: RemoteStreams) -> None:
        self._streams = streams
        self._commands: SimpleQueue[tuple[Callable[[Any], None], Any]] = SimpleQueue()
        self._child: ChildProcess | None = None
        self._up = False  # it has started
        self._waiting: dict[int, RemoteStream] = {}  # for a child
        self._asked: dict[int, Question] = {}  # and not answered
        self._unasked: list[Question] = []
        self._outgoing: list[bytes] = []  # to the child, and not sent
        self._outgoing_bytes = 0
        self._next_deadline = math.inf  # of a request that waits, or has waited
        self._refusal: Callable[[], AsyncLLMError] | None = None  # of all that is still to come
        self._kill_at: float | None = None
        self.drain_until: float | None = None  # requests may go on; set where `stop` is posted
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="asyncllm-dispatcher", daemon=False)

    def start(self) -> None:
        """Begin. Raises `RuntimeError` where there can be no more threads."""
        self._thread.start()

    def post(self, method: Callable[[Any], None], argument: Any = None) -> None:
        """Have `method(argument)` called on this thread. From any thread; takes no lock, until the dispatcher has
        ended: then it is done here, since nobody else would."""
        self._commands.put((method, argument))
        if self._ended:
            self._take_all()

    @property
    def waiting(self) -> int:
        """Requests that wait for a child. From any thread."""
        return len(self._waiting)

    def finish(self) -> None:
        """Refuse what is left, and what still comes. On the thread that reads from children, when the last is gone."""
        self.post(self._finish)
        if self._thread.is_alive():  # it is not where it could not start
            self._thread.join()
        self._ended = True
        self._take_all()

    # --- for callers ---

    def open(self, stream: RemoteStream) -> None:
        """A request begins."""
        self._streams.begin(stream)
        if self._refusal is not None:
            self._streams.fail([stream.number], self._refusal)
        elif self._up:
            self._submit(stream)
        else:
            self._waiting[stream.number] = stream
            if stream.submission is not None and stream.submission.deadline is not None:
                self._next_deadline = min(self._next_deadline, stream.submission.deadline)
            if stream.mailbox.aborted:
                self._end_waiting(stream.number, FinishReason.ABORT)
        self._streams.send()

    def abandon(self, number: int) -> None:
        """Nobody reads this request any more."""
        if number in self._waiting:
            self._end_waiting(number, FinishReason.ABORT)
        elif self._up:
            self._transmit(Abandon(number))

    def abort(self, request_id: str) -> None:
        """End the request of this name."""
        for stream in tuple(self._waiting.values()):
            if stream.mailbox.request_id == request_id:
                self._end_waiting(stream.number, FinishReason.ABORT)
        if self._up:
            self._transmit(Abort(str.__str__(request_id)))

    def ask(self, question: Question) -> None:
        """Something beside the requests."""
        if self._refusal is not None:
            _settle(question.answer, error=self._refusal())
        elif self._up:
            self._put(question)
        else:
            self._unasked.append(question)

    def answer(self, answer: Answer) -> None:
        """The child has answered. On the thread that reads from it."""
        question = self._asked.pop(answer.number, None)
        if question is not None:
            error = None if answer.error is None else answer.error.restore()
            _settle(question.answer, answer.value, error)

    def return_hook(self, returned: tuple[ChildProcess, HookReturned]) -> None:
        """A function of the host's has returned to the child that called it."""
        child, message = returned
        if child is self._child:
            self._transmit(message)

    def stop(self, drain: float) -> None:
        """See `EngineHome.stop`."""
        self.refuse(lambda: EngineClosed("the engine is closed"))
        if self._child is None:
            return
        if not self._up:
            return self._child.kill()
        self._kill_at = time.monotonic() + drain + PATIENCE
        self._transmit(Close(drain))

    # --- for the thread that reads from children ---

    def refuse(self, refusal: Callable[[], AsyncLLMError]) -> None:
        """Nothing more is begun."""
        self._refusal = refusal
        waiting, self._waiting = self._waiting, {}
        self._streams.fail(waiting, refusal)
        unasked, self._unasked = self._unasked, []
        for question in unasked:
            _settle(question.answer, error=refusal())
        self._streams.send()

    def begin(self, beginning: tuple[ChildProcess, Begin]) -> None:
        """There is a child, which is to load."""
        self._child, message = beginning
        if self._refusal is not None:
            self._child.kill()
        else:
            self._transmit(message)

    def came_up(self, child: ChildProcess) -> None:
        """It has started."""
        self._up = True
        waiting, self._waiting = self._waiting, {}
        for stream in waiting.values():
            self._submit(stream)
        unasked, self._unasked = self._unasked, []
        for question in unasked:
            self._put(question)
        self._streams.send()

    def hung_up(self, child: ChildProcess) -> None:
        """It is about to be gone: what comes from now on is for the next one."""
        self._up = False

    def lost(self, failure: Callable[[], AsyncLLMError]) -> None:
        """It is gone, and all that it knew with it."""
        if self._child is not None:
            self._child.close()
        self._child, self._up, self._kill_at = None, False, None
        self._outgoing.clear()
        self._outgoing_bytes = 0
        self._streams.fail([n for n in self._streams.numbers() if n not in self._waiting], failure)
        asked, self._asked = self._asked, {}
        for question in asked.values():
            _settle(question.answer, error=failure())
        self._streams.send()

    # --- its own ---

    def _run(self) -> None:
        while True:
            try:
                method, argument = self._commands.get(timeout=self._patience())
            except Empty:
                self._look_at_clock()
                continue
            self._do(method, argument)
            if self._commands.empty() or self._outgoing_bytes > SENT_AT_ONCE:
                self._flush()
            if method == self._finish:
                return

    def _take_all(self) -> None:
        while True:
            try:
                method, argument = self._commands.get_nowait()
            except Empty:
                return
            self._do(method, argument)

    def _do(self, method: Callable[[Any], None], argument: Any) -> None:
        try:
            method(argument)
        except Exception:  # the others are still to be served
            logger.exception("the engine's dispatcher failed")

    def _finish(self, _: None) -> None:
        if self._refusal is None:
            self._refusal = lambda: EngineClosed("the engine is closed")
        self._waiting.clear()
        self.lost(self._refusal)

    def _submit(self, stream: RemoteStream) -> None:
        submission, mailbox = stream.submission, stream.mailbox
        assert submission is not None
        try:
            packed = pack_plain(replace(submission, params=without_functions(submission.params)))
        except Exception as error:
            failure = InvalidPromptError(f"this request cannot be sent to the engine's process: {shown(error, str)}")
            failure.__cause__ = error
            return self._streams.fail([stream.number], lambda: failure)
        stream.submission = None
        name = str.__str__(mailbox.request_id)  # which may be of a type that only the host has
        self._transmit(Open(stream.number, name, len(mailbox.choices), mailbox.aborted, packed))

    def _put(self, question: Question) -> None:
        try:
            argument = pack_plain(question.argument)
        except Exception as error:
            failure = InvalidPromptError(f"this cannot be sent to the engine's process: {shown(error, str)}")
            failure.__cause__ = error
            return _settle(question.answer, error=failure)
        self._asked[question.number] = question
        self._transmit(Ask(question.number, question.method, argument))

    def _transmit(self, message: object) -> None:
        """Have it sent with what else is to be done now: each sending lets the interpreter lock go, which a busy host
        is slow to give back."""
        if self._child is None:
            return
        if isinstance(message, Open | Ask):
            self._child.served = True
        self._outgoing.append(encode(message))
        self._outgoing_bytes += len(self._outgoing[-1])

    def _flush(self) -> None:
        child, data = self._child, memoryview(b"".join(self._outgoing))
        self._outgoing.clear()
        self._outgoing_bytes = 0
        while child is not None and data:
            try:
                data = data[child.connection.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait_to_write(child)
            except OSError:  # it is gone, which the thread that reads from it will say
                return

    def _wait_to_write(self, child: ChildProcess) -> None:
        poll = select.poll()
        try:
            poll.register(child.connection, select.POLLOUT)
        except ValueError:  # closed
            return
        overdue = self.drain_until is not None and time.monotonic() > self.drain_until + PATIENCE
        if not poll.poll(LOOK_EVERY) and overdue:
            child.kill()

    def _patience(self) -> float | None:
        """Seconds until the clock says something."""
        due = min(self._next_deadline, math.inf if self._kill_at is None else self._kill_at)
        return None if due == math.inf else min(max(due - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def _look_at_clock(self) -> None:
        now, self._next_deadline = time.monotonic(), math.inf
        for number, stream in tuple(self._waiting.items()):
            deadline = None if stream.submission is None else stream.submission.deadline
            if deadline is not None and deadline <= now:
                self._end_waiting(number, FinishReason.DEADLINE)
            elif deadline is not None:
                self._next_deadline = min(self._next_deadline, deadline)
        if self._kill_at is not None and self._kill_at <= now and self._child is not None:
            logger.warning("the engine's process does not end, and is killed")
            self._kill_at = None
            self._child.kill()

    def _end_waiting(self, number: int, reason: FinishReason) -> None:
        del self._waiting[number]
        self._streams.end(number, reason)
        self._streams.send()


def _settle(answer: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    if not answer.set_running_or_notify_cancel():
        return  # nobody waits
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
