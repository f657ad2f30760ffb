"""Log-probabilities of whole rows and of prompts, by launches beside a step's own; read once it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.execution.device_scores import ranks_of, read_scores
from asyncllm.engine.execution.prompt_scores import PromptPart
from asyncllm.engine.execution.step_ring import host_words
from asyncllm.engine.execution.token_scores import join_scores, score_tokens
from asyncllm.engine.plan import Int32Array, LogprobsRequest, PromptLogprobs, StepLogprobs, TokenScores
from asyncllm.kernels.token_scores import MOST_LIKELY, ScoreRing

_POSITIONS_AT_ONCE = 64
"""Of a prompt, whose logits are there together."""

Asking = Sequence[tuple[int, LogprobsRequest]]


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which is there when the device has passed this."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor, non_blocking=True)


class WholeRows:
    """All log-probabilities of some rows."""

    def __init__(self, logits: Tensor) -> None:
        """[n, vocabulary]"""
        self._scores = _to_host(logits.float().log_softmax(-1))

    def read(self, token_ids: NDArray[np.int64], asked: Sequence[LogprobsRequest]) -> TokenScores:
        """For the tokens that are at these positions."""
        return score_tokens(self._scores, token_ids, asked)


class LikelyTokens:
    """The most likely tokens of some positions, and the one that is there, which is known."""

    def __init__(self, logits: Tensor, token_ids: Int32Array, top: int) -> None:
        self._token_ids = token_ids
        self._kept = host_words(token_ids.astype(np.int64), logits.device)
        scores = logits.float().log_softmax(-1)
        chosen = scores.gather(1, self._kept.to(logits.device, non_blocking=True)[:, None])
        self._chosen = _to_host(chosen.squeeze(1))
        self._ranks = _to_host(1 + (scores > chosen).sum(1, dtype=torch.int32))
        best = scores.topk(top, dim=1) if top else None
        self._scores = None if best is None else _to_host(best.values)
        self._ids = None if best is None else _to_host(best.indices.int())

    def read(self) -> TokenScores:
        """Of all positions."""
        parts = []
        for place, token_id in enumerate(self._token_ids.tolist()):
            scores, ids = np.zeros(0, np.float32), np.zeros(0, np.int32)
            if self._scores is not None and self._ids is not None:
                scores, ids = self._scores[place].numpy(), self._ids[place].numpy()
            parts.append(
                TokenScores(
                    np.array([0, 1 + len(ids)], np.int32),
                    np.concatenate(([token_id], ids)).astype(np.int32),
                    np.concatenate((self._chosen[place : place + 1].numpy(), scores)),
                    np.concatenate((self._ranks[place : place + 1].numpy(), ranks_of(scores))).astype(np.int32),
                )
            )
        return join_scores(parts)


def tell_prompts(
    parts: Sequence[PromptPart], features: Tensor, head: Callable[[Tensor], Tensor]
) -> list[tuple[PromptPart, list[WholeRows | LikelyTokens]]]:
    """`features` [p, hidden] of the parts' positions, of which the head makes logits."""
    told: list[tuple[PromptPart, list[WholeRows | LikelyTokens]]] = []
    at = 0
    for part in parts:
        pieces: list[WholeRows | LikelyTokens] = []
        for first in range(0, len(part.token_ids), _POSITIONS_AT_ONCE):
            ids = part.token_ids[first : first + _POSITIONS_AT_ONCE]
            logits = head(features[at + first : at + first + len(ids)])
            whole = part.asked.top > MOST_LIKELY
            pieces.append(WholeRows(logits) if whole else LikelyTokens(logits, ids, part.asked.top))
        told.append((part, pieces))
        at += len(part.token_ids)
    return told


@dataclass(slots=True)
class StepTold:
    """What some samples of a step are to be told, to be read once it is complete."""

    ring: ScoreRing | None
    turn: int
    asking: Asking
    places: NDArray[np.int64]  # of all samples: where in the ring's line each is
    logits: NDArray[np.int64]  # likewise among the logits
    whole: WholeRows | None = None  # of those in `asking` who ask for all
    prompts: list[tuple[PromptPart, list[WholeRows | LikelyTokens]]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # pinned memory that its launches read

    def on_device(self, places: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
        """These numbers on the device, for launches of this step."""
        words = host_words(np.asarray(places, np.int32), device)
        self.kept.append(words)
        return words.to(device, non_blocking=True)

    def tell_whole(self, logits: Tensor, places: Sequence[int], rows: Tensor, heat: Tensor | None) -> None:
        """Of these places of `logits` [n, vocabulary], which are of `rows` [n]. heat [rows]: over it, where not 0."""
        index = self.on_device(places, logits.device)
        some = logits.index_select(0, index).float()
        if heat is not None:
            own = heat[rows.index_select(0, index)]
            some /= torch.where(own > 0, own, 1.0)[:, None]
        self.whole = WholeRows(some)

    def whole_places(self) -> list[int]:
        """Among the logits, of those who ask for all."""
        return [int(self.logits[sample]) for sample, asked in self.asking if asked.top > MOST_LIKELY]

    def read(self, token_ids: Int32Array) -> StepLogprobs:
        """`token_ids`: of all samples."""
        found = []
        wholes = self._read_whole(token_ids)
        for sample, asked in self.asking:
            if asked.top > MOST_LIKELY:
                found.append(wholes.pop(0))
            elif self.ring is not None:
                found.append(read_scores(self.ring, self.turn, int(self.places[sample]), asked, int(token_ids[sample])))
        samples = np.array([sample for sample, _ in self.asking], np.int32)
        prompts = tuple(
            PromptLogprobs(part.chunk, part.start + 1, join_scores(_read_pieces(part, pieces)))
            for part, pieces in self.prompts
        )
        return StepLogprobs(samples, join_scores(found), prompts)

    def _read_whole(self, token_ids: Int32Array) -> list[TokenScores]:
        if self.whole is None:
            return []
        asking = [(sample, asked) for sample, asked in self.asking if asked.top > MOST_LIKELY]
        ids = token_ids[[sample for sample, _ in asking]].astype(np.int64)
        scores = self.whole.read(ids, [asked for _, asked in asking])
        return [scores.at(i) for i in range(len(asking))]


def _read_pieces(part: PromptPart, pieces: Sequence[WholeRows | LikelyTokens]) -> list[TokenScores]:
    found, first = [], 0
    for piece in pieces:
        if isinstance(piece, LikelyTokens):
            found.append(piece.read())
        else:
            ids = part.token_ids[first : first + _POSITIONS_AT_ONCE].astype(np.int64)
            found.append(piece.read(ids, [part.asked] * len(ids)))
        first += _POSITIONS_AT_ONCE
    return found
