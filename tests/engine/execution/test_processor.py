from __future__ import annotations

import ctypes
import logging
import os
import sys

import pytest
import torch

from asyncllm.config import kernel_folder
from asyncllm.engine.execution import processor
from asyncllm.engine.execution.processor import has_native_bfloat16, native_kernels, product_forms
from asyncllm.kernels.cpu.build import BuildError, Library


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
    monkeypatch.setattr(processor, "_compiled_kernels", processor._compiled_kernels.__wrapped__)


def test_kernels_are_for_bfloat16_on_processors_that_have_them(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(ctypes.CDLL(None), tiles=False)
    monkeypatch.setattr(processor, "load_library", lambda folder, compiler: library)
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


def test_without_a_home_no_folder_keeps_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled at every start then."""
    for name in ("ASYNCLLM_KERNELS", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where the system does not know the user
    assert kernel_folder() is None
