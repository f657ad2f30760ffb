"""What tells of the server itself: models, health, version."""

from __future__ import annotations

from typing import Any

from asyncllm import __version__
from asyncllm.api.engine_events import engine_events
from asyncllm.api.errors import ApiError
from asyncllm.api.exchange import Reply, event_reply, json_reply
from asyncllm.api.page_files import page_files
from asyncllm.api.serving import Call, Serving
from asyncllm.metrics import EngineState


async def list_models(serving: Serving, call: Call) -> Reply:
    """Every name of the model."""
    return json_reply({"object": "list", "data": [_card(serving, name) for name in serving.names]})


async def show_model(serving: Serving, call: Call) -> Reply:
    """One name."""
    return json_reply(_card(serving, serving.name(call.parameters["model"])))


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "asyncllm",
        "root": serving.names[0],
        "parent": None,
        "max_model_len": serving.model.max_model_len,
    }


async def live(serving: Serving, call: Call) -> Reply:
    """Whether the process can still serve, or come to: a supervisor restarts it otherwise."""
    state = serving.engine.state
    return json_reply({"status": str(state)}, 503 if state is EngineState.DEAD else 200)


async def ready(serving: Serving, call: Call) -> Reply:
    """Whether requests are welcome: a load balancer sends them elsewhere otherwise."""
    state = "draining" if serving.admission.draining else str(serving.engine.state)
    return json_reply({"status": state}, 200 if state == EngineState.RUNNING else 503)


async def version(serving: Serving, call: Call) -> Reply:
    """What runs here."""
    return json_reply({"version": __version__})


async def metrics(serving: Serving, call: Call) -> Reply:
    """For Prometheus."""
    body, content_type = serving.metrics.render(serving.engine.statistics(), call.headers.get("accept", ""))
    return Reply(body=body, content_type=content_type)


async def watch_engine(serving: Serving, call: Call) -> Reply:
    """The engine, seen live. Raises 429 where as many watch as may."""
    serving.engine.statistics()  # raises where there is nothing to see
    reply = event_reply(engine_events(serving.engine, serving.metrics))
    reply.held.callback(serving.viewers.enter())
    return reply


async def show_page(serving: Serving, call: Call) -> Reply:
    """The page, or a file of it. Holds no secret; it asks for the key itself."""
    path = f"/page/{call.parameters['file']}" if "file" in call.parameters else "/"
    file = page_files().get(path) if serving.settings.page else None
    if file is None:
        raise ApiError(404, "There is no such path here.", code="not_found")
    if call.headers.get("if-none-match") == file.headers["etag"]:
        return Reply(304, headers=dict(file.headers))
    return Reply(body=file.body, content_type=file.content_type, headers=dict(file.headers))
