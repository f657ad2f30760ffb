"""What the GPU runner owes its host, and what it does at the edges."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import AsyncEngine, SamplingParams, StructuredOutput
from asyncllm.engine.execution import cuda_executor, cuda_loading
from asyncllm.errors import ConfigError, InsufficientMemoryError, UnsupportedModelError
from asyncllm.testing.tiny_models import write_tiny_model

SIZES = {"dtype": "float32", "max_model_len": 512, "num_blocks": 200, "max_num_seqs": 16}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def params(i: int, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"temperature": (i % 3) / 2, "seed": i, "max_tokens": 20 + 5 * i, "ignore_eos": True}
    return SamplingParams(**{**settings, **changes})


async def ask(engine: AsyncEngine, **changes: Any) -> list[tuple[int, ...]]:
    """A mixed load: prompts of 1 to 190 tokens that share their beginnings, greedy and drawn."""
    requests = [engine.generate(list(range(3, 4 + 27 * i)), params(i, **changes)) for i in range(8)]
    return [completion.token_ids for completion in await asyncio.gather(*requests)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    async def run() -> list[tuple[int, ...]]:
        async with AsyncEngine(folder, device="cpu", **SIZES) as engine:
            return await ask(engine)

    return asyncio.run(run())


async def test_is_used_unasked_and_equals_the_cpu(folder: Path, expected: list[Any]) -> None:
    async with AsyncEngine(folder, **SIZES) as engine:
        assert set(engine.statistics().memory_bytes) == {"weights", "cache", "workspace", "graphs"}
        assert await ask(engine) == expected


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


async def test_nothing_synchronises(folder: Path, expected: list[Any]) -> None:
    async with AsyncEngine(folder, **SIZES) as engine:
        with synchronisation_is_an_error():
            assert await ask(engine) == expected
            assert await ask(engine) == expected


def ban_a_third(token_ids: Sequence[int], logits: np.ndarray[Any, Any]) -> None:
    logits[len(token_ids) % 3 :: 3] = -np.inf


async def ask_late(engine: AsyncEngine) -> list[Any]:
    """Late rows, whose host has a mask, a bias or new logits; further choices; scores; beside plain requests."""
    settings = [
        {"structured_output": StructuredOutput(regex="[a-f]{9,30}-[0-9]+"), "logprobs": 2},
        {"logits_processors": [ban_a_third], "repetition_penalty": 1.3},
        {"n": 3, "dry_multiplier": 2.0, "dry_allowed_length": 1},
        {"n": 2, "presence_penalty": 1.0},
        {},
    ]
    requests = [engine.generate(list(range(3, 40 + 9 * i)), params(i, **each)) for i, each in enumerate(settings)]
    return [
        (choice.token_ids, [each.chosen.token_id for each in choice.logprobs or ()])
        for completion in await asyncio.gather(*requests)
        for choice in completion.choices
    ]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_late_rows_among_others(run_ahead: int, folder: Path) -> None:
    async with AsyncEngine(folder, device="cpu", **SIZES) as engine:
        expected = await ask_late(engine)
    async with AsyncEngine(folder, run_ahead=run_ahead, **SIZES) as engine:
        assert await ask_late(engine) == expected  # kernels compile
        with synchronisation_is_an_error():
            for _ in range(3):  # by graphs that hold what there was for the first
                assert await ask_late(engine) == expected


async def test_what_requests_bring_is_not_overwritten(folder: Path, expected: list[Any]) -> None:
    """Graphs that were captured before a request's masks, counts and logits were there run between its steps."""
    async with AsyncEngine(folder, device="cpu", **SIZES) as engine:
        late = await ask_late(engine)
    async with AsyncEngine(folder, **SIZES) as engine:
        assert await ask(engine) == expected
        answers = await asyncio.gather(ask_late(engine), ask(engine), ask_late(engine), ask(engine))
        assert answers == [late, expected, late, expected]


