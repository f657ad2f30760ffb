"""Kernel modules on a machine without Triton."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import pkgutil, sys
sys.modules["triton"] = None  # its import fails
import torch
import asyncllm.kernels
from asyncllm.kernels import language, rms_norm

for module in pkgutil.iter_modules(asyncllm.kernels.__path__):
    __import__(f"asyncllm.kernels.{module.name}")
assert not language.TRITON_AVAILABLE
x = torch.ones(1, 4)
assert torch.equal(rms_norm.rms_norm_reference(x, x[0], 0.0), x)
try:
    rms_norm.rms_norm(x, x[0], 0.0)
except ModuleNotFoundError as error:
    print(error)
"""


def test_modules_import_and_name_what_is_missing() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "kernel _rms_norm_kernel needs the triton package, which is not installed"
