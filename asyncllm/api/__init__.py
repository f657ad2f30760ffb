"""The OpenAI-compatible API: one framework-free service, and two thin shells over it.

`create_aiohttp_app(engine)` gives an aiohttp application, `create_asgi_app(engine)` an ASGI callable. Needs the extra
`api`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from asyncllm.errors import DependencyError

if TYPE_CHECKING:
    from asyncllm.api.aiohttp_app import create_aiohttp_app as create_aiohttp_app
    from asyncllm.api.asgi_app import create_asgi_app as create_asgi_app
    from asyncllm.api.response_store import MemoryResponseStore as MemoryResponseStore
    from asyncllm.api.response_store import ResponseStore as ResponseStore
    from asyncllm.api.response_store import StoredResponse as StoredResponse
    from asyncllm.api.settings import ApiSettings as ApiSettings

_HOMES = {
    "ApiSettings": "settings",
    "MemoryResponseStore": "response_store",
    "ResponseStore": "response_store",
    "StoredResponse": "response_store",
    "create_aiohttp_app": "aiohttp_app",
    "create_asgi_app": "asgi_app",
}
__all__ = [
    "ApiSettings",
    "MemoryResponseStore",
    "ResponseStore",
    "StoredResponse",
    "create_aiohttp_app",
    "create_asgi_app",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'asyncllm.api' has no attribute {name!r}")
    try:
        module = import_module(f"asyncllm.api.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("aiohttp", "prometheus_client", "pydantic", "pydantic_core"):
            raise DependencyError(f"the API needs {error.name}: pip install 'asyncllm[api]'") from error
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value
