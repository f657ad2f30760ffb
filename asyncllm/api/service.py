"""Service: a request's head and body in, a reply out. Knows no web framework; the shells know nothing else.

Who may in, what is let through, errors as replies, and one line of log a request are here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from asyncllm.api.cors import Cors
from asyncllm.api.errors import ApiError, InvalidRequest, anthropic_body, api_error, openai_body
from asyncllm.api.exchange import BodyTooLarge, BodyUnreadable, Disconnected, Head, ReadBody, Reply, json_reply
from asyncllm.api.identifiers import identifier
from asyncllm.api.keys import ApiKeys
from asyncllm.api.openapi import openapi_route
from asyncllm.api.response_store import MemoryResponseStore, ResponseStore
from asyncllm.api.routes import ROUTES, Match, Router, Style
from asyncllm.api.serving import Call, Serving
from asyncllm.api.settings import ApiSettings
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.metrics import EngineState

logger = logging.getLogger("asyncllm.api")

PARSED_ON_LOOP = 64 * 1024
"""Bytes of a body that is parsed at once; a larger one would hold up the streams."""
REMEMBERED_FIELDS = 256
"""Unknown fields that were warned of."""
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Service:
    """One app. Used on one event loop."""

    def __init__(self, engine: AsyncEngine, settings: ApiSettings, responses: ResponseStore | None = None) -> None:
        store = responses or MemoryResponseStore(settings.max_stored_responses, settings.max_stored_bytes)
        self.serving = Serving(engine, settings, store)
        self._router = Router((*ROUTES, openapi_route(ROUTES)))
        self._keys = ApiKeys(settings.api_keys)
        self._cors = Cors(settings.cors_origins)
        self._warned: set[str] = set()
        self._owns_engine = False

    async def start(self) -> None:
        """The app starts: so does an engine that was not started yet, which is then the app's to close."""
        if self.serving.engine.state is EngineState.NEW:
            await self.serving.engine.start()
            self._owns_engine = True

    async def drain(self) -> bool:
        """Refuse new requests with 503, and let those that run go on for at most `drain_timeout`. Whether all ended."""
        return await self.serving.admission.drain(self.serving.settings.drain_timeout)

    async def aclose(self) -> None:
        """The app ends, and its engine, if it is the app's."""
        self.serving.admission.draining = True
        if self._owns_engine:
            await self.serving.engine.aclose()

    async def respond(self, head: Head, read_body: ReadBody) -> Reply:
        """The reply to a request; errors are replies too. Cancelling it gives the request up.

        The shell sends the reply, and closes it (`Reply.aclose`) whatever happens.
        """
        started = time.monotonic()
        given = head.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else identifier("req_")
        style = Style.ANTHROPIC if head.path.startswith("/v1/messages") else Style.OPENAI
        try:
            preflight = self._cors.preflight(head)
            reply = preflight if preflight is not None else await self._answer(head, read_body, request_id)
        except (asyncio.CancelledError, Disconnected):
            _log(request_id, head, 499, started)
            raise
        except Exception as error:
            reply = _error_reply(error, style, request_id)
        reply.headers["x-request-id"] = request_id
        self._cors.allow(head, reply)

        reply.held.callback(_log, request_id, head, reply.status, started)
        return reply

    async def _answer(self, head: Head, read_body: ReadBody, request_id: str) -> Reply:
        salt = None
        try:
            match = self._router.match(head.method, head.path)
        except ApiError:
            self._keys.check(head.headers)  # whoever has no key does not learn which paths there are
            raise
        if not match.route.public:
            salt = self._keys.check(head.headers)
            self.serving.admission.check_open()
        body = None if match.route.request is None else await self._body(match, head, read_body, request_id)
        return await match.route.handler(self.serving, Call(request_id, salt, match.parameters, head.headers, body))

    async def _body(self, match: Match, head: Head, read_body: ReadBody, request_id: str) -> BaseModel:
        limit = self.serving.settings.max_body_bytes
        content_type = head.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A page of another origin can send any other type without being asked first.
        if content_type and content_type != "application/json" and not content_type.endswith("+json"):
            raise ApiError(415, "The body must be JSON: send `Content-Type: application/json`.", code="content_type")
        length = head.headers.get("content-length", "")
        try:
            if length.isascii() and length.isdigit() and int(length[:20]) > limit:
                raise BodyTooLarge
            raw = await read_body(limit)
        except BodyTooLarge:
            raise ApiError(413, f"The body has over {limit:,} bytes.", code="body_too_large") from None
        except BodyUnreadable:
            raise InvalidRequest("The body is not encoded as its headers say.", code="invalid_body") from None
        assert match.route.request is not None
        if len(raw) <= PARSED_ON_LOOP:
            body, unknown = _parse(raw, match.route.request)
        else:
            loop = asyncio.get_running_loop()
            body, unknown = await loop.run_in_executor(None, _parse, raw, match.route.request)
        self._warn_of(unknown, request_id)
        return body

    def _warn_of(self, unknown: list[str], request_id: str) -> None:
        """Once for each name: a client that sends a field always sends it."""
        for name in unknown:
            if name not in self._warned and len(self._warned) < REMEMBERED_FIELDS:
                self._warned.add(name)
                logger.warning("request %s: the field %.80r is not known, and is ignored", request_id, name)


def _parse(raw: bytes, model: type[BaseModel]) -> tuple[BaseModel, list[str]]:
    """The body, and the names of its fields that are not known."""
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return model.model_validate(value), sorted(value.keys() - _known(model))


def _known(model: type[BaseModel]) -> frozenset[str]:
    known = _KNOWN.get(model)
    if known is None:
        known = _KNOWN[model] = frozenset(field.alias or name for name, field in model.model_fields.items())
    return known


_KNOWN: dict[type[BaseModel], frozenset[str]] = {}


def _error_reply(error: Exception, style: Style, request_id: str) -> Reply:
    told = api_error(error, request_id)
    body: Mapping[str, Any] = anthropic_body(told) if style is Style.ANTHROPIC else openai_body(told)
    reply = json_reply(body, told.status)
    reply.headers.update(told.headers)
    return reply


def _log(request_id: str, head: Head, status: int, started: float) -> None:
    """Nothing of a prompt, and no query: neither is anybody's business."""
    if logger.isEnabledFor(logging.INFO):
        seconds = time.monotonic() - started
        path = head.path if head.path.isprintable() else ascii(head.path)[1:-1]  # no lines of a client's own
        fields = {"request_id": request_id, "method": head.method, "path": path, "status": status,
                  "seconds": round(seconds, 4)}  # fmt: skip
        logger.info("%s %s %d in %.3f s", head.method, path, status, seconds, extra={"fields": fields})
