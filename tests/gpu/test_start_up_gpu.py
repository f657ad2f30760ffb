"""What start-up leaves to later steps: no kernel to compile. And who compiles them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from asyncllm import AsyncEngine
from asyncllm.testing.tiny_models import write_tiny_model
from tests.gpu.test_cuda_runner import SIZES, ask, ask_late


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Kernels that have come to be since, though earlier tests may have had them: whether from the cache on disk."""
    found: list[tuple[str, bool]] = []

    def listen(src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((src.fn.fn.__name__, cache_hit))

    for name, module in [*sys.modules.items()]:
        if name.startswith("asyncllm.kernels."):
            for kernel in vars(module).values():
                if isinstance(kernel, triton.JITFunction):
                    kernel.device_caches.clear()
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    return found


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"logprobs_mode": "processed"}], ids=str)
async def test_no_request_compiles_a_kernel(
    settings: dict[str, Any], tmp_path: Path, compiled: list[tuple[str, bool]]
) -> None:
    """Whatever it asks for: seconds in which all that run would wait."""
    async with AsyncEngine(write_tiny_model(tmp_path), **SIZES, **settings) as engine:
        assert len(compiled) > 20
        del compiled[:]
        await ask(engine)
        await ask_late(engine)
        await ask(engine, logprobs=5, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.9, xtc_probability=0.5)
        await ask(engine, min_tokens=15, stop_token_ids=list(range(10, 310)), logit_bias=dict.fromkeys(range(200), 1.0))
        await engine.embed([[5, 6, 7], [5] * 400])
    assert compiled == []


def children() -> set[str]:
    """The processes that this one has started, and has not seen the end of."""
    return {number for path in Path("/proc/self/task").glob("*/children") for number in path.read_text().split()}


async def test_processes_compile_what_the_cache_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    """So this one finds it there, and is left without a child."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level("DEBUG", "asyncllm")
    before = children()
    async with AsyncEngine(write_tiny_model(tmp_path), **SIZES):
        assert children() <= before
    assert {name for name, cached in compiled if not cached} == set()
    names = {record.args[0] for record in caplog.records if record.msg.startswith("compiled %s in")}  # type: ignore[index]
    assert names == {name for name, _ in compiled}
