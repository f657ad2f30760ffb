"""What this machine's processor computes fast: by its capabilities, so that every start chooses the same."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import cache

import torch

from asyncllm.config import cpp_compiler, kernel_folder
from asyncllm.kernels.cpu.build import BuildError, Library, load_library
from asyncllm.layers.product_forms import ProductForms

logger = logging.getLogger("asyncllm")

_KERNELS_NEED = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni", "avx512_bf16")
"""CPU capabilities that our own kernels are written for."""
_NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""CPU capabilities that multiply bfloat16 in hardware. Without one it is two to six times slower than float32."""

# Rows up to which the packed product of 4-bit codes, and that of 8-bit ones, is faster than the dense one. Measured
# with SmolLM2-135M's matrices on a processor that has all of these, which was told to do without some.
_WITH_AMX = {4: 8, 8: 2}
_WITH_BFLOAT16 = {4: 12, 8: 3}
_WITH_FLOAT32 = {4: 12, 8: 5}


def has_native_bfloat16() -> bool:
    """Whether products of bfloat16 are faster than those of float32."""
    capabilities = _capabilities()
    return any(capabilities.get(name) for name in _NATIVE_BFLOAT16)


def native_kernels() -> Library | None:
    """Our own kernels, compiled at first use; None where the processor or its system is another."""
    capabilities = _capabilities()
    if sys.platform != "linux" or not all(capabilities.get(name) for name in _KERNELS_NEED):
        return None
    return _compiled_kernels()


@cache
def _compiled_kernels() -> Library | None:
    """Once a process: a compiler that failed fails again."""
    try:
        return load_library(kernel_folder(), cpp_compiler())
    except BuildError as error:
        logger.warning(
            "no kernels for this processor, so torch's operators compute, at a fraction of the speed: %s", error
        )
        return None


def product_forms(dtype: torch.dtype, *, packs: bool, copies: bool, native: bool = True) -> ProductForms:
    """The forms of products for activations of this dtype; `packs` unless packed weights are to be unpacked; `native`:
    our own kernels, where the processor has them."""
    library = native_kernels() if native and dtype == torch.bfloat16 else None
    blocked = hasattr(torch.ops.mkldnn, "_linear_pointwise") and has_native_bfloat16()
    # Other processors have no vector code for the packed product.
    packs = packs and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    packs = packs and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return ProductForms(
        library=library, blocked=blocked, packed_rows=_packed_rows(dtype) if packs else {}, copies=copies
    )


def _packed_rows(dtype: torch.dtype) -> Mapping[int, int]:
    if dtype != torch.bfloat16:
        return _WITH_FLOAT32
    return _WITH_AMX if _capabilities().get("amx_bf16") else _WITH_BFLOAT16


def _capabilities() -> Mapping[str, object]:
    # older torch cannot tell
    found: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return found
