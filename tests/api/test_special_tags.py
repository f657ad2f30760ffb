"""Tags that are special tokens of the tokenizer are seen all the same: calls and reasoning of Mistral's kind."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken

from asyncllm import AsyncEngine
from asyncllm.api import create_asgi_app
from asyncllm.testing.tiny_models import PieceModel, write_piece_model
from tests.api.asgi_client import post

PIECES = ["Go:", "[THINK]", "Hm", "[/THINK]", "[TOOL_CALLS]", "f", "[ARGS]", '{"a":', " 1}"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PieceModel:
    folder = tmp_path_factory.mktemp("pieces")
    written = write_piece_model(folder, PIECES, chat_template="{{ messages[-1].content }}{# [TOOL_CALLS] [THINK] #}")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in PIECES if piece.startswith("[")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return written


async def test_calls_and_reasoning_in_special_tokens(model: PieceModel) -> None:
    body = {"messages": [{"role": "user", "content": "Go:"}], "temperature": 0, "max_tokens": 20}
    async with AsyncEngine(str(model.folder), device="cpu", max_model_len=128, num_blocks=32) as engine:
        app = create_asgi_app(engine)
        called = (await post(app, "/v1/chat/completions", {**body, "tools": [TOOL]})).json
        plain = (await post(app, "/v1/chat/completions", body)).json
    message = called["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm"
    assert not message["content"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})
    assert len(call["id"]) == 9
    assert called["choices"][0]["finish_reason"] == "tool_calls"
    assert plain["choices"][0]["message"]["reasoning_content"] == "Hm"
