"""The key that stands for Triton itself in its cache of kernels. Loads neither torch nor, by itself, triton."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module


def hash_triton() -> None:
    """Have Triton hash all of itself, hundreds of megabytes, as it does once for the keys of its cache."""
    with suppress(ModuleNotFoundError):
        import_module("triton.runtime.cache").triton_key()