@pytest.mark.parametrize("run_ahead", [0, 2])
async def test_repeated_load_captures_no_more_graphs(
    run_ahead: int, folder: Path, expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asyncllm")
    async with AsyncEngine(folder, run_ahead=run_ahead, **SIZES) as engine:
        for _ in range(4):  # which steps a load comes to depends on when its requests arrive
            assert await ask(engine) == expected
        assert "captured a graph" in caplog.text
        caplog.clear()
        lone = [engine.generate([5], params(1)) for _ in range(3)]
        for each in lone:
            await each
        caplog.clear()
        await engine.generate([5], params(1))
        assert "captured a graph" not in caplog.text
    assert "no graph" not in caplog.text


def train(stop: threading.Event, losses: list[float], errors: list[BaseException]) -> None:
    """A host that trains, with dropout, on the default stream.

    CUDA refuses to wait for a whole device while a graph is captured on it, so the host waits for its own stream.
    """
    try:
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Linear(64, 512), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(512, 64)
        ).cuda()
        optimizer = torch.optim.Adam(network.parameters())
        x = torch.randn(256, 64, device="cuda")
        while not stop.is_set():
            loss = (network(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            torch.empty(1_000_000, device="cuda")
            torch.cuda.current_stream().synchronize()
    except BaseException as error:
        errors.append(error)


async def test_a_host_trains_on_the_same_gpu(folder: Path, expected: list[Any]) -> None:
    stop, losses, errors = threading.Event(), list[float](), list[BaseException]()
    host = threading.Thread(target=train, args=(stop, losses, errors))
    host.start()
    try:
        for _ in range(2):
            async with AsyncEngine(folder, **SIZES) as engine:
                for _ in range(3):
                    assert await ask(engine) == expected
    finally:
        stop.set()
        await asyncio.to_thread(host.join)
    assert errors == []
    assert len(losses) > 20
    assert losses[-1] < 0.7 * losses[0]
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


async def test_two_engines_at_once(folder: Path, expected: list[Any]) -> None:
    async with AsyncEngine(folder, **SIZES) as one, AsyncEngine(folder, **SIZES) as other:
        assert await asyncio.gather(ask(one), ask(other)) == [expected, expected]


async def test_closing_gives_everything_back(folder: Path, expected: list[Any]) -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), threading.active_count()

    async def serve() -> None:
        async with AsyncEngine(folder, **{**SIZES, "num_blocks": 4000}) as engine:
            assert await ask(engine) == expected
            memory = engine.statistics().memory_bytes
            assert sum(memory.values()) > 150_000_000

    before = held()
    await serve()
    first = held()
    for _ in range(2):
        await serve()
        assert held() == first
    assert first[1] - before[1] < 150_000_000  # torch's own: workspaces of cuBLAS


async def test_steps_beyond_the_graphs_are_launched_by_hand(
    folder: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_sizes, "GRAPH_TOKENS", 4)
    async with AsyncEngine(folder, max_batched_tokens=200, **SIZES) as engine:
        assert await ask(engine) == expected


async def test_more_table_edits_than_a_step_describes(
    folder: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_loading, "EDITS", 1)
    async with AsyncEngine(folder, block_size=8, **{**SIZES, "num_blocks": 1000}) as engine:
        assert await ask(engine) == expected
        assert await ask(engine) == expected


async def test_more_suppressed_ids_than_a_row_has_room_for(folder: Path) -> None:
    outcomes = []
    for device in ("cpu", "cuda"):
        async with AsyncEngine(folder, device=device, **SIZES) as engine:
            few = await ask(engine)
            many = await ask(engine, min_tokens=15, stop_token_ids=list(range(10, 310)))
            outcomes.append((few, many, await ask(engine)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] != outcomes[0][1]


async def test_many_rows(folder: Path) -> None:
    async def run(device: str) -> list[tuple[int, ...]]:
        async with AsyncEngine(folder, **{**SIZES, "max_num_seqs": 300, "num_blocks": 700}, device=device) as engine:
            requests = [engine.generate([3 + i], params(i, max_tokens=6)) for i in range(280)]
            return [completion.token_ids for completion in await asyncio.gather(*requests)]

    assert await run("cuda") == await run("cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_low_precision(dtype: str, folder: Path, expected: list[Any]) -> None:
    """Rounding depends on a step's size, so only what a lone request does twice is equal."""
    async with AsyncEngine(folder, prefix_caching=False, **{**SIZES, "dtype": dtype}) as engine:
        answers = [[(await engine.generate([3], params(i))).token_ids for i in range(3)] for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][0][0] == expected[0][0]


async def test_refusals_say_what_would_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch sees .* CUDA devices"):
        await AsyncEngine(folder, device="cuda:77").start()
    with pytest.raises(InsufficientMemoryError, match="enough for num_blocks"):
        await AsyncEngine(folder, **{**SIZES, "num_blocks": 100_000_000}).start()
    with pytest.raises(InsufficientMemoryError, match="would fit"):
        await AsyncEngine(folder, dtype="float32", max_model_len=512, kv_cache_memory=100_000).start()
    odd = write_tiny_model(tmp_path, config={"head_dim": 12})
    with pytest.raises(UnsupportedModelError, match=r'heads of 12 dimensions.*device="cpu"'):
        await AsyncEngine(odd, **SIZES).start()
    async with AsyncEngine(odd, device="cpu", **SIZES) as engine:
        assert len((await engine.generate([5], params(0))).token_ids) == 20


FAULT = """
import asyncio, sys, torch
from asyncllm import AsyncEngine, SamplingParams
from asyncllm.errors import EngineDead

async def main():
    async with AsyncEngine(sys.argv[1], dtype="float32", max_model_len=512, num_blocks=200) as engine:
        long = engine.stream([5], SamplingParams(max_tokens=400, ignore_eos=True, temperature=0))
        await anext(aiter(long))
        torch.zeros(4, device="cuda")[torch.tensor([10**6], device="cuda")]  # an assertion on the device
        for _ in range(2):
            try:
                await engine.generate([5], SamplingParams(max_tokens=400, ignore_eos=True))
            except EngineDead as error:
                print("dead:", error)
        try:
            await long.result()
        except EngineDead:
            print("told")

asyncio.run(main())
print("closed")
"""


def test_a_device_fault_ends_the_engine(folder: Path) -> None:
    command = [sys.executable, "-c", FAULT, str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.stdout.count("dead: the engine has died: the GPU failed") == 2, result.stdout + result.stderr
    assert result.stdout.endswith("told\nclosed\n")
    assert result.returncode == 0, result.stderr
