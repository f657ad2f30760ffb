"""Engines for the API's tests: a shadow, which has no model, and tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncllm import AsyncEngine
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.byte_tokenizer import byte_tokenizer
from asyncllm.testing.shadow_engine import ShadowModel
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_tiny_model
from tests.api.servers import KINDS, Running, running

MakeEngine = Callable[[], AsyncEngine]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def shadow(tokenizer: Tokenizer) -> MakeEngine:
    """Makes an engine that answers any prompt with tokens that are a function of it."""

    def make() -> AsyncEngine:
        model = ShadowModel(tokenizer=tokenizer, chat_template=CHAT_TEMPLATE)
        return AsyncEngine(model, max_model_len=2048, num_blocks=1024)

    return make


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session", params=KINDS)
def server(request: pytest.FixtureRequest, shadow: MakeEngine) -> Iterator[Running]:
    """The shadow behind each of the servers."""
    with running(request.param, shadow, model_names=["shadow"]) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def plain_server(shadow: MakeEngine) -> Iterator[Running]:
    """The shadow behind one server, for what does not depend on which."""
    with running("aiohttp", shadow, model_names=["shadow"]) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Path) -> Iterator[Running]:
    """A tiny random model behind one server."""
    with running(
        "uvicorn", lambda: AsyncEngine(str(tiny_folder), device="cpu", num_blocks=512), model_names=["tiny"]
    ) as running_server:
        yield running_server
