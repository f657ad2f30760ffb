"""The processor's kernels are compiled for these tests; a machine without a compiler fails them, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncllm.engine.execution import processor
from asyncllm.kernels.cpu.build import Library, load_library


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Library:
    capabilities = processor._capabilities()
    if missing := [name for name in processor._KERNELS_NEED if not capabilities.get(name)]:
        pytest.skip(f"this processor has no {', '.join(missing)}, and so runs torch's operators")
    return load_library(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=[True, False], ids=["tiles", "vectors"])
def library(request: pytest.FixtureRequest, compiled: Library) -> Library:
    """With the matrix unit, and as a processor without one."""
    if request.param and not compiled.tiles:
        pytest.skip("this processor has no matrix unit")
    return replace(compiled, tiles=request.param)
