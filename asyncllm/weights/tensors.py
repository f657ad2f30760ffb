"""The tensors of a checkpoint, one at a time, under Hugging Face's names and in its layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from asyncllm.weights.gguf import ByteArray, GGUFTensor, dequantize
from asyncllm.weights.gguf_groups import group_bits, read_groups
from asyncllm.weights.gguf_model import IndexArray, huggingface_name, row_order
from asyncllm.weights.grouped import GroupedTensor
from asyncllm.weights.safetensors import find_shards, open_shard
from asyncllm.weights.source import ModelSource


def iterate_tensors(source: ModelSource) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, on the CPU, in the order of the files.

    Stored types are kept (quantised ones become float32), and those tensors are mapped from the file: copy what must
    outlive the next step of the iteration. Nothing of the checkpoint stays in memory after its turn. Raises
    `CheckpointError`, before the first tensor for whatever can be told from headers.
    """
    if source.load_format == "gguf":
        return ((name, _read(tensor, order)) for name, tensor, order in _iterate_gguf(source))
    if source.load_format == "safetensors":
        return _iterate_safetensors(source)
    raise ValueError(f"a {source.load_format} model has no tensors")


def iterate_grouped(source: ModelSource) -> Iterator[tuple[str, torch.Tensor | GroupedTensor]]:
    """As `iterate_tensors`, with quantised matrices left in groups where their type has them; those may be kept."""
    if source.load_format != "gguf":
        yield from iterate_tensors(source)
        return
    for name, tensor, order in _iterate_gguf(source):
        if _bits(tensor) is None:
            yield name, _read(tensor, order)
        else:
            yield name, read_groups(torch.from_numpy(_packed_rows(tensor, order)), tensor.type_name)


def grouped_bits(source: ModelSource) -> Mapping[str, int]:
    """Of each tensor that `iterate_grouped` leaves in groups, the bits of its codes."""
    if source.load_format != "gguf":
        return {}
    assert source.gguf_header is not None
    found = {huggingface_name(tensor): _bits(tensor) for tensor in source.gguf_header.tensors.values()}
    return {name: bits for name, bits in found.items() if name is not None and bits is not None}


def _iterate_safetensors(source: ModelSource) -> Iterator[tuple[str, torch.Tensor]]:
    assert source.folder is not None
    for shard in find_shards(source.folder):
        with open_shard(shard.path, "pt") as file:
            for name in shard.names:
                yield name, file.get_tensor(name)


def _iterate_gguf(source: ModelSource) -> Iterator[tuple[str, GGUFTensor, IndexArray | None]]:
    """Hugging Face's name of each tensor, and the order of rows that goes with it."""
    file = source.gguf_header
    assert file is not None
    for tensor in file.tensors.values():
        name = huggingface_name(tensor)
        if name is not None:
            yield name, tensor, row_order(tensor, file, source.config)


def _bits(tensor: GGUFTensor) -> int | None:
    return group_bits(tensor.type_name) if len(tensor.shape) == 2 else None


def _packed_rows(tensor: GGUFTensor, order: IndexArray | None) -> ByteArray:
    """[rows, row_bytes]; a vector is one row, and is not reordered."""
    packed = tensor.read()
    return packed if order is None or len(tensor.shape) == 1 else packed[order]


def _read(tensor: GGUFTensor, order: IndexArray | None) -> torch.Tensor:
    packed = _packed_rows(tensor, order)  # before the values grow
    if tensor.type_name in ("F32", "F16"):
        values = torch.from_numpy(packed.view(np.float32 if tensor.type_name == "F32" else np.float16))
    elif tensor.type_name == "BF16":
        values = torch.from_numpy(packed.view(np.int16)).view(torch.bfloat16)
    else:
        values = torch.from_numpy(dequantize(packed, tensor.type_name))
    values = values.reshape(tensor.shape)
    return values if order is None or len(tensor.shape) > 1 else values[torch.from_numpy(order)]
