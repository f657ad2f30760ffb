"""A GGUF file: its metadata and where each of its tensors lies.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here and not
by `gguf.GGUFReader`, which makes a numpy array of every string: 5 s for a vocabulary of 49,152 tokens, against 0.1 s.
The `gguf` package says which tensor types there are and turns them into float32.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncllm.errors import CheckpointError, DependencyError, ModelNotFoundError, UnsupportedModelError

ByteArray = NDArray[np.uint8]

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
_CHUNK = 1 << 17  # elements dequantised at once: few enough for the cache, enough to hide numpy's cost per call
_STRING, _ARRAY = 8, 9
_SCALARS = {  # value type: format of struct and numpy
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a GGUF file. Every row (the last dimension) is a whole number of blocks."""

    name: str
    path: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]  # row-major: outermost first
    type_name: str  # "F32", "Q4_K", ...
    row_bytes: int

    @property
    def byte_size(self) -> int:
        """Bytes in the file."""
        return prod(self.shape[:-1]) * self.row_bytes

    def read(self) -> ByteArray:
        """The packed bytes as [rows, row_bytes], mapped from the file: private pages, given back with the array."""
        shape = (prod(self.shape[:-1]), self.row_bytes)
        # Copy on write and not read-only, since torch warns of arrays that cannot be written. One mapping a tensor,
        # since the kernel may refuse a private one of a whole file that is larger than memory.
        return np.memmap(self.path, np.uint8, mode="c", offset=self.offset, shape=shape)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a GGUF file, or of all parts of a split one. Metadata values are plain Python values."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def part_names(name: str) -> tuple[str, ...]:
    """The names of all parts of the GGUF whose first (or only) file this is. Raises `ModelNotFoundError`."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return (name,)
    stem, count = match["stem"], int(match["count"])
    names = tuple(f"{stem}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1))
    if name not in names[:1]:
        raise ModelNotFoundError(f"{name} is a later part of a split GGUF; give {stem}-00001-of-{count:05d}.gguf")
    return names


def is_later_part(name: str) -> bool:
    """Whether this is the name of a part of a split GGUF other than the first."""
    match = _SPLIT.fullmatch(name)
    return match is not None and int(match["part"]) != 1


def read_gguf(path: Path) -> GGUFFile:
    """Reads and checks the header; blocking, no tensor is touched.

    Raises `CheckpointError` for files that are damaged, cut short or lack a part, `UnsupportedModelError` for tensor
    types and versions that cannot be read, `ModelNotFoundError` for a part other than the first, `DependencyError`
    without the `gguf` package.
    """
    parts = [path.with_name(name) for name in part_names(path.name)]
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part} is missing: all {len(parts)} parts of a split GGUF belong in one folder")
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for part in parts:
        file = _read_part(part)
        metadata = metadata or dict(file.metadata)  # later parts repeat little more than their number
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{tensor.path} holds {name!r}, which {tensors[name].path.name} holds as well")
            tensors[name] = tensor
    if metadata.get("split.count", 1) not in (0, len(parts)):
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts, and its name does not say which: the parts of a split "
            "GGUF must keep their names, …-00001-of-0000N.gguf"
        )
    if len(tensors) != metadata.get("split.tensors.count", len(tensors)):
        raise CheckpointError(
            f"{path} and its other parts hold {len(tensors)} tensors of {metadata['split.tensors.count']}"
        )
    return GGUFFile(path, metadata, tensors)


def dequantize(packed: ByteArray, type_name: str) -> NDArray[np.float32]:
    """Rows of packed bytes [rows, row_bytes] as float32 [rows, elements]."""
    gguf = _gguf()
    tensor_type = gguf.GGMLQuantizationType[type_name]
    block = _block(tensor_type)
    blocks = packed.reshape(-1, block.byte_size)
    values = np.empty((len(blocks), block.size), np.float32)
    step = _CHUNK // block.size
    for start in range(0, len(blocks), step):
        # As one long row: the package handles rows in groups of 16, which is slow where they are short.
        chunk = blocks[start : start + step].reshape(1, -1)
        values[start : start + step] = gguf.quants.dequantize(chunk, tensor_type).reshape(-1, block.size)
    return values.reshape(len(packed), -1)


@dataclass(frozen=True, slots=True)
class _Block:
    """The smallest piece of a tensor type."""

    type_name: str
    size: int = 1  # elements
    byte_size: int = 1
    readable: bool = False


@cache
def _block(type_number: int) -> _Block:
    gguf = _gguf()
    try:
        tensor_type = gguf.GGMLQuantizationType(type_number)
    except ValueError:
        return _Block(f"number {type_number}")
    size, byte_size = gguf.GGML_QUANT_SIZES[tensor_type]
    try:
        gguf.quants.dequantize(np.zeros((1, byte_size), np.uint8), tensor_type)
    except NotImplementedError:
        return _Block(tensor_type.name)
    return _Block(tensor_type.name, size, byte_size, readable=True)


def _gguf() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise DependencyError("GGUF files need the gguf package: pip install 'asyncllm[gguf]'") from error


def _read_part(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise CheckpointError(f"{path} is {size} bytes long: not a GGUF file, or one that is cut short")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(path, data))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    if cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        order = ", or of a big-endian machine" if version & 0xFFFF == 0 else ""
        raise UnsupportedModelError(f"{path} is GGUF version {version}{order}; versions 2 and 3 are supported")
    tensor_count, value_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.scalar("<I"))
    infos = [_TensorInfo.parse(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise CheckpointError(f"{path} has an impossible general.alignment, {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for info in infos:
        tensor = info.locate(path, start)
        if info.offset % alignment:
            raise CheckpointError(f"{path} is damaged: {info.name} begins at {info.offset}, which is not aligned")
        if tensor.offset + tensor.byte_size > cursor.size:
            raise CheckpointError(
                f"{path} is cut short: it has {cursor.size:,} bytes, and {info.name} ends at "
                f"{tensor.offset + tensor.byte_size:,}; copy or download it again"
            )
        if tensors.setdefault(info.name, tensor) is not tensor:
            raise CheckpointError(f"{path} holds {info.name} twice")
    return GGUFFile(path, metadata, tensors)


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """A tensor as the header describes it."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int  # from the start of the data

    @classmethod
    def parse(cls, cursor: _Cursor) -> _TensorInfo:
        name = cursor.text()
        dimensions = cursor.scalar("<I")
        if not 1 <= dimensions <= 4:
            raise CheckpointError(f"{cursor.path} is damaged: {name!r} has {dimensions} dimensions")
        shape = tuple(cursor.scalar("<Q") for _ in range(dimensions))[::-1]
        return cls(name, shape, cursor.scalar("<I"), cursor.scalar("<Q"))

    def locate(self, path: Path, start: int) -> GGUFTensor:
        block = _block(self.type_number)
        if not block.readable:
            raise UnsupportedModelError(
                f"{path}: {self.name} has tensor type {block.type_name}, which cannot be read; "
                "take another quantisation of the model, such as Q4_K_M or Q8_0"
            )
        if min(self.shape) < 1 or self.shape[-1] % block.size:
            raise CheckpointError(
                f"{path} is damaged: {self.name} has the shape {self.shape}, not made of blocks of {block.size}"
            )
        row_bytes = self.shape[-1] // block.size * block.byte_size
        return GGUFTensor(self.name, path, start + self.offset, self.shape, block.type_name, row_bytes)


class _Cursor:
    """Reads values one after the other; raises `CheckpointError` where the file ends too early."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.position = 0
        self.size = len(data)
        self._data = data

    def take(self, count: int) -> bytes:
        start, end = self.position, self.position + count
        if end > self.size:
            raise CheckpointError(f"{self.path} is cut short or damaged: its header runs past its end")
        self.position = end
        return self._data[start:end]

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        data = self.take(self.scalar("<Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} is damaged: it holds text that is not UTF-8, {data[:80]!r}") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path} is damaged: there is no value type {kind}")
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path} is damaged: it holds an array of value type {kind}")
        form = _SCALARS[kind]
        return np.frombuffer(self.take(count * struct.calcsize(form)), form).tolist()
