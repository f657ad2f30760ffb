"""What this machine's processor computes fast: by its capabilities, so that every start chooses the same."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping

import torch

from asyncllm.config import cpp_compiler, kernel_folder
from asyncllm.errors import ModelLoadError
from asyncllm.kernels.cpu.build import BuildError, BuildInterrupted, Library, always, load_library
from asyncllm.layers.product_forms import ProductForms

logger = logging.getLogger("asyncllm")

_KERNELS_NEED = ("avx2", "fma3", "f16c")
"""CPU capabilities that our own kernels need at least."""
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


class _CompiledKernels:
    """Those of the process, compiled at first use. A compiler that failed fails again; one that was ended has not."""

    def __init__(self) -> None:
        self._found: tuple[Library | None] | None = None  # None: nobody has looked

    def get(self, wanted: Callable[[], bool]) -> Library | None:
        """None where there are none. Raises `BuildInterrupted` once they are not wanted."""
        if self._found is None:
            try:
                self._found = (load_library(kernel_folder(), cpp_compiler(), wanted),)
            except BuildError as error:
                logger.warning(
                    "no kernels for this processor, so torch's operators compute, at a fraction of the speed: %s", error
                )
                self._found = (None,)
        return self._found[0]


_compiled_kernels = _CompiledKernels()


def native_kernels(wanted: Callable[[], bool] = always) -> Library | None:
    """Our own kernels, compiled at first use; None where the processor or its system is another.

    Raises `ModelLoadError` where they are not `wanted` any more before they are there.
    """
    capabilities = _capabilities()
    if sys.platform != "linux" or not all(capabilities.get(name) for name in _KERNELS_NEED):
        return None
    try:
        return _compiled_kernels.get(wanted)
    except BuildInterrupted as error:
        raise ModelLoadError("loading was cancelled") from error


def product_forms(
    dtype: torch.dtype, *, packs: bool, copies: bool, native: bool = True, wanted: Callable[[], bool] = always
) -> ProductForms:
    """The forms of products for activations of this dtype; `packs` unless packed weights are to be unpacked; `native`:
    our own kernels, where the processor has them, as `native_kernels` gives them."""
    library = native_kernels(wanted) if native and dtype == torch.bfloat16 else None
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
