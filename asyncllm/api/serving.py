"""What all handlers share: the engine, the limits, the model's names and formats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any, TypeVar

from asyncllm.api.admission import Admission, Ticket, Viewers
from asyncllm.api.errors import ApiError
from asyncllm.api.response_store import ResponseStore
from asyncllm.api.service_metrics import ServiceMetrics
from asyncllm.api.settings import ApiSettings
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.metrics import ModelDescription
from asyncllm.outputs.reasoning import guess_reasoning_format
from asyncllm.outputs.tool_calls import guess_tool_format

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call:
    """One request that may be answered."""

    request_id: str
    salt: str | None  # of its API key
    parameters: Mapping[str, str]  # from the path
    headers: Mapping[str, str]
    body: Any = None  # an instance of the route's request model

    @property
    def owner(self) -> str:
        """Whose stored responses it may see."""
        return self.salt or ""


class Serving:
    """The parts of one app."""

    def __init__(self, engine: AsyncEngine, settings: ApiSettings, responses: ResponseStore) -> None:
        self.engine = engine
        self.settings = settings
        self.responses = responses
        self.admission = Admission(settings.max_queue)
        self.viewers = Viewers(settings.max_viewers)
        self.created = int(time.time())

    @cached_property
    def model(self) -> ModelDescription:
        """Raises `EngineNotStarted` before the engine runs."""
        return self.engine.describe()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What requests may call the model; the first one is its own name. A path stays on this machine."""
        if self.settings.model_names:
            return tuple(self.settings.model_names)
        path = PurePath(self.model.name)
        return (path.name if path.is_absolute() or path.suffix == ".gguf" else self.model.name,)

    @cached_property
    def metrics(self) -> ServiceMetrics:
        """Of all requests that this app answers."""
        return ServiceMetrics(self.names[0])

    @cached_property
    def tool_format(self) -> str | None:
        """How the model writes tool calls; None where that is not known."""
        return _chosen(self.settings.tool_format, guess_tool_format, self.model.tool_template)

    @cached_property
    def reasoning_format(self) -> str | None:
        """How the model marks its reasoning; None where it does not."""
        return _chosen(self.settings.reasoning_format, guess_reasoning_format, self.model.chat_template)

    def name(self, asked: str | None) -> str:
        """The name that the answer carries. Raises 404 for another model's."""
        if asked is None or asked == "":
            return self.names[0]
        if asked not in self.names:
            raise ApiError(404, f"The model {asked!r:.200} does not exist here.", param="model", code="model_not_found")
        return asked

    def enter(self, choices: int) -> Ticket:
        """Take on work. Raises 429, 503 and what an engine raises that does not run."""
        return self.admission.enter(choices, self.model.max_num_seqs)


def _chosen(setting: str | None, guess: Callable[[str], str | None], template: str | None) -> str | None:
    if setting is not None:
        return None if setting == "none" else setting
    return None if template is None else guess(template)


async def all_of(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run side by side. The first failure, or a cancellation, ends the others before it is raised."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
