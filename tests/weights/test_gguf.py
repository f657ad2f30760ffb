from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

from asyncllm.config import EngineConfig
from asyncllm.errors import CheckpointError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from asyncllm.testing.tiny_models import tiny_config, tiny_weights
from asyncllm.weights.gguf import dequantize, read_gguf
from asyncllm.weights.source import resolve_source
from asyncllm.weights.tensors import iterate_tensors
from tests.weights.gguf_files import write_gguf

VALUES: dict[str, tuple[Any, GGUFValueType]] = {
    "a.uint8": (200, GGUFValueType.UINT8),
    "a.int8": (-100, GGUFValueType.INT8),
    "a.uint16": (60000, GGUFValueType.UINT16),
    "a.int16": (-30000, GGUFValueType.INT16),
    "a.uint32": (4_000_000_000, GGUFValueType.UINT32),
    "a.int32": (-2_000_000_000, GGUFValueType.INT32),
    "a.uint64": (2**63 + 1, GGUFValueType.UINT64),
    "a.int64": (-(2**62), GGUFValueType.INT64),
    "a.float32": (0.5, GGUFValueType.FLOAT32),
    "a.float64": (0.1, GGUFValueType.FLOAT64),
    "a.bool": (True, GGUFValueType.BOOL),
    "a.text": ("Ġ你好", GGUFValueType.STRING),
    "a.texts": (["a", "", "ü"], GGUFValueType.STRING),
    "a.numbers": ([1, -2, 3], GGUFValueType.INT32),
    "a.reals": ([0.25, -1.5], GGUFValueType.FLOAT32),
    "a.flags": ([True, False], GGUFValueType.BOOL),
}

# Of the types that the package reads, those it does not write.
UNWRITABLE = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
WRITABLE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_config(), tiny_weights(tiny_config()), extra=VALUES)


