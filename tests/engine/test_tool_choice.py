"""A call that must be made, by a real engine with a random model: what comes out is that call."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.outputs.tool_calls import join_deltas, make_tool_parser, tool_choice_grammar
from asyncllm.testing.tiny_models import write_tiny_model

pytest.importorskip("llguidance", reason="needs the extra `grammar`")

TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Münster", "Ulm"]},
                "nights": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "nights"],
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


async def test_a_forced_call_is_made_streamed_and_parsed(model: Path) -> None:
    formats = ("hermes", "llama3_json", "mistral", "pythonic", "deepseek")
    async with AsyncEngine(model, device="cpu", max_model_len=512, num_blocks=256) as engine:

        async def ask(format: str, seed: int) -> None:
            structured = tool_choice_grammar(format, [TOOL], "book", parallel=False)
            params = SamplingParams(structured_output=structured, seed=seed, temperature=1.0, max_tokens=400)
            parser = make_tool_parser(format, [TOOL])
            deltas, finish = [], None
            async for delta in engine.stream("Book a room.", params):
                deltas += parser.push(delta.text)
                finish = delta.finish_reason
            message = join_deltas(deltas + parser.flush())
            assert (finish, message.content) == ("stop", "")
            (call,) = message.calls
            arguments = json.loads(call.arguments)
            assert arguments["city"] in ("Münster", "Ulm")
            assert arguments["nights"] in range(1, 10)
            assert set(arguments) == {"city", "nights"}

        await asyncio.gather(*(ask(format, seed) for format in formats for seed in range(2)))
