"""Log-probabilities on the GPU: who asks for which, and where a step leaves them.

Up to 20 most likely tokens, and any named ones, are found by kernels within the step. What is larger, whole rows and
the tokens of prompts, is left to launches by hand (`told_logits`). Memory is taken when the first row asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.execution.step_ring import host_words
from asyncllm.engine.plan import Int32Array, LogprobsRequest, RowJoin, TokenScores
from asyncllm.kernels.sampled_rows import LogitRows
from asyncllm.kernels.token_scores import (
    MOST_LIKELY,
    ScoreRequests,
    ScoreRing,
    ScoreWorkspace,
    make_score_workspace,
    score_most_likely,
    score_named,
)

_NAMED = 15
"""Named ids that a row has room for at first. With the drawn token's, a multiple of 16 bytes: see `StepProgram`."""


@dataclass(frozen=True, slots=True)
class StepScorer:
    """The launches of one step. The same logits go to both; heat [rows]: see `kernels/token_scores.py`."""

    requests: ScoreRequests
    workspace: ScoreWorkspace
    ring: ScoreRing
    turn: Tensor  # [1] the line of the ring
    where: LogitRows

    def score_most_likely(self, logits: Tensor, heat: Tensor | None) -> None:
        """Before the draw."""
        score_most_likely(
            logits, self.where, self.requests, self.workspace, self.ring, turn=self.turn, temperature=heat
        )

    def score_named(self, logits: Tensor, heat: Tensor | None, token_ids: Tensor) -> None:
        """After it."""
        score_named(
            logits, self.where, self.requests, self.workspace, self.ring, token_ids, turn=self.turn, temperature=heat
        )


class DeviceScores:
    """Of all rows. Tensors' addresses stay, so that CUDA graphs can hold them; but see `join`."""

    def __init__(self, num_rows: int, vocabulary: int, steps: int, device: torch.device) -> None:
        """`steps`: lines of the step ring."""
        self._num_rows = num_rows
        self._vocabulary = vocabulary
        self._steps = steps
        self._device = device
        self._asked: dict[int, LogprobsRequest] = {}  # by row
        self.requests: ScoreRequests | None = None
        self.ring: ScoreRing | None = None
        self.late_ring: ScoreRing | None = None  # for late samples
        self.workspace: ScoreWorkspace | None = None

    def is_concerned(self, join: RowJoin) -> bool:
        """Whether `join` has anything to do for it: it asks for some, or who had the row did."""
        return join.sampling.logprobs is not None or join.row in self._asked

    def join(self, joins: Sequence[RowJoin]) -> tuple[Tensor, ...]:
        """Requests take rows. Keep what is returned until the device has passed this.

        Where there is no room for a row's named ids, `requests` and `ring` are other objects then.
        """
        kept: list[Tensor] = []
        for join in joins:
            asked = join.sampling.logprobs
            if asked is None:
                if self._asked.pop(join.row, None) is not None:
                    kept.append(self._tell(join.row, np.zeros(2, np.int32)))
                continue
            self._asked[join.row] = asked
            self._make_room(len(asked.token_ids))
            top = asked.top if asked.top <= MOST_LIKELY else 0  # whole rows are told otherwise
            kept.append(self._tell(join.row, np.array([1 + top, len(asked.token_ids), *asked.token_ids], np.int32)))
        return tuple(kept)

    def asking(self, rows: Int32Array) -> Sequence[tuple[int, LogprobsRequest]]:
        """(index among these rows, what it asks for) of those that do."""
        if not self._asked:
            return ()
        return [(index, self._asked[row]) for index, row in enumerate(rows.tolist()) if row in self._asked]

    def scorer(self, ring: ScoreRing, turn: Tensor, where: LogitRows) -> StepScorer | None:
        """For the step whose turn it is, to a line of this ring. None while no row has asked."""
        if self.requests is None or self.workspace is None:
            return None
        return StepScorer(self.requests, self.workspace, ring, turn, where)

    def _tell(self, row: int, words: Int32Array) -> Tensor:
        assert self.requests is not None
        told = host_words(words, self._device)
        self.requests.tops[row : row + 1].copy_(told[:1], non_blocking=True)
        self.requests.num_named[row : row + 1].copy_(told[1:2], non_blocking=True)
        if len(words) > 2:
            self.requests.named[row, : len(words) - 2].copy_(told[2:], non_blocking=True)
        return told

    def _make_room(self, named: int) -> None:
        before = self.requests
        if before is not None and named <= before.named.shape[1]:
            return
        room = max(_NAMED, 2 * named | 3)
        self.requests = ScoreRequests(
            tops=torch.zeros(self._num_rows, dtype=torch.int32, device=self._device),
            num_named=torch.zeros(self._num_rows, dtype=torch.int32, device=self._device),
            named=torch.zeros((self._num_rows, room), dtype=torch.int32, device=self._device),
        )
        if before is not None:
            self.requests.tops.copy_(before.tops)
            self.requests.num_named.copy_(before.num_named)
            self.requests.named[:, : before.named.shape[1]].copy_(before.named)
        self.ring, self.late_ring = self._make_ring(room), self._make_ring(room)
        if self.workspace is None:
            self.workspace = make_score_workspace(self._num_rows, self._vocabulary, self._device)

    def _make_ring(self, room: int) -> ScoreRing:
        shape = (self._steps, self._num_rows)
        return ScoreRing(
            top_ids=host_words(np.zeros((*shape, MOST_LIKELY), np.int32), self._device),
            top_scores=host_words(np.zeros((*shape, MOST_LIKELY), np.float32), self._device),
            named_scores=host_words(np.zeros((*shape, 1 + room), np.float32), self._device),
            named_ranks=host_words(np.zeros((*shape, 1 + room), np.int32), self._device),
        )


def read_scores(ring: ScoreRing, turn: int, place: int, asked: LogprobsRequest, token_id: int) -> TokenScores:
    """What a complete step has found for a sample."""
    ids = ring.top_ids[turn, place, : asked.top].numpy()
    scores = ring.top_scores[turn, place, : asked.top].numpy()
    there = scores > -np.inf
    named = ring.named_scores[turn, place, : 1 + len(asked.token_ids)].numpy()
    ranks = ring.named_ranks[turn, place, : 1 + len(asked.token_ids)].numpy()
    return TokenScores(
        np.array([0, len(named) + there.sum()], np.int32),
        np.concatenate(([token_id], ids[there], asked.token_ids)).astype(np.int32),
        np.concatenate((named[:1], scores[there], named[1:])),
        np.concatenate((ranks[:1], ranks_of(scores[there]), ranks[1:])).astype(np.int32),
    )


def ranks_of(scores: np.ndarray[tuple[int], np.dtype[np.float32]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Of scores from the best one on, without a gap: 1 for the first, equal ones share a rank."""
    ranks: np.ndarray[tuple[int], np.dtype[np.int64]] = 1 + np.searchsorted(-scores, -scores, side="left")
    return ranks
