"""Which products our kernels take, and how: measured on a GPU, by shape and number of rows.

The tables lie in `product_tables/`, one a GPU, and are made by `python -m benchmarks.tune`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from asyncllm.kernels.gated_linear import GatedTiling
from asyncllm.kernels.skinny_linear import MOST_ROWS, Tiling, VectorTiling, default_vector_tiling

AnyTiling = Tiling | VectorTiling | GatedTiling
"""Of one row a vector's, up to `MOST_ROWS` those of `skinny_linear`, and of more, where a gate is, `gated_linear`'s."""

_FOLDER = Path(__file__).parent / "product_tables"


@dataclass(frozen=True, slots=True)
class Product:
    """A shape of W, and what is done with the product."""

    outputs: int
    inputs: int
    gated: bool = False  # W has twice as many lines: the gate's, then those of what is gated
    adds: bool = False  # to a residual

    @property
    def weight_bytes(self) -> int:
        """Of W, in 16 bits."""
        return 2 * self.outputs * self.inputs * (2 if self.gated else 1)

    @property
    def name(self) -> str:
        """How a table calls it."""
        return f"{self.outputs}x{self.inputs}{' gated' if self.gated else ''}{' added' if self.adds else ''}"


@dataclass(frozen=True, slots=True)
class ProductTable:
    """Choices by product's name; each holds up to a number of rows, in rising order, and the last one of more than
    `MOST_ROWS` rows for any that are more. No tiling: the library's."""

    choices: Mapping[str, Mapping[int, AnyTiling | None]]

    def tiling(self, product: Product, rows: int) -> AnyTiling | None:
        """How to multiply so many rows; None: by the library. Where nothing was measured, ours is for one row."""
        few, last = rows <= MOST_ROWS, None
        for most, tiling in self.choices.get(product.name, {}).items():
            # one row has a kernel of its own, and so have many
            if (most <= MOST_ROWS) != few or (rows == 1) != (most == 1):
                continue
            if rows <= most:
                return tiling
            last = tiling
        if not few:
            return last
        return default_vector_tiling(product.inputs, gated=product.gated) if rows == 1 else None

    def with_choice(self, product: Product, rows: int, tiling: AnyTiling | None) -> ProductTable:
        """The same, with another choice."""
        choices = {**self.choices.get(product.name, {}), rows: tiling}
        return ProductTable({**self.choices, product.name: dict(sorted(choices.items()))})


def table_path(device_name: str) -> Path:
    """Where the table of a GPU lies, or would."""
    return _FOLDER / f"{device_name.lower().replace(' ', '-')}.json"


@cache
def read_table(device_name: str) -> ProductTable:
    """The table of this GPU; an empty one where none was measured."""
    path = table_path(device_name)
    if not path.exists():
        return ProductTable({})
    products = json.loads(path.read_text(encoding="utf-8"))["products"]
    return ProductTable(
        {
            name: {int(rows): _tiling(int(rows), numbers) for rows, numbers in choices.items()}
            for name, choices in products.items()
        }
    )


def _tiling(rows: int, numbers: list[Any] | None) -> AnyTiling | None:
    if numbers is None:
        return None
    if rows > MOST_ROWS:
        return GatedTiling(*numbers)
    return VectorTiling(*numbers) if rows == 1 else Tiling(*numbers)


def write_table(path: Path, table: ProductTable, command: str) -> None:
    """`command` made it."""
    lines = [
        f"  {json.dumps(name)}: "
        + json.dumps({rows: None if tiling is None else astuple(tiling) for rows, tiling in choices.items()})
        for name, choices in table.choices.items()
    ]
    text = f'{{"command": {json.dumps(command)},\n "products": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    path.write_text(text, encoding="utf-8")


def device_table(device: torch.device, dtype: torch.dtype) -> ProductTable:
    """The table of a device for weights of this type; an empty one where there is none."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return ProductTable({})
    return read_table(torch.cuda.get_device_name(device))
