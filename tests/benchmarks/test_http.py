from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from asyncllm import EngineConfig
from asyncllm.cli import find_smollm2
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_tiny_model
from asyncllm.weights.source import resolve_source
from benchmarks import http, http_clients
from benchmarks.http_server import KINDS
from benchmarks.skeleton import write_skeleton

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("cut", [1, 40, 1000])
async def test_a_client_counts_what_usage_says_wherever_the_stream_is_cut(cut: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        for part in (b"HTTP/1.1 200 OK\r\n\r\n", EVENT, EVENT, *(LAST[i : i + cut] for i in range(0, len(LAST), cut))):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        figures = await http_clients.drive(server.sockets[0].getsockname()[1], streams=3, tokens=7, first=0)
    assert figures.tokens == 21
    assert 0 < figures.gap[0] <= figures.gap[1] < figures.seconds
    assert figures.first_token[1] < figures.seconds


@pytest.mark.parametrize("said", [b"HTTP/1.1 500 no\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", b""])
async def test_a_stream_that_is_no_answer_is_an_error(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        with pytest.raises(ConnectionError):
            await http_clients.drive(server.sockets[0].getsockname()[1], streams=1, tokens=7, first=0)


def test_a_skeleton_has_the_tokenizer_and_the_configuration_of_its_file(tmp_path: Path) -> None:
    write_skeleton(tmp_path, find_smollm2())
    skeleton = resolve_source(str(tmp_path), EngineConfig(load_format="dummy"))
    file = resolve_source(find_smollm2(), EngineConfig())
    assert skeleton.config == file.config
    ours, theirs = (Tokenizer.load(source.tokenizer) for source in (skeleton, file))
    wide = tmp_path / "wide"
    write_skeleton(wide, str(tmp_path), "qwen3-0.6b")
    source = resolve_source(str(wide), EngineConfig(load_format="dummy"))
    widened = Tokenizer.load(source.tokenizer)
    assert widened.vocab_size == source.config["vocab_size"] > theirs.vocab_size
    assert widened.decode(range(theirs.vocab_size, theirs.vocab_size + 9)).isalpha()
    text = "<|im_start|>user\nNaïve café, 1,000 lines\n<|im_end|>\n"
    assert ours.encode(text) == theirs.encode(text) == widened.encode(text)
    assert ours.chat_templates == theirs.chat_templates
    assert ours.eos_token_ids == theirs.eos_token_ids


@pytest.mark.full
def test_servers_are_started_driven_and_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    output = tmp_path / "http.json"
    sizes = ["--streams", "1", "3", "--tokens", "6", "--clients", "2"]
    flags = ["--device", "cpu", "--num-blocks", "64"]
    assert http.main([str(folder), *sizes, "--kinds", *KINDS, "--output", str(output), "--", *flags]) == 0
    runs = json.loads(output.read_text(encoding="utf-8"))["runs"]
    assert [(run["kind"], run["figures"]["tokens"]) for run in runs] == [(k, n) for k in KINDS for n in (6, 18)]
    assert capsys.readouterr().out.count(" | ") == 8 * (len(runs) + 1)
