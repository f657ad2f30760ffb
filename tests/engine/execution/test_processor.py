from __future__ import annotations

import pytest
import torch

from asyncllm.engine.execution.processor import has_native_bfloat16, product_forms


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
