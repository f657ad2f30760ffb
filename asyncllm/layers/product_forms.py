"""In which forms a processor multiplies: settings of `cpu_product`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncllm.kernels.cpu.build import Library
from asyncllm.layers.weight_memory import WeightMemory


@dataclass(frozen=True, slots=True)
class ProductForms:
    """Which forms suit a processor, and how much memory may be spent on them."""

    library: Library | None = None  # our own kernels, which then take all matrices of bfloat16 layers that they can
    blocked: bool = False  # dense weights in oneDNN's own order of elements, read in one pass whatever the rows
    packed_rows: Mapping[int, int] = field(default_factory=dict)
    """By the bits of a code: the rows up to which the packed product is faster than the dense one; empty: never."""
    memory: WeightMemory = field(default_factory=WeightMemory)  # where packed weights go
    copies: bool = True  # packed weights get a dense copy for steps of more rows
