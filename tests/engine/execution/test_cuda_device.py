"""Which device an engine takes, on machines whose GPUs torch only says it sees: there is no old one to test with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncllm import AsyncEngine
from asyncllm.engine.execution import cuda_device
from asyncllm.engine.execution.cuda_device import find_cuda_device
from asyncllm.errors import ConfigError
from asyncllm.testing.tiny_models import write_tiny_model

OLD, NEW = (7, 5), (9, 0)
Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """GPUs of these compute capabilities, and whether Triton is installed."""

    def set_up(*capabilities: tuple[int, int], triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
        monkeypatch.setattr(cuda_device, "TRITON_AVAILABLE", triton)

    return set_up


def test_the_first_usable_one_is_used_unasked(pretend: Pretend) -> None:
    pretend(NEW, NEW)
    assert find_cuda_device("auto") == find_cuda_device("cuda") == torch.device("cuda", 0)
    assert find_cuda_device("cuda:1") == torch.device("cuda", 1)
    pretend(OLD, (8, 0))
    assert find_cuda_device("auto") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040). Please update", True),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", True),
        ("No CUDA GPUs are available", False),
        ("Found no NVIDIA driver on your system. Please check that you have", False),
    ],
)
def test_a_driver_that_torch_cannot_use_is_told(
    said: str, refused: bool, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError(said)

    pretend()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    if refused:
        with pytest.raises(ConfigError, match=rf"cannot use the NVIDIA driver: {said[:20]}.*device=.cpu. would do"):
            find_cuda_device("auto")
    else:
        assert find_cuda_device("auto") is None
    assert find_cuda_device("cpu") is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find_cuda_device("auto") is None


def test_the_cpu_where_it_is_asked_for_or_there_is_no_other(pretend: Pretend) -> None:
    pretend(NEW)
    assert find_cuda_device("cpu") is None
    pretend()
    assert find_cuda_device("auto") is None


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_a_gpu_that_is_too_old_is_named(name: str, pretend: Pretend) -> None:
    pretend(OLD)
    wanted = r'device="cpu" would do'
    with pytest.raises(ConfigError, match=rf"GPU 0 has compute capability 7\.5, and the kernels need 8\.0; {wanted}"):
        find_cuda_device(name)
    assert find_cuda_device("cpu") is None


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_driver_without_triton_is_named(name: str, pretend: Pretend) -> None:
    pretend(NEW, triton=False)
    with pytest.raises(ConfigError, match=r'need the triton package.*device="cpu" would do'):
        find_cuda_device(name)


def test_a_gpu_that_is_not_there(pretend: Pretend) -> None:
    pretend(NEW)
    with pytest.raises(ConfigError, match=r'device=.cuda:1.: torch sees 1 CUDA devices; device="cpu" would do'):
        find_cuda_device("cuda:1")


async def test_an_engine_does_not_fall_back_unasked(pretend: Pretend, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    pretend(OLD)
    with pytest.raises(ConfigError, match=r"compute capability 7\.5"):
        await AsyncEngine(folder).start()
    async with AsyncEngine(folder, device="cpu", max_model_len=64) as engine:
        assert (await engine.generate([5])).token_ids