def random_blocks(rng: np.random.Generator, rows: int, row_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    # without bit 6 no half-precision scale is above 2, infinite or no number, wherever in a block it lies
    return rng.integers(0, 256, (rows, row_bytes), np.uint8) & np.uint8(0xBF)


def write_tensor(path: Path, data: np.ndarray[Any, Any], tensor_type: GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x.weight", data, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_value(file: Path) -> None:
    metadata = read_gguf(file).metadata
    for name, (value, _) in VALUES.items():
        assert metadata[name] == value
        assert type(metadata[name]) is type(value)


def test_agrees_with_the_packages_reader(file: Path) -> None:
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    assert dict(ours.metadata) == {
        name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")
    }
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert (found.offset, found.byte_size) == (tensor.data_offset, tensor.n_bytes)
        assert found.read().tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("name", [*WRITABLE, *UNWRITABLE])
def test_dequantises_as_the_package_does(tmp_path: Path, name: str) -> None:
    """Odd numbers of rows, and more elements than are dequantised at once."""
    tensor_type = GGMLQuantizationType[name]
    rng = np.random.default_rng(0)
    for rows, columns in ((1, 256), (3, 512), (521, 256)):
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        if name in WRITABLE:
            data = gguf.quants.quantize(rng.standard_normal((rows, columns)).astype(np.float32), tensor_type)
        else:
            data = random_blocks(rng, rows, columns // block_size * block_bytes)
        path = write_tensor(tmp_path / f"{rows}.gguf", data, tensor_type)
        tensor = read_gguf(path).tensors["x.weight"]
        assert (tensor.shape, tensor.type_name) == ((rows, columns), name)
        found = dequantize(tensor.read(), tensor.type_name)
        np.testing.assert_array_equal(found, gguf.quants.dequantize(data, tensor_type))


@pytest.mark.parametrize(("name", "levels"), [("Q4_0", 16), ("Q4_1", 15), ("Q5_0", 32), ("Q5_1", 31), ("Q8_0", 254)])
def test_dequantised_values_are_near_the_originals(tmp_path: Path, name: str, levels: int) -> None:
    values = np.random.default_rng(0).uniform(-1, 1, (64, 256)).astype(np.float32)
    data = gguf.quants.quantize(values, GGMLQuantizationType[name])
    tensor = read_gguf(write_tensor(tmp_path / "x.gguf", data, GGMLQuantizationType[name])).tensors["x.weight"]
    # half a step of a block that spans at most 2; one end of a symmetric one is clipped by up to a whole step
    assert np.abs(dequantize(tensor.read(), name) - values).max() <= 2 / levels * 1.01


def test_unreadable_type(tmp_path: Path) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType.Q8_K]
    data = np.zeros((2, 256 // block_size * block_bytes), np.uint8)
    with pytest.raises(UnsupportedModelError, match=r"x\.weight has tensor type Q8_K, .* such as Q4_K_M"):
        read_gguf(write_tensor(tmp_path / "a.gguf", data, GGMLQuantizationType.Q8_K))
    path = write_tensor(tmp_path / "b.gguf", np.zeros((2, 32), np.float32), GGMLQuantizationType.F32)
    content = path.read_bytes()
    mark = content.index(b"x.weight") + len(b"x.weight") + 4 + 2 * 8
    path.write_bytes(content[:mark] + struct.pack("<I", 999) + content[mark + 4 :])
    with pytest.raises(UnsupportedModelError, match=r"x\.weight has tensor type number 999"):
        read_gguf(path)


def test_truncated(file: Path) -> None:
    """At every 50th byte of the header, and within the data."""
    data = file.read_bytes()
    header = next(iter(read_gguf(file).tensors.values())).offset
    for length in (*range(0, header, 50), header, len(data) - 100, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            read_gguf(file)


def test_no_damage_gives_a_foreign_error(file: Path) -> None:
    data = file.read_bytes()
    header = next(iter(read_gguf(file).tensors.values())).offset
    rng = np.random.default_rng(0)
    for _ in range(400):
        damaged = bytearray(data)
        for position in rng.integers(0, header, 2):
            damaged[position] = rng.integers(0, 256)
        file.write_bytes(damaged)
        try:
            for _, tensor in iterate_tensors(resolve_source(str(file), EngineConfig())):
                tensor.sum()
        except ModelLoadError:
            pass


@pytest.mark.parametrize(
    ("head", "error", "message"),
    [
        (b"GGML" + b"\0" * 40, CheckpointError, "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 40, UnsupportedModelError, "version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 40, UnsupportedModelError, "big-endian"),
    ],
)
def test_not_a_gguf_of_ours(tmp_path: Path, head: bytes, error: type[Exception], message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head)
    with pytest.raises(error, match=message):
        read_gguf(path)


class TestSplit:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        config = tiny_config()
        write_gguf(tmp_path / "tiny.gguf", config, tiny_weights(config), split_max_tensors=8)
        return sorted(tmp_path.glob("tiny-*-of-00003.gguf"))

    def test_all_parts_are_read(self, parts: list[Path], tmp_path: Path) -> None:
        config = tiny_config()
        whole = read_gguf(write_gguf(tmp_path / "whole.gguf", config, tiny_weights(config)))
        split = read_gguf(parts[0])
        assert list(split.tensors) == list(whole.tensors)
        assert whole.metadata.items() <= split.metadata.items()
        for name, tensor in split.tensors.items():
            assert tensor.read().tobytes() == whole.tensors[name].read().tobytes()

    def test_a_missing_part(self, parts: list[Path]) -> None:
        parts[1].unlink()
        with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf is missing: all 3 parts"):
            read_gguf(parts[0])

    def test_a_part_cut_short(self, parts: list[Path]) -> None:
        parts[2].write_bytes(parts[2].read_bytes()[:-100])
        with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf is cut short"):
            read_gguf(parts[0])

    def test_a_later_part_is_no_model(self, parts: list[Path]) -> None:
        with pytest.raises(ModelNotFoundError, match="give tiny-00001-of-00003"):
            read_gguf(parts[1])

    def test_a_renamed_part(self, parts: list[Path]) -> None:
        renamed = parts[0].rename(parts[0].with_name("model.gguf"))
        with pytest.raises(CheckpointError, match="one of 3 parts, and its name does not say which"):
            read_gguf(renamed)

    def test_a_part_of_another_model(self, parts: list[Path]) -> None:
        parts[1].write_bytes(parts[2].read_bytes())
        with pytest.raises(CheckpointError, match="holds as well"):
            read_gguf(parts[0])
