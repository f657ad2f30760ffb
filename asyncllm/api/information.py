"""What tells of the server itself: models, health, version."""

from __future__ import annotations

from typing import Any

from asyncllm import __version__
from asyncllm.api.errors import ApiError
from asyncllm.api.exchange import Reply, json_reply
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


async def not_here(serving: Serving, call: Call) -> Reply:
    """An endpoint that this app does not have."""
    raise ApiError(404, "There is no such path here.", code="not_found")
