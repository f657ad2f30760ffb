"""Brings up a model: weights, cache and runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.available_memory import available_memory
from asyncllm.engine.execution.cpu_runner import CpuRunner, StepExecutor
from asyncllm.engine.execution.cuda_device import find_cuda_device
from asyncllm.engine.execution.cuda_loading import load_cuda_runner
from asyncllm.engine.execution.device_thread import DeviceThread
from asyncllm.engine.execution.head_start import HeadStart
from asyncllm.engine.execution.processor import has_native_bfloat16, native_kernels, product_forms
from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.runner import ModelFacts, Runner
from asyncllm.engine.execution.sampler import SamplerForm
from asyncllm.engine.execution.sizes import Sizes, choose_sizes, dtype_name, megabytes
from asyncllm.engine.execution.step_batch import attention_bytes
from asyncllm.errors import ConfigError, InsufficientMemoryError
from asyncllm.kernels.cpu.build import always
from asyncllm.layers.attention import LayerCache
from asyncllm.layers.cpu_product import kernel_bytes, packable, packed_bytes
from asyncllm.layers.parameter import CheckpointTensor, Placement
from asyncllm.layers.product_forms import ProductForms
from asyncllm.layers.weight_memory import taking_pages
from asyncllm.models.checkpoint import EMBEDDING, fill_weights, load_weights
from asyncllm.models.configuration import ModelConfig
from asyncllm.models.registry import find_architecture, read_model_config
from asyncllm.weights.source import ModelSource
from asyncllm.weights.tensors import grouped_bits, iterate_grouped, iterate_tensors

_Tensors = Iterable[tuple[str, CheckpointTensor]]
_COPIES_SHARE = 2
"""Dense copies of packed weights take at most one part in so many of the memory that is left beside the weights."""

_FIRST_BYTES = 192 << 20
"""Of the cache, what is the process's own from the start: the blocks that are used first."""


async def load_runner(source: ModelSource, config: EngineConfig, head_start: HeadStart) -> tuple[Runner, ModelFacts]:
    """Load a model and make it ready to run. Called on the engine's loop; the work is done on the runner's thread. The
    head start has begun, or not.

    Raises `UnsupportedModelError`, `CheckpointError`, `ConfigError` and `InsufficientMemoryError`. A GPU is used where
    there is one, unless `config.device` says otherwise.
    """
    device = find_cuda_device(config.device)
    if device is not None:
        return await load_cuda_runner(source, config, device, head_start)
    _check_supported(config)
    thread = DeviceThread("asyncllm-cpu")
    load = partial(load_executor, source, config, thread.interruptible, lambda: not thread.closing)
    executor, facts = await thread.bring_up(load)
    return CpuRunner(thread, executor), facts


def _check_supported(config: EngineConfig) -> None:
    """What only a GPU's kernels do is refused by name."""
    for name, wanted in (("kv_cache_dtype", config.kv_cache_dtype == "fp8"), ("deterministic", config.deterministic)):
        if wanted:
            raise ConfigError(f"{name}={getattr(config, name)!r} needs a GPU, and this engine runs on the CPU")


