"""The app inside other applications: what is theirs stays theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from asyncllm import AsyncEngine
from asyncllm.api import create_aiohttp_app, create_asgi_app
from tests.api.asgi_client import until
from tests.api.conftest import MakeEngine
from tests.api.servers import serving, serving_asgi

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def check(url: str) -> None:
    """Streamed and whole, through the real client."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=5, temperature=0)
        stream = await client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=5, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("other")
        assert (await client.models.retrieve("m")).id == "m"


async def test_fastapi_with_its_own_routes_and_lifespan(shadow: MakeEngine) -> None:
    engine = shadow()
    ended = False

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal ended
        async with engine:
            yield
        ended = True

    app = FastAPI(lifespan=lifespan)

    @app.get("/hello")
    async def hello() -> dict[str, str]:
        return {"text": (await engine.generate("Hello", None)).text[:1]}

    app.mount("/llm", create_asgi_app(engine, model_names=["m"]))
    async with serving_asgi("uvicorn", app) as port, ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        await check(f"{url}/llm")
        async with session.get(f"{url}/hello") as answer:
            assert answer.status == 200
        async with session.get(f"{url}/v1/models") as answer:
            assert answer.status == 404
            assert await answer.json() == {"detail": "Not Found"}  # FastAPI's own
        async with session.get(f"{url}/llm/nowhere") as answer:
            assert "error" in await answer.json()
    assert ended
    assert engine.state == "closed"


async def test_starlette_under_a_prefix_and_middleware(shadow: MakeEngine) -> None:
    engine = shadow()

    async def mark(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["x-mine"] = "yes"
        return response

    async def home(request: Request) -> Response:
        return PlainTextResponse("home")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    app = Starlette(
        routes=[Route("/", home), Mount("/a/b", create_asgi_app(engine, model_names=["m"]))],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=mark)],
        lifespan=lifespan,
    )
    async with serving_asgi("hypercorn", app) as port, ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        await check(f"{url}/a/b")
        async with session.get(url) as answer:
            assert await answer.text() == "home"
        async with session.get(f"{url}/a/b/health") as answer:
            assert answer.headers["x-mine"] == "yes"


async def test_aiohttp_sub_application(shadow: MakeEngine) -> None:
    engine = shadow()

    async def home(request: web.Request) -> web.Response:
        return web.Response(text="home")

    app = web.Application()
    app.router.add_get("/", home)
    app.add_subapp("/llm", create_aiohttp_app(engine, model_names=["m"]))
    async with TestServer(app) as server, ClientSession() as session:
        url = str(server.make_url("/")).rstrip("/")
        await check(f"{url}/llm")
        async with session.get(url) as answer:
            assert await answer.text() == "home"
        async with session.get(f"{url}/llm/nowhere") as answer:
            assert answer.status == 404
            assert "error" in await answer.json()
    assert engine.state == "closed"


async def test_an_engine_of_the_host_stays_open(shadow: MakeEngine) -> None:
    async with shadow() as engine:
        async with TestServer(create_aiohttp_app(engine, model_names=["m"])) as server:
            await check(str(server.make_url("/")).rstrip("/"))
        assert engine.state == "running"


@pytest.mark.parametrize("stream", [False, True])
async def test_aiohttp_notices_who_goes(shadow: MakeEngine, stream: bool) -> None:
    """Without `handler_cancellation`, which is the host's to set."""
    async with shadow() as engine, TestServer(create_aiohttp_app(engine)) as server:
        await check_who_goes(engine, str(server.make_url("/")).rstrip("/"), stream=stream)


async def check_who_goes(engine: AsyncEngine, url: str, *, stream: bool) -> None:
    body = {"prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    async with ClientSession() as session:
        going = asyncio.create_task(session.post(f"{url}/v1/completions", json=body))
        await until(lambda: engine.statistics().requests_running > 0)
        going.cancel()
    await until(lambda: engine.statistics().requests_aborted == 1, 1)
    await until(lambda: engine.statistics().blocks_used == 0, 1)


async def check_mounted(app: Any, engine: AsyncEngine) -> None:
    """Under /llm, beside a page of the framework's own; the lifespan starts the engine and closes it."""
    async with serving_asgi("uvicorn", app) as port, ClientSession() as session:
        assert engine.state == "running"
        url = f"http://127.0.0.1:{port}"
        await check(f"{url}/llm")
        async with session.get(f"{url}/hello") as answer:
            assert await answer.text() == "hello"
        async with session.get(f"{url}/nowhere") as answer:
            assert answer.status == 404
            assert "invalid_request_error" not in await answer.text()  # the framework's own
        async with session.get(f"{url}/llm/nowhere") as answer:
            assert "error" in await answer.json()
    assert engine.state == "closed"


async def test_litestar_with_its_lifespan(shadow: MakeEngine) -> None:
    from litestar import Litestar, MediaType, asgi, get

    engine = shadow()
    inner = create_asgi_app(engine, model_names=["m"])

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with engine:
            yield

    @asgi("/llm", is_mount=True, copy_scope=True)
    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, receive, send)

    @get("/hello", media_type=MediaType.TEXT)
    async def hello() -> str:
        return "hello"

    await check_mounted(Litestar([mounted, hello], lifespan=[lifespan]), engine)


def beside(outer: Any, inner: Any, *, lifespan: Any) -> Any:
    """How users of frameworks without mounts put another application beside theirs."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(scope, receive, send)
        elif scope["path"].startswith("/llm/"):
            await inner(scope | {"root_path": "/llm"}, receive, send)
        else:
            await outer(scope, receive, send)

    return app


async def test_quart_with_its_lifespan(shadow: MakeEngine) -> None:
    from quart import Quart

    engine, quart = shadow(), Quart(__name__)

    @quart.while_serving
    async def lifespan() -> AsyncIterator[None]:
        async with engine:
            yield

    @quart.get("/hello")
    async def hello() -> str:
        return "hello"

    await check_mounted(beside(quart, create_asgi_app(engine, model_names=["m"]), lifespan=quart), engine)


async def test_django_which_has_no_lifespan(shadow: MakeEngine) -> None:
    import django
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import HttpResponse
    from django.urls import path

    class Urls:
        urlpatterns = (path("hello", lambda request: HttpResponse("hello")),)

    settings.configure(ROOT_URLCONF=Urls, ALLOWED_HOSTS=["*"])
    django.setup(set_prefix=False)
    engine = shadow()
    inner = create_asgi_app(engine, model_names=["m"])
    await check_mounted(beside(get_asgi_application(), inner, lifespan=inner), engine)


async def test_granian_with_its_lifespan(shadow: MakeEngine) -> None:
    engine = shadow()
    async with serving("granian", engine, model_names=["m"]) as port:
        await check(f"http://127.0.0.1:{port}")
        await check_who_goes(engine, f"http://127.0.0.1:{port}", stream=True)
    assert engine.state == "closed"


def test_an_engine_needs_no_framework(shadow: MakeEngine) -> None:
    assert callable(create_asgi_app(AsyncEngine("nowhere")))
