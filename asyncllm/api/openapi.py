"""The OpenAPI document, from the routes and their models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from asyncllm import __version__
from asyncllm.api.exchange import Reply, dump
from asyncllm.api.protocol.fields import ErrorAnswer
from asyncllm.api.routes import Route
from asyncllm.api.serving import Call, Serving

EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
"""A server-sent event."""


def openapi_route(routes: Sequence[Route]) -> Route:
    """The route that serves the document of all the others."""
    document = cache(lambda: dump(openapi_document(routes)))

    async def show(serving: Serving, call: Call) -> Reply:
        # Some tens of milliseconds, so not on the loop; and only where somebody asks.
        return Reply(body=await asyncio.get_running_loop().run_in_executor(None, document))

    return Route(method="GET", path="/openapi.json", handler=show, summary="This document", hidden=True)


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    shown = [route for route in routes if not route.hidden]
    requests = {route.request for route in shown if route.request is not None}
    responses = {route.response for route in shown if route.response is not None} | {ErrorAnswer}
    models = sorted(
        [(model, "validation") for model in requests] + [(model, "serialization") for model in responses],
        key=lambda each: each[0].__name__,
    )
    references, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for route in shown:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "asyncllm", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(route: Route, references: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": references[ErrorAnswer, "serialization"]}}}
    schema = {} if route.response is None else references[route.response, "serialization"]
    content: dict[str, Any] = {route.content_type: {"schema": schema}}
    if route.streams:
        content["text/event-stream"] = {"schema": EVENT}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "What is wrong with the request.", **error},
            "5XX": {"description": "What is wrong with the server.", **error},
        },
    }
    if route.request is not None:
        reference = references[route.request, "validation"]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    if route.path.endswith("}"):
        name = route.path.partition("{")[2].rstrip("}")
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.public:
        operation["security"] = []
    return operation
