from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from asyncllm import AsyncEngine
from asyncllm.config import kernel_folder
from asyncllm.engine.execution import processor
from asyncllm.engine.execution.processor import has_native_bfloat16, native_kernels, product_forms
from asyncllm.errors import ModelLoadError
from asyncllm.kernels.cpu.build import BuildError, BuildInterrupted, Library
from asyncllm.testing.tiny_models import write_tiny_model
from tests.engine.conftest import eventually


def pretend(monkeypatch: pytest.MonkeyPatch, vectors: str, *capabilities: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True), raising=False)


@pytest.mark.parametrize(
    ("vectors", "capabilities", "dtype", "rows"),
    [
        ("AVX512", ("avx512_bf16", "amx_bf16"), torch.bfloat16, {4: 8, 8: 2}),
        ("AVX512", ("avx512_bf16",), torch.bfloat16, {4: 12, 8: 3}),
        ("AVX512", (), torch.float32, {4: 12, 8: 5}),
        ("AVX2", (), torch.float32, {4: 12, 8: 5}),
        ("DEFAULT", (), torch.float32, {}),
        ("NO AVX", ("bf16",), torch.bfloat16, {}),  # an ARM processor
    ],
)
def test_packed_weights_are_for_processors_with_code_for_them(
    vectors: str,
    capabilities: tuple[str, ...],
    dtype: torch.dtype,
    rows: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, vectors, *capabilities)
    assert has_native_bfloat16() == bool(capabilities)
    forms = product_forms(dtype, packs=True, copies=True)
    assert dict(forms.packed_rows) == rows
    assert not forms.blocked or capabilities
    assert product_forms(dtype, packs=False, copies=True).packed_rows == {}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Linux machine with such a processor, which has not tried yet."""
    pretend(monkeypatch, "AVX512", *processor._KERNELS_NEED)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(processor, "_compiled_kernels", processor._CompiledKernels())


def test_kernels_are_for_bfloat16_on_processors_that_have_them(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(ctypes.CDLL(None), ctypes.PyDLL(None), tiles=False, avx512=False)
    monkeypatch.setattr(processor, "load_library", lambda folder, compiler, wanted: library)
    assert product_forms(torch.bfloat16, packs=True, copies=True).library is library
    assert product_forms(torch.float32, packs=True, copies=True).library is None
    assert product_forms(torch.bfloat16, packs=True, copies=True, native=False).library is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert native_kernels() is None
    monkeypatch.setattr(sys, "platform", "linux")
    pretend(monkeypatch, "AVX512", *processor._KERNELS_NEED[1:])
    assert native_kernels() is None


def test_without_a_compiler_a_warning_says_what_would_help(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> Library:
        raise BuildError("there is no C++ compiler: install one")

    monkeypatch.setattr(processor, "load_library", fail)
    with caplog.at_level(logging.WARNING, "asyncllm"):
        forms = product_forms(torch.bfloat16, packs=True, copies=True)
    assert forms.library is None
    assert forms.packed_rows
    assert "install one" in caplog.text
    monkeypatch.setattr(processor, "load_library", None)
    assert product_forms(torch.bfloat16, packs=True, copies=True).library is None  # it is not tried again


def test_what_is_not_wanted_any_more_is_tried_again(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> Library:
        raise BuildInterrupted

    monkeypatch.setattr(processor, "load_library", stop)
    with pytest.raises(ModelLoadError, match="was cancelled"):
        native_kernels()
    library = Library(ctypes.CDLL(None), ctypes.PyDLL(None), tiles=False, avx512=False)
    monkeypatch.setattr(processor, "load_library", lambda folder, compiler, wanted: library)
    assert native_kernels() is library


async def test_an_engine_whose_start_is_cancelled_ends_its_compiler(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho $$ > '{tmp_path}/begun'; exec sleep 1000\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("ASYNCLLM_KERNELS", str(tmp_path / "kernels"))
    engine = AsyncEngine(write_tiny_model(tmp_path / "model"), device="cpu", dtype="bfloat16", max_model_len=64)
    start = asyncio.create_task(engine.start())
    await eventually((tmp_path / "begun").exists, 20)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await engine.aclose()
    await eventually(lambda: not any((tmp_path / "kernels").iterdir()))


def test_without_a_home_no_folder_keeps_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled at every start then."""
    for name in ("ASYNCLLM_KERNELS", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where the system does not know the user
    assert kernel_folder() is None
