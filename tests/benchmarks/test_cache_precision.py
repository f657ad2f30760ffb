from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncllm.testing.tiny_models import write_tiny_model
from benchmarks import cache_precision


def test_every_cache_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_precision, "PIECE", 60)
    model = write_tiny_model(tmp_path / "model")
    cache_precision.main([str(model), "--pieces", "2", "--output", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["caches"]
    assert [each["cache"] for each in found] == list(cache_precision.ROUNDINGS)
    assert [each["tokens"] for each in found] == [120] * 3
    assert 120 >= found[0]["equal"] >= found[1]["equal"] > 60


def test_a_scale_uses_the_whole_range() -> None:
    x = torch.tensor([[1e-4, 2e-4, 448e-4], [1e3, 2e3, 448e3]])
    torch.testing.assert_close(cache_precision.narrow_scaled(x), x)
    assert cache_precision.narrow(x)[1].tolist() == [448.0] * 3
