from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.engine.execution import device_adjustments, device_rows
from asyncllm.engine.execution.device_rows import DeviceRows, RowSizes
from asyncllm.engine.plan import LogprobsRequest, RowJoin
from asyncllm.kernels.row_join import JOIN_SETTINGS, RECORD_WORDS
from tests.engine.execution.plan_driver import GREEDY, seeded

CPU = torch.device("cpu")


@pytest.fixture
def rows() -> DeviceRows:
    return DeviceRows(RowSizes(8, 1, 4, 100, 64, 4, torch.float32), CPU)


def test_a_record_says_how_a_row_is_sampled(rows: DeviceRows) -> None:
    joins = [RowJoin(5, 0, seeded(2**64 - 5, top_k=7, top_p=0.5, choice=3), 9), RowJoin(1, 1, GREEDY)]
    records = rows.describe(joins)
    assert records is not None
    assert records.shape == (2, RECORD_WORDS)
    assert records[:, 10].tolist() == [5, 1]
    first = dict(zip(JOIN_SETTINGS, records[0].tolist(), strict=False))
    assert (first["prompt_tokens"], first["top_k"], first["choice"], first["num_suppressed"]) == (9, 7, 3, 0)
    assert records[0, 3:4].view(np.float32)[0] == 0.5
    assert records[0, 8:10].view(np.uint64)[0] == 2**64 - 5
    nobody = rows.describe([])
    assert nobody is not None
    assert nobody.shape == (0, RECORD_WORDS)


@pytest.mark.parametrize(
    "changes",
    [
        {"suppress_before": 3, "suppressed": (4,)},
        {"logit_bias": ((1, 2.0),)},
        {"repetition_penalty": 1.1},
        {"logprobs": LogprobsRequest(1)},
        {"late": True},
    ],
)
def test_who_has_more_than_settings_is_joined_by_hand(changes: dict[str, Any], rows: DeviceRows) -> None:
    join = RowJoin(2, 1, replace(GREEDY, **changes), 1, np.zeros(1, np.int32))
    assert rows.describe([RowJoin(1, 0, GREEDY), join]) is None


def test_who_follows_such_a_one_is_too(rows: DeviceRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "join_rows", lambda *arguments: None)
    monkeypatch.setattr(device_adjustments, "join_adjustments", lambda *arguments: None)
    plain = RowJoin(2, 2, GREEDY)
    rows.join([RowJoin(2, 1, replace(GREEDY, logprobs=LogprobsRequest(1)))])
    assert rows.describe([RowJoin(3, 0, GREEDY)]) is not None
    assert rows.describe([plain]) is None
    rows.join([plain])
    assert rows.describe([plain]) is not None
