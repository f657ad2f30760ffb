"""Chooses the sizes that the configuration left open, so that they fit the memory at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.kv_cache import CacheLayout, make_cache_layout
from asyncllm.engine.execution.runner import ModelFacts
from asyncllm.errors import ConfigError, InsufficientMemoryError
from asyncllm.layers.parameter import Placement
from asyncllm.models.configuration import ModelConfig
from asyncllm.models.llama import Llama

_BLOCK_SIZE = 16
_BATCHED_TOKENS = 1024
"""Enough for a prompt's matrix products to be efficient, and for most prompts to be attended at once, which needs no
mask; few enough for who comes next not to wait long."""
_CPU_CHUNK = 64
_LEAST_GPU_CHUNK, _MOST_GPU_CHUNK = 256, 1024
_GPU_CHUNK_BYTES = 1 << 42
"""Bytes of weights times tokens: 256 of a model of 8 billion parameters in bfloat16."""
_MOST_FULL_STEP = 2048


@dataclass(frozen=True, slots=True)
class Sizes:
    """Every size of a runner, resolved."""

    max_model_len: int
    max_batched_tokens: int
    layout: CacheLayout
    num_blocks: int

    def facts(
        self, config: EngineConfig, model: Llama, memory_bytes: Mapping[str, int], placement: Placement
    ) -> ModelFacts:
        """Of this model with a cache of these sizes."""
        return ModelFacts(
            vocab_size=model.config.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.layout.block_size,
            num_blocks=self.num_blocks,
            groups=self.layout.groups,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            memory_bytes=memory_bytes,
            dtype=dtype_name(placement.dtype),
            device=str(placement.device),
            mixed_chunk_tokens=mixed_chunk_tokens(placement.device, model.weight_bytes()),
            full_step_tokens=full_step_tokens(placement.device, model.weight_bytes()),
            filled_steps=placement.device.type == "cuda",
            prefix_caching=not model.rotary.length_dependent,
        )


def mixed_chunk_tokens(device: torch.device, weight_bytes: int) -> int:
    """How many prompt tokens a step may compute beside decoding rows without holding them up: on a GPU some 5 ms of an
    H200, but no fewer than are computed while the weights are read anyway."""
    if device.type == "cpu":
        return _CPU_CHUNK
    return min(max(_affordable(weight_bytes), _LEAST_GPU_CHUNK), _MOST_GPU_CHUNK)


def full_step_tokens(device: torch.device, weight_bytes: int) -> int:
    """From how many tokens on a step is worth the reading of weights, and its fixed costs: on an H200 a few per cent of
    its time go to both."""
    if device.type == "cpu":
        return 4 * _CPU_CHUNK
    return min(max(4 * _affordable(weight_bytes), 4 * _LEAST_GPU_CHUNK), _MOST_FULL_STEP)


def _affordable(weight_bytes: int) -> int:
    tokens: int = 1 << max(1, _GPU_CHUNK_BYTES // weight_bytes).bit_length() - 1
    return tokens


def dtype_name(dtype: torch.dtype) -> str:
    """As the configuration spells it."""
    return str(dtype).removeprefix("torch.")


def choose_sizes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, free: int) -> Sizes:
    """`free` bytes are left beside the weights.

    What the caller set is kept or refused: `ConfigError` for a context that the model does not have,
    `InsufficientMemoryError` for a cache that does not fit or holds no whole request. What is left open is what the
    configured rows and lengths can use, in at most half of `free`; the context shrinks where one request needs more.
    """
    if config.max_model_len is not None and config.max_model_len > model.context_limit:
        raise ConfigError(f"max_model_len={config.max_model_len} is over the model's context of {model.context_limit}")
    max_model_len = config.max_model_len or model.max_position_embeddings
    step_tokens = config.max_batched_tokens or max(_BATCHED_TOKENS, config.max_num_seqs)
    layout = _layout(config, model, max_model_len)
    block_bytes = layout.block_bytes(dtype)
    if config.num_blocks is not None:
        if (config.num_blocks + 1) * block_bytes > free:
            raise InsufficientMemoryError(
                f"num_blocks={config.num_blocks} of {megabytes(block_bytes)} each do not fit: {megabytes(free)} are "
                f"available, enough for num_blocks={max(0, free // block_bytes - 1)}"
            )
        return Sizes(max_model_len, step_tokens, layout, config.num_blocks)
    if config.kv_cache_memory is not None and config.kv_cache_memory > free:
        raise InsufficientMemoryError(
            f"kv_cache_memory={config.kv_cache_memory} does not fit: {megabytes(free)} are available"
        )
    affordable = (config.kv_cache_memory or free // 2) // block_bytes - 1  # one is the null block
    needed = layout.request_blocks(max_model_len, step_tokens)
    if affordable < needed:
        fitting = _longest(layout, affordable, step_tokens, max_model_len)
        if config.max_model_len is not None or fitting == 0:
            least = (layout.request_blocks(layout.block_size, step_tokens) + 1) * block_bytes
            would_do = f"max_model_len={fitting} would fit" if fitting else f"the shortest needs {megabytes(least)}"
            raise InsufficientMemoryError(
                f"one request of {max_model_len} tokens needs {megabytes((needed + 1) * block_bytes)} of KV cache, and "
                f"there are {megabytes((affordable + 1) * block_bytes)}: {would_do}"
            )
        # the layout stays: windows that are now longer than the context do no harm
        max_model_len, needed = fitting, affordable
    if config.kv_cache_memory is None:
        affordable = min(affordable, config.max_num_seqs * needed)
    return Sizes(max_model_len, step_tokens, layout, affordable)


def _layout(config: EngineConfig, model: ModelConfig, max_model_len: int) -> CacheLayout:
    # a window as long as the context is no window
    windows = [None if window is None or window >= max_model_len else window for window in model.windows]
    return make_cache_layout(windows, model.num_kv_heads, model.head_dim, config.block_size or _BLOCK_SIZE)


def _longest(layout: CacheLayout, blocks: int, step_tokens: int, limit: int) -> int:
    """The longest request, in whole blocks, that `blocks` hold; 0 if none."""
    low, high = 0, limit // layout.block_size
    while low < high:
        middle = (low + high + 1) // 2
        if layout.request_blocks(middle * layout.block_size, step_tokens) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low * layout.block_size


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{max(size, 0) / 1e6:,.1f} MB"
