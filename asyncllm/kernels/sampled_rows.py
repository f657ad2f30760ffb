"""What the launches of a step's sampling have in common: whose logits they are, what is asked of them, and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.kernels.language import ceil_div, next_power_of_2

TILE = 256
"""Logits whose maximum and sum are known together. Measured on an H200, 256 rows of 151,936."""

NO_TOKEN = -1
"""In place of the token of a row none of whose logits is above -infinity; not-a-number counts as that."""

ADJUSTS, FILTERS, MASKS, COUNTS, LATE = 1, 2, 4, 8, 16
"""Duties of a row: any of these has its logits spread out. `FILTERS`: see `rare_filters`; `LATE`: see `late_logits`;
`MASKS` and `COUNTS` say what `logit_adjustment` has to look at."""


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Whose logits a step samples from: the same for all of its launches. Arrays are on the device."""

    rows: torch.Tensor  # [n] int32: the row whose settings count
    positions: torch.Tensor  # [n] int32 or int64: the absolute position of the token to be sampled
    num_rows: torch.Tensor  # [1] int32: how many of the n count
    vocabulary: int  # what lies beyond is no token


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of every row of the batch, on the device; the fields of `RowSampling` in `engine.plan`."""

    temperature: torch.Tensor  # [rows] float32; 0 is greedy
    top_k: torch.Tensor  # [rows] int32; 0 keeps all
    top_p: torch.Tensor  # [rows] float32; 1 keeps all
    min_p: torch.Tensor  # [rows] float32; 0 keeps all
    seed: torch.Tensor  # [rows] int64, the bits of an unsigned seed
    choice: torch.Tensor  # [rows] int32
    suppress_before: torch.Tensor  # [rows] int32
    num_suppressed: torch.Tensor  # [rows] int32, how many of `suppressed` count
    suppressed: torch.Tensor  # [rows, most] int32, dense

    def draw_arguments(self) -> tuple[torch.Tensor, ...]:
        """What a kernel that filters or draws takes of them, in this order."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.choice


@dataclass(frozen=True, slots=True)
class AdjustedLogits:
    """Logits of rows that do more to them than `sample` does."""

    duties: torch.Tensor  # [rows] int32: not 0 for such rows; `FILTERS`: all filters of the row have been at work
    logits: torch.Tensor  # [n, at least vocabulary] float32, dense: read in place of the model's own for rows with any


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Device memory between the launches of `sample`, for one stream. Make it with `make_sampling_workspace`."""

    maxima: torch.Tensor  # [n, tiles] float32: largest logit of a tile
    sums: torch.Tensor  # [n, tiles] float32: its sum of exp((logit - top) / temperature), in the end of kept tokens
    arrivals: torch.Tensor  # [n] int32: programs that have summed their part of a row; zeros between launches
    lists: torch.Tensor  # [n, tiles] int32: tiles that reach a threshold; of a wide row, where the list's parts end
    is_wide: torch.Tensor  # [n] int32: 1 where the filters may keep too many logits for the short list
    candidates: torch.Tensor  # [n, most] float32: logits that filters may keep
    candidate_ids: torch.Tensor  # [n, few] int32: of a short list
    reached: torch.Tensor  # [n, most] float64: of a wide row, what the list's kept tokens weigh, added up


@dataclass(frozen=True, slots=True)
class Draw:
    """What the launches have in common that draw a token for each row, the arguments of `sample`."""

    logits: torch.Tensor
    where: LogitRows
    settings: RowSettings
    workspace: SamplingWorkspace
    token_ids: torch.Tensor
    row_token_ids: torch.Tensor
    adjusted: AdjustedLogits | None

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What their kernels take first, in this order."""
        workspace, where = self.workspace, self.where
        others = self.adjusted or AdjustedLogits(where.rows, self.logits)
        return (
            self.token_ids,
            self.row_token_ids,
            workspace.is_wide,
            workspace.maxima,
            workspace.sums,
            workspace.lists,
            workspace.candidates,
            self.logits,
            others.logits,
            where.rows,
            where.positions,
            where.num_rows,
            *self.settings.draw_arguments(),
            others.duties,
        )

    def constants(self) -> dict[str, int]:
        """What their kernels are compiled for."""
        adjusted = self.logits if self.adjusted is None else self.adjusted.logits
        tiles = ceil_div(self.where.vocabulary, TILE)
        return {
            "LOGITS_STRIDE": self.logits.stride(0),
            "ADJUSTED_STRIDE": adjusted.stride(0),
            "ADJUSTED": self.adjusted is not None,
            "VOCABULARY": self.where.vocabulary,
            "TILES": tiles,
            "TILES_PAD": next_power_of_2(tiles),
            "TILE": TILE,
            "CANDIDATES": self.workspace.candidates.shape[1],
        }
