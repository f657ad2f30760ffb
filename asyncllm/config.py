"""EngineConfig: every setting of an engine. The only module that may read environment variables."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from asyncllm.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
KVCacheDType = Literal["auto", "fp8"]
LogprobsMode = Literal["raw", "processed"]
Isolation = Literal["thread", "process"]

_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_batched_tokens",
    "mixed_chunk_tokens",
    "block_size",
    "num_blocks",
    "kv_cache_memory",
    "threads",
)
MAX_ROWS = 65_536
"""The most rows of a step: each takes memory whether it is used or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is built. Frozen; impossible values raise `ConfigError`, unknown names `TypeError` here and
    `ConfigError` in `override`. Sizes are in tokens, `kv_cache_memory` in bytes. None means: chosen for the model and
    the machine at start."""

    dtype: DType = "auto"
    """Of activations, and of weights that are not kept packed. "float32" and "float16" unpack them exactly."""
    quantization: Quantization = "auto"
    """"auto" keeps the packed weights of a file packed where that is faster; "none" unpacks them to `dtype`."""
    device: str = "auto"
    """"auto", "cpu", "cuda" or "cuda:N". "auto" is the first GPU, and the CPU only where there is none."""
    load_format: LoadFormat = "auto"
    """Which weights of a folder to read; "dummy" fills random ones from a config.json alone."""
    revision: str | None = None
    """Branch, tag or commit of a Hub repository."""
    max_model_len: int | None = None
    """Prompt and output together; None is the model's own context."""
    max_num_seqs: int = 256
    """Requests that run at once: rows of a step."""
    max_batched_tokens: int | None = None
    """Positions that one step computes."""
    mixed_chunk_tokens: int | None = None
    """Prompt tokens of a step in which others decode; of many prompts that come at once, more."""
    block_size: int | None = None
    """Tokens in a block of the KV cache: a power of two, 8 to 256."""
    num_blocks: int | None = None
    """Blocks in the KV pool; or give `kv_cache_memory`."""
    kv_cache_memory: int | None = None
    """Bytes for the KV pool."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Of the KV cache: "auto" is that of the activations, "fp8" (e4m3, no scale) takes half the bytes; a GPU's only."""
    prefix_caching: bool = True
    """Reuse the blocks of an equal prefix."""
    run_ahead: int = 1
    """Steps launched before an earlier one's result is known, 0 to 2; 0 is the plain synchronous engine."""
    ageing_seconds: float = 10.0
    """Waiting this long is worth one level of priority, so that nothing waits for ever."""
    model_defaults: bool = True
    """Take sampling defaults from the model's generation_config."""
    logprobs_mode: LogprobsMode = "raw"
    """Log-probabilities are "raw": of the model's own logits; or "processed": of what the token was drawn from."""
    hook_timeout: float = 30.0
    """Seconds that each call of a request's `logits_processors` or `on_token` may take."""
    prepare_grammars: bool = False
    """Build at start what structured output needs. The first request that asks for it does so else, and holds the
    interpreter lock for it: 0.2 s for 50,000 tokens, 1 s for 150,000."""
    chat_template: str | None = None
    """A Jinja chat template to use in place of the model's own."""
    deterministic: bool = False
    """Equal requests get bit-equal logits, whatever runs beside them, however their prompts are cut and whatever is in
    the cache; slower, and a GPU's only."""
    native_kernels: bool = True
    """Compile kernels of our own for this machine's processor, once, where it has a C++ compiler; False: torch's
    operators alone."""
    threads: int | None = None
    """Threads of a CPU step; None leaves torch's own number."""
    isolation: Isolation = "thread"
    """Where the engine lives: on a "thread" of the program's, or in a "process" of its own, which no Python work of the
    program's holds up, and which is started again if it dies."""

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DType.__args__)  # type: ignore[attr-defined]
        _one_of("quantization", self.quantization, Quantization.__args__)  # type: ignore[attr-defined]
        _one_of("isolation", self.isolation, Isolation.__args__)  # type: ignore[attr-defined]
        _one_of("logprobs_mode", self.logprobs_mode, LogprobsMode.__args__)  # type: ignore[attr-defined]
        _one_of("load_format", self.load_format, LoadFormat.__args__)  # type: ignore[attr-defined]
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KVCacheDType.__args__)  # type: ignore[attr-defined]
        if not isinstance(self.device, str) or not (
            self.device in ("auto", "cpu", "cuda") or re.fullmatch(r"cuda:[0-9]+", self.device)
        ):
            raise ConfigError(f'device must be "auto", "cpu", "cuda" or "cuda:N", got {self.device!r}')
        for name in _COUNTS:
            _positive(name, getattr(self, name))
        if self.block_size is not None and self.block_size not in (8, 16, 32, 64, 128, 256):
            raise ConfigError(f"block_size must be a power of two from 8 to 256, got {self.block_size!r}")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("give num_blocks or kv_cache_memory, not both")
        if type(self.run_ahead) is not int or self.run_ahead not in (0, 1, 2):
            raise ConfigError(f"run_ahead must be 0, 1 or 2, got {self.run_ahead!r}")
        ageing = self.ageing_seconds
        if isinstance(ageing, bool) or not isinstance(ageing, int | float) or not 1e-3 <= ageing <= 1e9:
            raise ConfigError(f"ageing_seconds must be a number from 0.001 to 1e9, got {ageing!r:.80}")
        timeout = self.hook_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 1e9:
            raise ConfigError(f"hook_timeout must be a number of seconds above 0, at most 1e9, got {timeout!r:.80}")
        if self.max_num_seqs > MAX_ROWS:
            raise ConfigError(f"max_num_seqs must be at most {MAX_ROWS}, got {self.max_num_seqs!r:.80}")
        for name in ("revision", "chat_template"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"{name} must be a text, got {getattr(self, name)!r}")
        for name in ("prefix_caching", "deterministic", "model_defaults", "prepare_grammars", "native_kernels"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def override(self, **overrides: Any) -> EngineConfig:
        """A new config with these fields changed; raises `ConfigError` with the nearest name for an unknown one."""
        check_names(EngineConfig, "engine setting", overrides)
        return replace(self, **overrides)


def check_names(settings: type[Any], kind: str, names: Iterable[str]) -> None:
    """Raise `ConfigError`, with the nearest name, for one that is no field of the dataclass `settings`."""
    known = [f.name for f in fields(settings)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise ConfigError(f"unknown {kind} {name!r}{hint}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _positive(name: str, value: object) -> None:
    if value is None and name != "max_num_seqs":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def child_environment(path: Iterable[object]) -> dict[str, str]:
    """The environment of a Python process that finds modules where this one does, along `path`: imports look at its
    texts, and not at the `Path` that some program has put there."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in path if isinstance(entry, str))}


def kernel_folder() -> Path | None:
    """Where kernels are kept that were compiled for this machine: `ASYNCLLM_KERNELS`, or in the user's cache; None for
    a user without a home."""
    chosen = os.environ.get("ASYNCLLM_KERNELS")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):
        return Path(cache or Path.home() / ".cache") / "asyncllm" / "kernels"
    return None


def cpp_compiler() -> str | None:
    """The command of the C++ compiler that the environment names, as `CXX`."""
    return os.environ.get("CXX") or None


def read_environment(names: Iterable[str]) -> dict[str, str]:
    """The texts of `ASYNCLLM_NAME` by name, for those of these names that are set. For commands only."""
    return {name: value for name in names if (value := os.environ.get(f"ASYNCLLM_{name.upper()}")) is not None}
