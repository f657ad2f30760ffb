"""What a row does to its logits before anything is drawn: bans, bias, and penalties for tokens that came before.

The order is bans, bias, repetition, frequency, presence. A row that asks for none of it has no adjustment at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.plan import Int32Array, RowJoin

Int64Array = NDArray[np.int64]


class TokenCounts:
    """The different tokens of a row's prompt and output, and how often its output holds each."""

    def __init__(self, history: Int32Array, prompt_tokens: int) -> None:
        self.length = len(history)  # positions that are counted: the next one is this
        prompt, output = history[:prompt_tokens], history[prompt_tokens:]
        known = np.unique(np.concatenate((prompt, output))).astype(np.int64)
        self._ids = np.zeros(max(2 * len(known), 64), np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._ids[: len(known)] = known
        self._places = {token_id: place for place, token_id in enumerate(known.tolist())}
        for token_id in output.tolist():
            self._counts[self._places[token_id]] += 1

    @property
    def ids(self) -> Int64Array:
        """The different tokens of prompt and output."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often the output holds each of `ids`."""
        return self._counts[: len(self._places)]

    def add(self, position: int, token_id: int) -> None:
        """The output has this token at this position; one that is counted is not counted again."""
        if position < self.length:
            return
        self.length = position + 1
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1


@dataclass(frozen=True, slots=True)
class LogitAdjustment:
    """What one row does to its logits."""

    illegal: Tensor | None  # bool [vocabulary]
    biased: Tensor | None  # int64 [b] ids
    biases: Tensor | None  # float32 [b]
    counts: TokenCounts | None
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, join: RowJoin, vocabulary: int) -> LogitAdjustment | None:
        """None where the row adjusts nothing."""
        sampling = join.sampling
        if not (sampling.counts_tokens or sampling.logit_bias or sampling.banned or sampling.allowed is not None):
            return None
        biased = biases = counts = None
        if sampling.logit_bias:
            biased = torch.tensor([token_id for token_id, _ in sampling.logit_bias])
            biases = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=torch.float32)
        if sampling.counts_tokens:
            counts = TokenCounts(join.known(), join.prompt_tokens)
        return cls(
            illegal=_illegal(sampling.allowed, sampling.banned, vocabulary),
            biased=biased,
            biases=biases,
            counts=counts,
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
        )

    def apply(self, logits: Tensor) -> None:
        """Adjust `logits` [vocabulary] float32 in place."""
        if self.illegal is not None:
            logits[self.illegal] = -torch.inf
        if self.biased is not None and self.biases is not None:
            logits[self.biased] += self.biases
        if self.counts is not None and len(self.counts.ids):
            ids, counts = torch.from_numpy(self.counts.ids), torch.from_numpy(self.counts.counts)
            values = logits[ids]
            values = torch.where(values > 0, values / self.repetition, values * self.repetition)
            values -= self.frequency * counts
            values -= self.presence * (counts > 0)
            logits[ids] = values


def _illegal(allowed: tuple[int, ...] | None, banned: tuple[int, ...], vocabulary: int) -> Tensor | None:
    if allowed is None and not banned:
        return None
    illegal = torch.full((vocabulary,), allowed is not None)
    if allowed is not None:
        illegal[list(allowed)] = False
    illegal[list(banned)] = True
    return illegal


def mask_logits(logits: Tensor, masks: NDArray[np.uint32]) -> None:
    """Ban what the masks [n, words] do not allow in `logits` [n, vocabulary], in place; bit v of a row is token v's."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=logits.shape[-1], bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits) == 0, -torch.inf)
