"""What a row's logits are before the temperature, made on the host for those who look at them there.

The same order and the same numbers as on the device (`SamplingParams` has the order): bans, bias, penalties, what the
host adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncllm.engine.plan import Adjustment, Float32Array, RowBias, RowSampling


def adjusted_logits(
    logits: Float32Array, sampling: RowSampling, token_ids: Sequence[int], prompt_tokens: int, adjustment: Adjustment
) -> Float32Array:
    """A changed copy of `logits` [vocabulary], those that follow `token_ids`: the prompt and the output so far."""
    values = logits.copy()
    if adjustment.mask is not None:
        bits = np.unpackbits(adjustment.mask.view(np.uint8), count=len(values), bitorder="little")
        values[bits == 0] = -np.inf
    if sampling.suppressed and len(token_ids) < sampling.suppress_before:
        values[list(sampling.suppressed)] = -np.inf
    if sampling.allowed is not None:
        illegal = np.ones(len(values), np.bool_)
        illegal[list(sampling.allowed)] = False
        values[illegal] = -np.inf
    values[list(sampling.banned)] = -np.inf
    for token_id, bias in sampling.logit_bias:
        values[token_id] += np.float32(bias)
    if sampling.counts_tokens:
        _penalize(values, sampling, np.array(token_ids, np.int64), prompt_tokens)
    if isinstance(adjustment.bias, RowBias):
        values[adjustment.bias.token_ids] += adjustment.bias.values
    return values


def _penalize(values: Float32Array, sampling: RowSampling, token_ids: np.ndarray, prompt_tokens: int) -> None:
    ids = np.unique(token_ids)
    counts = np.zeros(len(values), np.float32)
    np.add.at(counts, token_ids[prompt_tokens:], 1)
    repetition, found = np.float32(sampling.repetition_penalty), values[ids]
    found = np.where(found > 0, found / repetition, found * repetition)
    found -= np.float32(sampling.frequency_penalty) * counts[ids]
    found -= np.float32(sampling.presence_penalty) * (counts[ids] > 0)
    values[ids] = found
