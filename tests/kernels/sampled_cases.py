"""Rows with sampling settings, drawn by the kernels and by the reference."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from asyncllm.kernels.sampled_rows import LogitRows, RowSettings

VOCABULARY, WIDTH = 1300, 1340  # some tiles, and a tail that is no token


@dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    choice: int = 0
    suppress_before: int = 0
    suppressed: tuple[int, ...] = ()


def make_settings(settings: list[Setting], rows: list[int], device: torch.device) -> RowSettings:
    """setting i in row rows[i]."""
    count = max(rows) + 1

    def spread(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        row = torch.zeros((count, *torch.tensor(values).shape[1:]), dtype=dtype)
        row[rows] = torch.tensor(values, dtype=dtype)
        return row.to(device)

    signed = [int(np.uint64(each.seed).astype(np.int64)) for each in settings]
    return RowSettings(
        temperature=spread([each.temperature for each in settings], torch.float32),
        top_k=spread([each.top_k for each in settings], torch.int32),
        top_p=spread([each.top_p for each in settings], torch.float32),
        min_p=spread([each.min_p for each in settings], torch.float32),
        seed=spread(signed, torch.int64),
        choice=spread([each.choice for each in settings], torch.int32),
        suppress_before=spread([each.suppress_before for each in settings], torch.int32),
        num_suppressed=spread([len(each.suppressed) for each in settings], torch.int32),
        suppressed=spread([[*each.suppressed, *[0] * (3 - len(each.suppressed))] for each in settings], torch.int32),
    )


def make_logits(
    count: int, dtype: torch.dtype, *, seed: int = 0, scale: float = 2.0, vocabulary: int = VOCABULARY
) -> torch.Tensor:
    """[count, a few more than the vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn((count, vocabulary + WIDTH - VOCABULARY), generator=generator)
    logits[:, vocabulary:] = 50.0  # what is no token would win
    return logits.to(dtype)


def run(
    module: ModuleType,
    logits: torch.Tensor,
    settings: list[Setting],
    positions: list[int],
    *,
    candidates: int = 4096,
    spare: int = 1,
    filters: bool = True,
) -> tuple[list[int], list[int]]:
    """Tokens of the kernels, and of the reference; `spare` rows of logits exist beyond those that count."""
    device, count, vocabulary = logits.device, len(settings), logits.shape[1] - WIDTH + VOCABULARY
    rows = [count + 2 - i for i in range(count)]
    stored = make_settings(settings, rows, device)
    workspace = module.make_sampling_workspace(count + spare, vocabulary, device, candidates)
    where = LogitRows(
        rows=torch.tensor(rows + [0] * spare, dtype=torch.int32, device=device),
        positions=torch.tensor(positions + [0] * spare, dtype=torch.int32, device=device),
        num_rows=torch.tensor([count], dtype=torch.int32, device=device),
        vocabulary=vocabulary,
    )
    expected = module.sample_reference(logits, where, stored)
    tokens = torch.full((count + spare,), -7, dtype=torch.int32, device=device)
    by_row = torch.full((len(stored.seed),), -7, dtype=torch.int32, device=device)
    module.sample(logits.clone(), where, stored, workspace, token_ids=tokens, row_token_ids=by_row, filters=filters)
    assert not workspace.arrivals.any()
    assert tokens[count:].tolist() == [-7] * spare
    assert by_row[torch.tensor(rows, device=device)].tolist() == tokens[:count].clamp(min=0).tolist()
    assert int((by_row == -7).sum()) == len(by_row) - count
    return tokens[:count].tolist(), expected.tolist()
