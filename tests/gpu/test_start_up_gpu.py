"""What start-up leaves to later steps: no kernel to compile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from asyncllm import AsyncEngine
from asyncllm.testing.tiny_models import write_tiny_model
from tests.gpu.test_cuda_runner import SIZES, ask, ask_late


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"logprobs_mode": "processed"}], ids=str)
async def test_no_request_compiles_a_kernel(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it asks for: seconds in which all that run would wait."""
    compiled: list[str] = []

    def listen(src: Any, **_: Any) -> None:
        compiled.append(src.fn.fn.__name__)

    for name, module in [*sys.modules.items()]:
        if name.startswith("asyncllm.kernels."):
            for kernel in vars(module).values():
                if isinstance(kernel, triton.JITFunction):
                    kernel.device_caches.clear()  # what earlier tests have compiled
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    async with AsyncEngine(write_tiny_model(tmp_path), **SIZES, **settings) as engine:
        assert len(compiled) > 20
        del compiled[:]
        await ask(engine)
        await ask_late(engine)
        await ask(engine, logprobs=5, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.9, xtc_probability=0.5)
        await ask(engine, min_tokens=15, stop_token_ids=list(range(10, 310)), logit_bias=dict.fromkeys(range(200), 1.0))
        await engine.embed([[5, 6, 7], [5] * 400])
    assert compiled == []
