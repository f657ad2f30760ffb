"""The endpoints of an app: what is called for which path, and what its body looks like."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from pydantic import BaseModel

from asyncllm.api import chat, completions, embeddings, information, messages, responses, tokens
from asyncllm.api.errors import ApiError
from asyncllm.api.exchange import JSON, Reply
from asyncllm.api.protocol.chat import ChatCompletion, ChatRequest
from asyncllm.api.protocol.completions import CompletionRequest, TextCompletion
from asyncllm.api.protocol.embeddings import EmbeddingList, EmbeddingRequest
from asyncllm.api.protocol.messages import CountRequest, MessageAnswer, MessagesRequest, TokenCount
from asyncllm.api.protocol.models import Health, ModelCard, ModelList, Version
from asyncllm.api.protocol.responses import DeletedResponse, ResponseAnswer, ResponseRequest
from asyncllm.api.protocol.tokens import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens
from asyncllm.api.serving import Call, Serving

Handler = Callable[[Serving, Call], Awaitable[Reply]]


class Style(Enum):
    """Whose layout an endpoint's errors have."""

    OPENAI = auto()
    ANTHROPIC = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One endpoint. A path's last part may be a name in braces; it stands for all that is left of the path."""

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    content_type: str = JSON
    streams: bool = False  # may answer with events instead
    public: bool = False  # needs no key, and is answered while the app drains
    hidden: bool = False  # not in the OpenAPI document


@dataclass(frozen=True, slots=True)
class Match:
    """A route, and what its path's braces stand for."""

    route: Route
    parameters: Mapping[str, str]


class Router:
    """Finds the route of a path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self._fixed: dict[str, dict[str, Route]] = {}
        self._open: dict[str, dict[str, Route]] = {}  # by what stands before the brace
        for route in routes:
            table = self._open if route.path.endswith("}") else self._fixed
            table.setdefault(route.path.partition("{")[0], {})[route.method] = route

    def match(self, method: str, path: str) -> Match:
        """Raises an `ApiError` of 404 or 405. A slash at the end makes no difference: some frameworks put one there."""
        methods, parameters = self._methods(path.rstrip("/") or "/")
        if methods is None:
            raise ApiError(404, f"There is no {path!r:.200} here.", code="not_found")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise ApiError(
                405, f"{path} takes {allowed}, not {method:.20}.", code="method_not_allowed", headers={"allow": allowed}
            )
        name = route.path.partition("{")[2].rstrip("}")
        return Match(route, {name: parameters} if name else {})

    def _methods(self, path: str) -> tuple[dict[str, Route] | None, str]:
        if path in self._fixed:
            return self._fixed[path], ""
        for prefix, methods in self._open.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods, path[len(prefix) :]
        return None, ""


ROUTES: tuple[Route, ...] = (
    Route(
        method="POST", path="/v1/chat/completions", handler=chat.create_chat_completion, streams=True,
        summary="Answer a chat", request=ChatRequest, response=ChatCompletion,
    ),
    Route(
        method="POST", path="/v1/completions", handler=completions.create_completion, streams=True,
        summary="Go on with prompts", request=CompletionRequest, response=TextCompletion,
    ),
    Route(
        method="POST", path="/v1/responses", handler=responses.create_response, streams=True,
        summary="Make a response", request=ResponseRequest, response=ResponseAnswer,
    ),
    Route(
        method="GET", path="/v1/responses/{response_id}", handler=responses.show_response,
        summary="A response that was kept", response=ResponseAnswer,
    ),
    Route(
        method="DELETE", path="/v1/responses/{response_id}", handler=responses.delete_response,
        summary="Forget a response", response=DeletedResponse,
    ),
    Route(
        method="POST", path="/v1/messages", handler=messages.create_message, streams=True,
        summary="Answer a chat, as Anthropic's API does", request=MessagesRequest, response=MessageAnswer,
    ),
    Route(
        method="POST", path="/v1/messages/count_tokens", handler=messages.count_tokens,
        summary="Tokens of messages", request=CountRequest, response=TokenCount,
    ),
    Route(
        method="POST", path="/v1/embeddings", handler=embeddings.create_embeddings, summary="Vectors of texts",
        request=EmbeddingRequest, response=EmbeddingList,
    ),
    Route(method="GET", path="/v1/models", handler=information.list_models, summary="The models", response=ModelList),
    Route(
        method="GET", path="/v1/models/{model}", handler=information.show_model, summary="One model",
        response=ModelCard,
    ),
    Route(
        method="POST", path="/tokenize", handler=tokens.tokenize, summary="Token ids of a text",
        request=TokenizeRequest, response=Tokens,
    ),
    Route(
        method="POST", path="/detokenize", handler=tokens.detokenize, summary="Text of token ids",
        request=DetokenizeRequest, response=DetokenizedText,
    ),
    Route(
        method="GET", path="/health", handler=information.ready, summary="The same as /health/ready", public=True,
        response=Health,
    ),
    Route(
        method="GET", path="/health/live", handler=information.live, summary="Whether the engine can serve",
        public=True, response=Health,
    ),
    Route(
        method="GET", path="/health/ready", handler=information.ready, summary="Whether requests are welcome",
        public=True, response=Health,
    ),
    Route(
        method="GET", path="/metrics", handler=information.metrics, summary="For Prometheus",
        content_type="text/plain",
    ),
    Route(
        method="GET", path="/engine/events", handler=information.watch_engine, summary="The engine, seen live",
        content_type="text/event-stream",
    ),
    Route(method="GET", path="/", handler=information.show_page, summary="The page", public=True, hidden=True),
    Route(
        method="GET", path="/page/{file}", handler=information.show_page, summary="A file of the page", public=True,
        hidden=True,
    ),
    Route(method="GET", path="/version", handler=information.version, summary="What runs here", response=Version),
)  # fmt: skip
