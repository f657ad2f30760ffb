from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.testing.tiny_models import write_tiny_model
from benchmarks import cpu_steps


def test_every_kind_of_step_has_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_steps, "ROUNDS", 2)
    cpu_steps.main([str(write_tiny_model(tmp_path, config={"max_position_embeddings": 1024}))])
    printed = capsys.readouterr().out
    tables = printed.split("\n## ")[1:]
    assert len(tables) == 5
    for each in tables:
        lines = each.splitlines()
        cells = [line.split(" | ") for line in lines if line.startswith("| ")][2:]  # after the header
        kinds = {row[0].removeprefix("| ") for row in cells}
        assert kinds >= {"dense products", "attention", "norms", "cache", "interpreter"}
        assert sum(float(row[3].removesuffix("% |")) for row in cells) == pytest.approx(100, abs=len(cells))
