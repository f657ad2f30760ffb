"""Loading a real, tiny model into an engine."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.config import EngineConfig
from asyncllm.engine import model
from asyncllm.engine.model import NamedModel, ServedModel, eos_token_ids, sampling_defaults
from asyncllm.errors import (
    ChatTemplateError,
    CheckpointError,
    InvalidPromptError,
    ModelLoadError,
    ModelNotFoundError,
    TokenizerError,
)
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, tiny_config, write_script_model, write_tiny_model

pytestmark = pytest.mark.usefixtures("no_thread_left")

SMALL: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_blocks": 32, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_eos_ids_of_every_shape_are_united() -> None:
    assert eos_token_ids([None, 2, [0, 7], (9,), frozenset({5, 600}), True, -1], 512) == {0, 2, 5, 7, 9}
    assert eos_token_ids([], 512) == frozenset()
    assert eos_token_ids([{"id": 2}, [[2]], "2", [{}, 3]], 512) == {3}


def test_sampling_defaults() -> None:
    config = {"temperature": 0.6, "top_p": None, "top_k": 20, "do_sample": True, "max_new_tokens": 5}
    assert sampling_defaults(config) == {"temperature": 0.6, "top_k": 20}
    with pytest.raises(CheckpointError, match="model_defaults=False"):
        sampling_defaults({"temperature": -1})


def set_generation(folder: Path, **fields: Any) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


async def test_a_models_eos_ids_and_defaults(tmp_path: Path) -> None:
    write_script_model(tmp_path, [[20, 21, 22, 23, 0], [30, 31, 32, 2]])
    set_generation(tmp_path, eos_token_id=[0, 2], temperature=0)
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        for start, ids in ((20, (21, 22, 23, 0)), (30, (31, 32, 2))):
            completion = await engine.generate([start], SamplingParams(max_tokens=20))
            assert completion.token_ids == ids
            assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
            assert completion.text == await engine.detokenize(ids[:-1])
    set_generation(tmp_path, temperature=-5)
    with pytest.raises(CheckpointError):
        await AsyncEngine(str(tmp_path), **SMALL).start()
    async with AsyncEngine(str(tmp_path), model_defaults=False, **SMALL) as engine:
        assert (await engine.generate([20], GREEDY)).token_ids == (21, 22, 23, 0)


async def test_chat_templates(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi!"}]
    write_tiny_model(tmp_path)
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        with pytest.raises(ChatTemplateError, match="chat template"):
            await engine.generate(messages, GREEDY)
        assert (await engine.generate("Hi!", GREEDY)).token_ids
    async with AsyncEngine(str(tmp_path), chat_template="<{{ messages[0]['content'] }}>", **SMALL) as engine:
        assert await engine.apply_chat_template(messages) == "<Hi!>"
    write_tiny_model(tmp_path, chat_template=CHAT_TEMPLATE)
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        rendered = await engine.apply_chat_template(messages)
        assert rendered.startswith("<|im_start|>user\nHi!")
        assert await engine.detokenize(await engine.tokenize(messages), skip_special_tokens=False) == rendered


async def test_dummy_weights_need_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    async with AsyncEngine(str(tmp_path), load_format="dummy", **SMALL) as engine:
        completion = await engine.generate([5, 6], GREEDY)
        assert completion.text == ""
        assert completion.token_ids
        with pytest.raises(InvalidPromptError, match="no tokenizer"):
            await engine.generate("text", GREEDY)


@pytest.fixture
def without_tokenizer(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    return tmp_path


async def test_real_weights_do(without_tokenizer: Path) -> None:
    with pytest.raises(TokenizerError):
        await AsyncEngine(without_tokenizer, **SMALL).start()


def test_leaving_without_closing(tmp_path: Path) -> None:
    """With torch's threads at work: the process ends by itself, and does not abort."""
    write_tiny_model(tmp_path)
    source = """
        import asyncio, sys
        from asyncllm import AsyncEngine, SamplingParams
        engine = AsyncEngine(sys.argv[1], num_blocks=32, block_size=16, max_model_len=256)
        streams = [engine.stream([n], SamplingParams(ignore_eos=True)) for n in range(8)]
        async def main():
            await engine.start()
            for stream in streams:
                await anext(stream)
        asyncio.run(main())
        print("left")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


async def test_a_file_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's cache may be where nothing can be written."""

    async def load(*_: object) -> ServedModel:
        raise PermissionError(13, "Permission denied", "/root/.triton/cache")

    monkeypatch.setattr(model, "_load", load)
    with pytest.raises(ModelLoadError, match=r"org/name cannot be loaded.*Permission denied.*/root/\.triton/cache"):
        await NamedModel("org/name")(EngineConfig(), ThreadPoolExecutor())


async def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        await AsyncEngine(tmp_path / "nothing.gguf").start()
