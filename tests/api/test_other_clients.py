"""One call each through what people put over OpenAI's client, where it is installed.

`pip install -e ".[dev,clients]"`, into an environment of their own: litellm wants an older `openai` than `dev` brings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from asyncllm import AsyncEngine
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_tiny_model
from tests.api.servers import Running, running

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE)
    with running(
        "aiohttp", lambda: AsyncEngine(str(folder), device="cpu", num_blocks=256), model_names=["tiny"]
    ) as server:
        yield server


def test_litellm(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = pytest.importorskip("litellm")
    answer = litellm.completion(
        model="openai/tiny",
        api_base=f"{tiny.url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=5,
    )
    assert answer.usage.completion_tokens == 5


def test_langchain(tiny: Running) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=f"{tiny.url}/v1", api_key="none", model="tiny", max_tokens=5)
    assert model.invoke("Hi").usage_metadata["output_tokens"] == 5
    assert "".join(part.content for part in model.stream("Hi"))


class River(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a random model goes on with fields of its own

    long: bool


def test_instructor(tiny: Running) -> None:
    """A random model, held to a schema by the grammar."""
    instructor: Any = pytest.importorskip("instructor")
    pytest.importorskip("llguidance")
    import openai

    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA
    )
    river = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Is the Nile long?"}],
        response_model=River,
        max_tokens=200,
        seed=1,
    )
    assert isinstance(river, River)
    assert json.loads(river.model_dump_json()).keys() == {"long"}
