"""Brings up a model on a GPU: weights, cache, and the first steps (`first_steps`), whose kernels are compiled while the
weights are loaded."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import partial

import torch

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.cuda_device import CudaSpace
from asyncllm.engine.execution.cuda_executor import CudaExecutor
from asyncllm.engine.execution.cuda_runner import STEPS, CudaRunner
from asyncllm.engine.execution.device_rows import DeviceRows, RowSizes
from asyncllm.engine.execution.device_thread import DeviceThread
from asyncllm.engine.execution.first_steps import LEAST_LENGTH, FirstSteps, first_plans
from asyncllm.engine.execution.head_start import HeadStart
from asyncllm.engine.execution.kv_cache import allocate_device_cache
from asyncllm.engine.execution.runner import ModelFacts, Runner
from asyncllm.engine.execution.sizes import choose_sizes, dtype_name, megabytes
from asyncllm.engine.execution.step_program import StepProgram
from asyncllm.engine.execution.step_ring import StepRing
from asyncllm.errors import ConfigError, InsufficientMemoryError, UnsupportedModelError
from asyncllm.kernels.step_layout import StepWords
from asyncllm.layers.attention import LayerCache
from asyncllm.layers.parameter import Placement
from asyncllm.models.checkpoint import fill_weights, load_weights
from asyncllm.models.configuration import ModelConfig
from asyncllm.models.registry import find_architecture, read_model_config
from asyncllm.weights.source import ModelSource
from asyncllm.weights.tensors import iterate_tensors

_BLOCK_SIZE = 64
_BATCHED_TOKENS = 8192
EDITS = 4096
"""Edits of block tables that a step describes in its own words; the few steps with more take longer to launch."""
_ALIGNED_ROWS = 4
"""There is room for a multiple of so many rows: fields of rows begin where kernels expect them to, and so one number of
rows needs hardly a kernel that another does not."""
_LEAST_FP8_CAPABILITY = (8, 9)
_SPLIT_ATTENTION = 1 << 27
"""Bytes that hold what long sequences' attention leaves between its parts, and more."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on the device, ready to run; `turn` is the ring's line of the next step."""

    executor: CudaExecutor
    ring: StepRing
    turn: int
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class _Order:
    """What to load, and who does it."""

    source: ModelSource
    config: EngineConfig
    thread: DeviceThread
    head_start: HeadStart


async def load_cuda_runner(
    source: ModelSource, config: EngineConfig, device: torch.device, head_start: HeadStart
) -> tuple[Runner, ModelFacts]:
    """Load a model onto `device` and make it ready to run. Called on the engine's loop; a thread does the work.

    Raises as `load_runner` does.
    """
    torch.cuda.set_device(device)  # of this thread, which launches the steps
    thread = DeviceThread("asyncllm-cuda-load")
    loaded = await thread.bring_up(partial(_load, _Order(source, config, thread, head_start), device))
    # The thread ends here, so that this one gets its handle of cuBLAS, and with it the workspace in use.
    await thread.aclose()
    return CudaRunner(loaded.executor, loaded.ring, loaded.turn), loaded.facts


def _load(order: _Order, device: torch.device) -> Loaded:
    model_config = read_model_config(order.source.config)
    _check_supported(model_config)
    space = CudaSpace(device)
    _make_library_workspace(space)
    try:
        return _build(order, model_config, space)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # what they hold is in the memory that is given back
        space.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise InsufficientMemoryError(
                f"{device} ran out of memory: {error}; a smaller max_num_seqs, max_batched_tokens or kv_cache_memory "
                "takes less"
            ) from None
        raise


def _build(order: _Order, model_config: ModelConfig, space: CudaSpace) -> Loaded:
    source, config = order.source, order.config
    dtype, device = _choose_dtype(config, model_config), space.device
    cache_dtype = _choose_cache_dtype(config, dtype, device)
    make_model = find_architecture(source.config).model
    somewhere = [LayerCache(0, 0)] * model_config.num_layers
    meta = Placement(dtype, torch.device("meta"), kernels=True)
    weights = make_model(model_config, somewhere, 1, meta).weight_bytes()
    config = _with_defaults(config, model_config)
    workspace = _workspace_bytes(config, model_config, dtype)
    free = torch.cuda.mem_get_info(device)[0]
    _check_room(weights, workspace, free, f"as {dtype_name(dtype)} on {device}")
    sizes = choose_sizes(config, model_config, cache_dtype, free - weights - workspace)
    # no shorter than what the first run needs
    length = max(sizes.max_model_len, LEAST_LENGTH)
    with space.entered():
        placement = Placement(dtype, device, kernels=True, deterministic=config.deterministic)
        model = make_model(model_config, sizes.layout.layers, length, placement)
        cache = allocate_device_cache(sizes.layout, sizes.num_blocks, cache_dtype, device)
        rows_room = -(-config.max_num_seqs // _ALIGNED_ROWS) * _ALIGNED_ROWS
        ring = StepRing(StepWords(rows_room, EDITS, sizes.max_batched_tokens), STEPS, device)
        row_sizes = RowSizes(
            rows=rows_room,
            groups=len(sizes.layout.groups),
            row_blocks=-(-length // sizes.layout.block_size),
            vocabulary=model_config.vocab_size,
            max_length=sizes.max_model_len,
            steps=STEPS,
            dtype=dtype,
        )
        processed = config.logprobs_mode == "processed"
        rows = DeviceRows(row_sizes, device, processed_logprobs=processed)
        program = StepProgram(model, sizes.layout, cache, rows, ring, deterministic=config.deterministic)
        executor = CudaExecutor(space, program, rows, ring, cache)
    plans = first_plans(config.max_num_seqs, sizes.max_batched_tokens, length)
    first = FirstSteps(executor, plans, order.thread)
    with first.compiling(order.head_start, row_sizes, processed_logprobs=processed):
        with space.entered():
            if source.load_format == "dummy":
                fill_weights(model)
            else:
                load_weights(model, order.thread.interruptible(iterate_tensors(source)))
        turn = first.run()
    memory = {"weights": model.weight_bytes(), "cache": cache.nbytes}
    memory["workspace"] = space.reserved_bytes() - sum(memory.values())
    memory["graphs"] = 0
    executor.serve(memory)
    return Loaded(executor, ring, turn, sizes.facts(config, model, memory, placement))


def _check_room(weights: int, workspace: int, free: int, where: str) -> None:
    """All in bytes. Beside them there must be some room for a cache, which `choose_sizes` looks at."""
    if weights + workspace <= free:
        return
    would_do = (
        "a smaller max_batched_tokens or max_num_seqs takes less"
        if weights < free
        else f'with {megabytes(weights + workspace)} and a cache it would run; so would device="cpu"'
    )
    raise InsufficientMemoryError(
        f"the weights take {megabytes(weights)} {where}, and a step about {megabytes(workspace)}; "
        f"{megabytes(free)} are free: {would_do}"
    )


def _check_supported(model: ModelConfig) -> None:
    if model.head_dim % 8 or not 16 <= model.head_dim <= 256:
        raise UnsupportedModelError(
            f"heads of {model.head_dim} dimensions: the GPU's attention takes multiples of 8 from 16 to 256; "
            'device="cpu" runs any'
        )


def _choose_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    name = config.dtype if config.dtype != "auto" else model.checkpoint_dtype
    dtype: torch.dtype = getattr(torch, name if name in ("float32", "float16") else "bfloat16")
    return dtype


def _choose_cache_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return dtype
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_FP8_CAPABILITY:
        least, has = (".".join(map(str, each)) for each in (_LEAST_FP8_CAPABILITY, capability))
        raise ConfigError(f'kv_cache_dtype="fp8" needs compute capability {least}, and {device} has {has}')
    return torch.float8_e4m3fn


def _with_defaults(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """With the sizes that suit a GPU where the caller left them open."""
    longest = config.max_model_len or model.max_position_embeddings
    usable = max(config.max_num_seqs * longest, config.max_num_seqs)
    return config.override(
        block_size=config.block_size or _BLOCK_SIZE,
        max_batched_tokens=config.max_batched_tokens or max(config.max_num_seqs, min(_BATCHED_TOKENS, usable)),
    )


def _workspace_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """About the most that a step allocates: what passes between two layers, and the logits and what samples them."""
    qkv = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    width = 4 * model.hidden_size + qkv + 3 * model.intermediate_size
    logits = config.max_num_seqs * model.vocab_size * (dtype.itemsize + 1)
    return (config.max_batched_tokens or 0) * width * dtype.itemsize + logits + _SPLIT_ATTENTION


def _make_library_workspace(space: CudaSpace) -> None:
    """Torch keeps a workspace of cuBLAS for ever, so it must not be in the memory that is given back."""
    with space.outside_memory():
        x = torch.zeros((16, 16), device=space.device)
        torch.addmm(x[0], torch.mm(x, x), x)
