"""The processor's kernels are compiled for these tests; a machine without a compiler fails them, and says so."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from asyncllm.engine.execution import processor
from asyncllm.kernels.cpu import build
from asyncllm.kernels.cpu.build import Library, load_library


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Library:
    capabilities = processor._capabilities()
    if missing := [name for name in processor._KERNELS_NEED if not capabilities.get(name)]:
        pytest.skip(f"this processor has no {', '.join(missing)}, and so runs torch's operators")
    return load_library(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def avx2_compiler() -> str:
    """A command that compiles as for a processor without AVX-512."""
    return shlex.join((*next(build._compilers()), "-mno-avx512f"))


@pytest.fixture(scope="session")
def avx2(compiled: Library, avx2_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Library:
    if not compiled.avx512:
        return compiled
    library = load_library(tmp_path_factory.mktemp("kernels"), avx2_compiler)
    assert not library.avx512
    assert not library.tiles
    return library


@pytest.fixture(params=["tiles", "AVX-512", "AVX2"])
def library(request: pytest.FixtureRequest, compiled: Library) -> Library:
    """With the matrix unit, as a processor without one, and as one without AVX-512."""
    if request.param == "AVX2":
        found: Library = request.getfixturevalue("avx2")
        return found
    if request.param == "tiles" and not compiled.tiles:
        pytest.skip("this processor has no matrix unit")
    if not compiled.avx512:
        pytest.skip("this processor has no AVX-512")
    return replace(compiled, tiles=request.param == "tiles")