def load_executor(
    source: ModelSource,
    config: EngineConfig,
    interruptible: Callable[[_Tensors], _Tensors] = iter,
    wanted: Callable[[], bool] = always,
) -> tuple[StepExecutor, ModelFacts]:
    """On the CPU: what the runner's thread computes with. The weights come through `interruptible`, one by one; a
    compiler is ended once its kernels are not `wanted`."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model_config, make_model = read_model_config(source.config), find_architecture(source.config).model
    dtype = _choose_dtype(config, model_config, wanted)
    packs = config.quantization == "auto" and config.dtype in ("auto", "bfloat16")
    forms = product_forms(dtype, packs=packs, copies=True, native=config.native_kernels, wanted=wanted)
    needed = _needed_bytes(source, model_config, dtype, forms, packs=packs)
    free = available_memory()
    if needed.weights > free:
        raise InsufficientMemoryError(
            f"the weights take {megabytes(needed.weights)} as {dtype_name(dtype)}, and {megabytes(free)} of memory are "
            "available"
        )
    copies = needed.copies <= (free - needed.weights) // _COPIES_SHARE
    sizes = choose_sizes(config, model_config, dtype, free - needed.weights - copies * needed.copies)
    placement = Placement(dtype, torch.device("cpu"), products=replace(forms, copies=copies))
    model = make_model(model_config, sizes.layout.layers, sizes.max_model_len, placement)
    cache = sizes.layout.allocate(sizes.num_blocks, dtype)
    first_blocks = min(len(cache[0]), _FIRST_BYTES // sizes.layout.block_bytes(dtype))
    with taking_pages([layer[:first_blocks] for layer in cache]):
        if source.load_format == "dummy":
            fill_weights(model)
        else:
            load_weights(model, interruptible(iterate_grouped(source) if packs else iterate_tensors(source)))
    model.join_layers()
    row_blocks = -(-sizes.max_model_len // sizes.layout.block_size)
    rows = RowState(config.max_num_seqs, len(sizes.layout.groups), row_blocks, model_config.vocab_size)
    memory = {
        "weights": model.weight_bytes(),
        "copies": model.copy_bytes(),
        "cache": cache.nbytes,
        "workspace": model.rotation_bytes() + rows.tables.nbytes,
    }
    memory["workspace"] += _activation_bytes(config, model_config, sizes, dtype)
    if model.decoder is None:
        memory["workspace"] += attention_bytes(sizes.layout, dtype, sizes.max_model_len)
    sampling = SamplerForm(config.logprobs_mode == "processed", forms.library)
    executor = StepExecutor(model, sizes.layout, cache, rows, sampling)
    return executor, sizes.facts(config, model, memory, placement)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """What a model is going to take."""

    weights: int
    copies: int  # of what it can do without


def _needed_bytes(
    source: ModelSource, config: ModelConfig, dtype: torch.dtype, forms: ProductForms, *, packs: bool
) -> _Bytes:
    somewhere = [LayerCache(0, 0)] * config.num_layers
    bits = grouped_bits(source) if packs else {}
    if forms.library is None:
        bits = {name: found for name, found in bits.items() if found in forms.packed_rows}
    model = find_architecture(source.config).model(config, somewhere, 1, Placement(dtype, torch.device("meta")))
    weights = copies = 0
    for name, slot in model.slots():
        plain = slot.shape.numel() * dtype.itemsize
        if name == EMBEDDING:  # a table that is read line by line, and so never packed; but the head may be it too
            weights += plain
            if not config.tied_head:
                continue
            if forms.library is None:
                copies += plain * forms.blocked
                weights += packed_bytes(slot.shape, bits[name]) if name in bits else 0
            elif name in bits:
                weights += kernel_bytes(slot.shape, bits[name]) or 0
            else:
                copies += plain
        elif forms.library is not None:
            weights += kernel_bytes(slot.shape, bits.get(name, 16)) or plain
        elif name in bits and packable(slot.shape):
            weights += packed_bytes(slot.shape, bits[name])
            copies += plain
        else:
            weights += plain
    return _Bytes(weights, copies)


def _choose_dtype(config: EngineConfig, model: ModelConfig, wanted: Callable[[], bool]) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if model.checkpoint_dtype == "float32":
        return torch.float32
    quick = has_native_bfloat16() or (config.native_kernels and native_kernels(wanted) is not None)
    return torch.bfloat16 if quick else torch.float32


def _activation_bytes(config: EngineConfig, model: ModelConfig, sizes: Sizes, dtype: torch.dtype) -> int:
    """About the most that a step allocates: the widest product and its inputs, and the logits in float32 twice."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    width = 3 * model.hidden_size + qkv + 3 * model.intermediate_size
    return sizes.max_batched_tokens * width * dtype.itemsize + config.max_num_seqs * model.vocab_size * 8
