"""PromptReader: log-probabilities of prompt tokens, in a step that computes a part of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.execution.token_scores import join_scores, score_tokens
from asyncllm.engine.plan import Chunk, Int32Array, LogprobsRequest, PromptLogprobs

_POSITIONS_AT_ONCE = 64
"""Whose logits are there together: those of a whole chunk can be gigabytes."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What a chunk's logits tell of a prompt: those after its i-th token are about the token at start + 1 + i."""

    chunk: int  # of the step's
    start: int  # of the chunk
    token_ids: Int32Array  # of the prompt, from position start + 1 on, as far as the chunk's logits reach
    asked: LogprobsRequest


def prompt_part(index: int, chunk: Chunk, prompt: Int32Array, asked: LogprobsRequest) -> PromptPart | None:
    """None where the chunk's logits are about the output alone."""
    told = prompt[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]
    return PromptPart(index, chunk.start, told, asked) if len(told) else None


class PromptReader:
    """Of one step."""

    def __init__(self, parts: Sequence[PromptPart], chunk_firsts: NDArray[np.int64]) -> None:
        """`chunk_firsts`: where in the batch the first token of each of the step's chunks is."""
        self.parts = parts
        self.places = np.concatenate([chunk_firsts[part.chunk] + np.arange(len(part.token_ids)) for part in parts])
        """[p] of the batch's tokens, those whose logits are read."""

    def read(self, features: Tensor, head: Callable[[Tensor], Tensor]) -> tuple[PromptLogprobs, ...]:
        """`features` [p, hidden] of `places`, of which the head makes logits."""
        found, at = [], 0
        for part in self.parts:
            count = len(part.token_ids)
            pieces = [
                score_tokens(
                    head(features[at + first : at + min(first + _POSITIONS_AT_ONCE, count)]),
                    part.token_ids[first : first + _POSITIONS_AT_ONCE].astype(np.int64),
                    [part.asked] * min(_POSITIONS_AT_ONCE, count - first),
                )
                for first in range(0, count, _POSITIONS_AT_ONCE)
            ]
            found.append(PromptLogprobs(part.chunk, part.start + 1, join_scores(pieces)))
            at += count
        return tuple(found)


def extended(sampled: NDArray[np.int64], reader: PromptReader) -> Tensor:
    """The places of the tokens that sample, then the reader's."""
    return torch.from_numpy(np.concatenate((sampled, reader.places)))
