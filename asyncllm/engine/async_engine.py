"""AsyncEngine: the caller's side of an engine. Everything that takes long is done on other threads.

Does not belong here: what happens to a request (`core`), reading one (`stream`), loading (`model`).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import anyio

from asyncllm.config import EngineConfig
from asyncllm.engine import process
from asyncllm.engine.core_access import CoreAccess, EngineHome
from asyncllm.engine.engine_thread import EngineThread
from asyncllm.engine.isolation.engine_process import EngineProcess
from asyncllm.engine.mailbox import Mailbox
from asyncllm.engine.model import ModelLoader, NamedModel
from asyncllm.engine.preparation import ChatOptions, Messages, Prompt, Submission, TextWork, count_characters
from asyncllm.engine.stream import Abandon, TokenStream
from asyncllm.errors import (
    AsyncLLMError,
    ConfigError,
    EngineClosed,
    EngineError,
    EngineNotStarted,
    InvalidParamsError,
    InvalidPromptError,
)
from asyncllm.metrics import EngineState, EngineStatistics, Inspection, ModelDescription
from asyncllm.params import SamplingParams
from asyncllm.results import Completion, Embedding
from asyncllm.structured import StructuredOutput

__all__ = ["AsyncEngine", "RequestOptions", "TokenStream"]

_names = random.Random()  # of its own, so that no `random.seed` of the host makes a name come again
_PLAIN_CHAT = ChatOptions()


class RequestOptions(TypedDict, total=False):
    """The options of `AsyncEngine.stream`."""

    request_id: str | None
    priority: int
    deadline: float | None
    cache_salt: str | None
    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    chat_template: str | None


class AsyncEngine:
    """A model that serves this program. One engine may be used from several event loops and threads at once.

    `model` is a Hub id, a folder or a .gguf file; or a coroutine function that brings up a model of its own
    (`asyncllm.engine.model.ModelLoader`). Settings are `config`, with `overrides` by name. Close it; dropping it while
    no stream of it is held has the same effect, some time later.

        async with AsyncEngine("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
            async for delta in engine.stream("The capital of France is"):
                print(delta.text, end="")
    """

    def __init__(
        self, model: str | os.PathLike[str] | ModelLoader, *, config: EngineConfig | None = None, **overrides: Any
    ) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, got {config!r:.80}")
        self._config = (config or EngineConfig()).override(**overrides)
        self._load: ModelLoader = model if callable(model) else NamedModel(os.fspath(model))
        self._name = type(model).__name__ if callable(model) else os.fspath(model)
        self._pid: int | None = None  # of the process that started it; before, it may be inherited by a fork
        self._lock = threading.Lock()  # of the two below, for tasks that start and close it in different threads
        self._home: EngineHome | None = None
        self._started: CoreAccess | None = None  # that of the home, once somebody asked
        self._closed = False
        self._unsubmitted: weakref.WeakValueDictionary[int, Mailbox] = weakref.WeakValueDictionary()

    async def start(self) -> None:
        """Load the model and begin to serve. Raises the `ModelLoadError` that says why it cannot.

        Cancelling it closes the engine; loading then ends in the background.
        """
        self._check_process()
        _require_asyncio()
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed; make another one")
            self._pid = process.pid
            is_first = self._home is None
            home = self._home or self._make_home()
            if is_first:
                home.start()
                self._home = home
                # Nobody can use an engine that was dropped. As for a stream, the callback takes no lock.
                weakref.finalize(self, home.stop).atexit = False
        try:
            await asyncio.wrap_future(home.started)
        except asyncio.CancelledError:
            if is_first:
                self._closed = True
                home.stop()
            raise
        except BaseException:
            home.join()
            with self._lock:
                if self._home is home:
                    self._home = None  # all is given back, and it may be tried again
            raise

    async def aclose(self, drain: float = 0.0) -> None:
        """Take no more requests, let the others go on for at most `drain` seconds, then end them with `EngineClosed`.

        Returns when threads and memory are given back. Cancelling it cuts the drain short, no more. Idempotent.
        """
        self._check_process()
        _require_asyncio()
        if isinstance(drain, bool) or not isinstance(drain, int | float) or not 0 <= drain <= sys.float_info.max:
            raise ConfigError(f"drain must be a number of seconds, at least 0, got {drain!r:.80}")
        with self._lock:
            self._closed = True
            home = self._home
        if home is None:
            return
        home.stop(drain)
        interruption: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):  # else a cancelled scope of the caller would cancel each wait anew
            while not home.stopped.done():
                try:
                    await asyncio.wrap_future(home.stopped)
                except asyncio.CancelledError as error:
                    interruption = error
                    home.stop()
        home.join()
        if interruption is not None:
            raise interruption

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def stream(  # noqa: PLR0913  # all but the first two by keyword
        self,
        prompt: Prompt,
        params: SamplingParams | StructuredOutput | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> TokenStream:
        """A stream of the answer to a text, chat messages or token ids. Nothing happens until it is used.

        A StructuredOutput stands for SamplingParams with it. `priority`: lower is served first. `deadline`: seconds
        from now; a request that is not done by then ends with `finish_reason="deadline"`. `cache_salt`: cached
        prefixes are shared only with requests of the same salt. `tools`, `chat_template_kwargs` and
        `continue_final_message` are for the chat template; `chat_template` is one to use in place of the model's.
        Raises `InvalidParamsError`; what is wrong with the prompt or a grammar is raised when the stream is used.
        """
        if params is None or isinstance(params, StructuredOutput):
            params = SamplingParams(structured_output=params)
        if chat_template_kwargs is not None and not (
            isinstance(chat_template_kwargs, Mapping) and all(isinstance(name, str) for name in chat_template_kwargs)
        ):
            raise InvalidParamsError(f"chat_template_kwargs must map names to values, got {chat_template_kwargs!r:.80}")
        _check_options(params, request_id=request_id, priority=priority, deadline=deadline, cache_salt=cache_salt)
        now = time.monotonic()
        submission = Submission(
            prompt=prompt,
            params=params,
            arrival=now,
            chat=_chat(tools, chat_template_kwargs, continue_final_message, chat_template),
            priority=priority,
            deadline=None if deadline is None else now + deadline,
            cache_salt=cache_salt,
        )
        mailbox = Mailbox(request_id or f"request-{_names.getrandbits(128):032x}", params.n)
        self._unsubmitted[id(mailbox)] = mailbox
        return TokenStream(mailbox, submission, self._submit)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | StructuredOutput | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """The same as `stream`, collected. Cancelling it aborts the request."""
        return await self.stream(prompt, params, **options).result()

    async def embed(self, texts: Sequence[str | Sequence[int]]) -> list[Embedding]:
        """A vector for each text, or list of token ids: the features of its last token, normalised. Texts with a
        like meaning have vectors that point alike, as far as the model was made for that.

        They are computed one after another, between the steps of requests.
        """
        if isinstance(texts, str | bytes):
            raise InvalidPromptError(f"embed takes a list of texts, got {texts!r:.80}: for one text, [text]")
        core, texts = self._core(), list(texts)
        characters = sum(len(text) for text in texts if isinstance(text, str))
        found = []
        for token_ids in await self._on_worker(TextWork("prompts", (texts,), characters)):
            try:
                vector = await asyncio.wrap_future(core.embed(token_ids))
            except AsyncLLMError:
                raise
            except RuntimeError as error:  # its runner has ended
                raise EngineClosed("the engine was closed") from error
            found.append(Embedding(vector.tolist(), len(token_ids)))
        return found

    def abort(self, request_id: str) -> None:
        """End a request wherever it stands; its stream sees `finish_reason="abort"`. Nothing happens if it is over."""
        self._check_process()
        if not isinstance(request_id, str):
            raise InvalidParamsError(f"request_id must be a string, got {request_id!r}")
        for reference in self._unsubmitted.valuerefs():
            mailbox = reference()
            if mailbox is not None and mailbox.request_id == request_id:
                mailbox.aborted = True
        if self._home is not None and self._home.started.done():
            self._core().abort(request_id)

    async def tokenize(
        self,
        prompt: str | Messages,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids that a text or chat messages come to as a prompt."""
        chat = ChatOptions(tools, chat_template_kwargs or {}, continue_final_message)
        token_ids: list[int] = await self._on_worker(TextWork("tokenize", (prompt, chat), count_characters(prompt)))
        return token_ids

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        text: str = await self._on_worker(TextWork("detokenize", (token_ids, skip_special_tokens), 0))
        return text

    async def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text that chat messages come to."""
        chat = ChatOptions(tools, chat_template_kwargs or {}, continue_final_message)
        text: str = await self._on_worker(TextWork("render", (messages, chat), count_characters(messages)))
        return text

    @property
    def state(self) -> EngineState:
        """Where the engine stands; never raises."""
        home = self._home
        if self._closed:
            return EngineState.CLOSED
        if home is None:
            return EngineState.NEW
        if not home.started.done():
            return EngineState.LOADING
        if home.started.cancelled() or home.started.exception() is not None:
            return EngineState.NEW
        return home.started.result().state

    def describe(self) -> ModelDescription:
        """What the engine serves."""
        return self._core().describe(self._name)

    def statistics(self) -> EngineStatistics:
        """A snapshot of what the engine holds and has done; of its last moment, once it is closed."""
        return self._core().statistics()

    async def inspect(self, limit: int = 64) -> Inspection:
        """What each block of the cache is, and the `limit` oldest requests: a view of the engine for people, once a
        second or so."""
        if self._closed:
            raise EngineClosed("the engine is closed")
        return await asyncio.wrap_future(self._core().inspect(limit))

    def _submit(self, mailbox: Mailbox, submission: Submission, loop: asyncio.AbstractEventLoop) -> Abandon:
        """Hand a request to the engine."""
        core = self._core()
        request = core.open(mailbox, submission, loop)
        self._unsubmitted.pop(id(mailbox), None)  # after it was opened: `abort` looks here first, so it misses none
        return lambda _: core.abandon(request)

    def _make_home(self) -> EngineHome:
        if self._config.isolation == "process":
            return EngineProcess(self._name, self._load, self._config)
        return EngineThread(self._load, self._config)

    def _check_process(self) -> None:
        if self._pid is not None:
            process.check(self._pid)

    def _core(self) -> CoreAccess:
        self._check_process()
        if self._started is None:
            if self._home is None or not self._home.started.done():
                if self._closed:
                    raise EngineClosed("the engine is closed")
                raise EngineNotStarted("start the engine first: `async with engine:` or `await engine.start()`")
            self._started = self._home.started.result()  # a home that has started is never given up
        return self._started

    async def _on_worker(self, work: TextWork) -> Any:
        _require_asyncio()
        core = self._core()
        if self._closed:
            raise EngineClosed("the engine is closed")
        answer = asyncio.wrap_future(core.text(work))
        try:
            await asyncio.wait([answer])  # a wait of its own: who was cancelled, this task or the work, stays apart
        finally:
            answer.cancel()
        if answer.cancelled():
            raise EngineClosed("the engine was closed")
        return answer.result()


def _require_asyncio() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise EngineError("no asyncio event loop runs here; an engine is used from asyncio tasks") from None


def _chat(
    tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any] | None, continues: bool, template: str | None
) -> ChatOptions:
    if tools is None and not template_kwargs and not continues and template is None:
        return _PLAIN_CHAT
    return ChatOptions(tools, template_kwargs or {}, continues, template)


def _check_options(
    params: object, *, request_id: object, priority: object, deadline: object, cache_salt: object
) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidParamsError(f"params must be a SamplingParams, got {params!r}")
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise InvalidParamsError(f"request_id must be a string that is not empty, got {request_id!r}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidParamsError(f"priority must be a whole number, got {priority!r}")
    if deadline is not None and (
        isinstance(deadline, bool) or not isinstance(deadline, int | float) or not abs(deadline) <= sys.float_info.max
    ):
        raise InvalidParamsError(f"deadline must be a number of seconds, got {deadline!r:.80}")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidParamsError(f"cache_salt must be a string, got {cache_salt!r}")
