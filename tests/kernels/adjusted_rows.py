"""Rows with duties, as the host would write them, for the tests of what acts on adjusted logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncllm.kernels import logit_adjustment as adjustment
from asyncllm.kernels.sampled_rows import MASKS, LogitRows, RowSettings

VOCABULARY, WIDTH, ROWS = 300, 320, 9


@dataclass(frozen=True)
class Case:
    """One row: what its sampling settings and its adjustments are."""

    duties: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 3
    suppressed: tuple[int, ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    biases: tuple[tuple[int, float], ...] = ()
    seen: tuple[tuple[int, int], ...] = ()  # (id, how often the output has it)
    counted: int = 0
    allowed: tuple[int, ...] = ()  # where masks are a duty
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


def row_of(index: int) -> int:
    """Where case `index` is: not in order, and not from 0 on."""
    return ROWS - 1 - index


def settings_of(cases: list[Case], device: torch.device) -> RowSettings:
    def spread(name: str, dtype: torch.dtype) -> torch.Tensor:
        values = torch.zeros(ROWS, dtype=dtype)
        for i, case in enumerate(cases):
            values[row_of(i)] = getattr(case, name)
        return values.to(device)

    counts = torch.zeros(ROWS, dtype=torch.int32)
    suppressed = torch.zeros((ROWS, 4), dtype=torch.int32)
    for i, case in enumerate(cases):
        counts[row_of(i)] = len(case.suppressed)
        suppressed[row_of(i), : len(case.suppressed)] = torch.tensor(case.suppressed, dtype=torch.int32)
    return RowSettings(
        temperature=spread("temperature", torch.float32),
        top_k=spread("top_k", torch.int32),
        top_p=spread("top_p", torch.float32),
        min_p=spread("min_p", torch.float32),
        seed=spread("seed", torch.int64),
        choice=torch.zeros(ROWS, dtype=torch.int32, device=device),
        suppress_before=torch.where(counts > 0, 1000, 0).int().to(device),
        num_suppressed=counts.to(device),
        suppressed=suppressed.to(device),
    )


def records_of(cases: list[Case]) -> tuple[torch.Tensor, torch.Tensor]:
    """Records and words, as `join_adjustments` takes them."""

    def bits(*values: float) -> list[int]:
        return np.array(values, np.float32).view(np.int32).tolist()

    records, words = [], [77]  # a word that belongs to nobody
    for i, case in enumerate(cases):
        firsts = [len(words)]
        words += [token_id for token_id, _ in case.biases] + bits(*(bias for _, bias in case.biases))
        firsts.append(len(words))
        words += [token_id for token_id, _ in case.seen] + [count for _, count in case.seen]
        firsts.append(len(words))
        if case.duties & MASKS:
            legal = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
            legal[list(case.allowed)] = 1
            words += np.packbits(legal, bitorder="little").view(np.int32).tolist()
        scalars = (case.repetition, case.frequency, case.presence, case.typical_p, case.top_n_sigma)
        records.append(
            [
                row_of(i),
                case.duties,
                *bits(*scalars, case.xtc_probability, case.xtc_threshold),
                len(case.biases),
                len(case.seen),
                case.counted,
                *firsts,
                0,
            ]
        )
    return torch.tensor(records, dtype=torch.int32), torch.tensor(words, dtype=torch.int32)


def joined(cases: list[Case], device: torch.device) -> adjustment.RowAdjustments:
    state = adjustment.make_row_adjustments(ROWS, VOCABULARY, device, biases=6, seen=40)
    adjustment.join_adjustments_reference(state, *(words.to(device) for words in records_of(cases)))
    return state


def rows_of(cases: list[Case], device: torch.device) -> LogitRows:
    """One more row of logits than counts."""
    rows = [row_of(i) for i in range(len(cases))]
    return LogitRows(
        rows=torch.tensor([*rows, 0], dtype=torch.int32, device=device),
        positions=torch.tensor([*range(50, 50 + len(cases)), 0], dtype=torch.int32, device=device),
        num_rows=torch.tensor([len(cases)], dtype=torch.int32, device=device),
        vocabulary=VOCABULARY,
    )


def make_logits(count: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """[count + 1, WIDTH], with what is no token on top."""
    logits = 2.5 * torch.randn((count + 1, WIDTH), generator=torch.Generator().manual_seed(seed))
    logits[:, VOCABULARY:] = 50.0
    return logits.to(dtype).to(device)
