from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from asyncllm.kernels.gated_linear import GatedTiling
from asyncllm.kernels.skinny_linear import MOST_ROWS, Tiling, VectorTiling
from asyncllm.layers import product_table
from asyncllm.layers.product_table import Product, ProductTable, device_table, read_table, table_path, write_table

PRODUCT = Product(512, 256, gated=True)
FEW, MANY, ONE = Tiling(64, 128, 4, 3), Tiling(128, 64, 8, 4, 2), VectorTiling(4, 8, 2)


@pytest.fixture
def table() -> ProductTable:
    table = ProductTable({})
    for rows, tiling in ((64, MANY), (16, FEW), (1, ONE), (128, None)):
        table = table.with_choice(PRODUCT, rows, tiling)
    return table


def test_rows_take_the_choice_of_the_next_larger_number(table: ProductTable) -> None:
    chosen = {rows: table.tiling(PRODUCT, rows) for rows in (1, 2, 16, 17, 64, 65, 128, 129, MOST_ROWS, MOST_ROWS + 1)}
    assert chosen == {1: ONE, 2: FEW, 16: FEW, 17: MANY, 64: MANY, 65: None, 128: None, 129: None, 256: None, 257: None}


def test_many_rows_have_choices_of_their_own(table: ProductTable) -> None:
    """The last of them holds for all that are more."""
    two, three = GatedTiling(2), GatedTiling(3)
    for rows, tiling in ((8192, three), (512, None), (2048, two)):
        table = table.with_choice(PRODUCT, rows, tiling)
    chosen = {rows: table.tiling(PRODUCT, rows) for rows in (MOST_ROWS, 257, 512, 513, 2048, 2049, 8192, 100_000)}
    assert chosen == {256: None, 257: None, 512: None, 513: two, 2048: two, 2049: three, 8192: three, 100_000: three}


def test_unmeasured_product_is_ours_for_one_row_only(table: ProductTable) -> None:
    other = Product(512, 256)
    assert isinstance(table.tiling(other, 1), VectorTiling)
    assert table.tiling(other, 2) is None
    assert table.tiling(other, 2000) is None


def test_table_survives_its_file(table: ProductTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_table, "_FOLDER", tmp_path)
    table = table.with_choice(PRODUCT, 4096, GatedTiling(3))
    write_table(table_path("Some GPU"), table, "a command")
    assert table_path("Some GPU").name == "some-gpu.json"
    assert read_table.__wrapped__("Some GPU") == table
    assert read_table.__wrapped__("Another") == ProductTable({})


def test_devices_without_a_table() -> None:
    assert device_table(torch.device("cpu"), torch.bfloat16) == ProductTable({})
    assert device_table(torch.device("meta"), torch.bfloat16) == ProductTable({})


def test_shipped_tables_are_whole() -> None:
    paths = list(product_table._FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        for choices in read_table(path.stem.replace("-", " ")).choices.values():
            assert list(choices) == sorted(choices)
            for rows, tiling in choices.items():
                if tiling is not None:
                    kind = VectorTiling if rows == 1 else Tiling if rows <= MOST_ROWS else GatedTiling
                    assert isinstance(tiling, kind)
                    assert all(isinstance(each, int) for each in astuple(tiling))
                if isinstance(tiling, Tiling):
                    assert all(each > 0 for each in astuple(tiling)[:-1])
                    assert tiling.rows <= MOST_ROWS
                    assert not tiling.specialized or tiling.lines in (64, 128)
                elif isinstance(tiling, GatedTiling):
                    assert tiling.groups in (2, 3)
                elif tiling is not None:
                    assert all(each > 0 for each in astuple(tiling)[:-1])
                    assert 0 <= tiling.carve_out <= 100
