"""What the shadow device samples: a function of the row's token history, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from asyncllm.engine.plan import Adjustment, Float32Array, RowBias, RowLogits, RowSampling
from asyncllm.outputs.token_mask import token_mask

_MASK = 2**63 - 1


def extend_history(history: int, token_id: int) -> int:
    """The hash of a token history with one more token. The empty history is 0."""
    mixed = (history ^ (token_id + 1)) * 0x9E3779B97F4A7C15 & _MASK
    return (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 & _MASK


def shadow_token(history: int, position: int, sampling: RowSampling, vocab_size: int) -> int:
    """The token that follows a history whose length is `position`.

    As for a real model it depends on the history alone when greedy, else also on (seed, choice, position); a
    suppressed id gives way to the next one.
    """
    draw = history
    if sampling.temperature > 0:
        for part in (sampling.seed, sampling.choice, position):
            draw = extend_history(draw, part)
    token_id = (draw >> 17) % vocab_size
    if position < sampling.suppress_before:
        while token_id in sampling.suppressed:
            token_id = (token_id + 1) % vocab_size
    return token_id


def shadow_logits(history: int, position: int, sampling: RowSampling, vocab_size: int) -> Float32Array:
    """[vocab_size] The token of `shadow_token` is the most likely one; each next one is less likely, round the end."""
    token_id = shadow_token(history, position, sampling, vocab_size)
    logits = -((np.arange(vocab_size) - token_id) % vocab_size).astype(np.float32)
    if position < sampling.suppress_before:
        logits[list(sampling.suppressed)] = -np.inf
    return logits


def late_token(logits: Float32Array, adjustment: Adjustment) -> int:
    """What a late row samples from these logits. They are changed."""
    if isinstance(adjustment.bias, RowLogits):
        return int(adjustment.bias.values.argmax())
    if adjustment.mask is not None:
        bits = np.unpackbits(adjustment.mask.view(np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf
    if isinstance(adjustment.bias, RowBias):
        logits[adjustment.bias.token_ids] += adjustment.bias.values
    return int(logits.argmax())


Word = Adjustment | tuple[int, ...]
"""What the host says of a late request's next token: how it is sampled, or which ones come next."""


def hash_tokens(token_ids: Iterable[int]) -> int:
    """The hash of a whole token history."""
    history = 0
    for token_id in token_ids:
        history = extend_history(history, int(token_id))
    return history


def arbitrary_word(history: int, vocab_size: int) -> Word:
    """What a host might say after this history, the same each time: often a mask, at times forced tokens or a ban."""
    draw = extend_history(history, 0)
    if draw % 5 == 0:
        return tuple((draw >> shift) % vocab_size for shift in range(8, 12 + draw % 3 * 4, 4))
    if draw % 5 == 1:
        return Adjustment()
    legal = {(draw >> shift) % vocab_size for shift in range(8, 24, 4)}
    mask = token_mask(legal, vocab_size)
    if draw % 5 == 2:
        return Adjustment(mask)
    ban = RowBias(np.array([max(legal)], np.int32), np.array([-np.inf], np.float32))
    return Adjustment(mask if len(legal) > 1 else None, ban)


def reference_output(
    prompt: Sequence[int],
    sampling: RowSampling,
    vocab_size: int,
    length: int,
    host: Callable[[Sequence[int]], Word] | None = None,
) -> list[int]:
    """The first `length` tokens after a prompt, computed without cache, batch or scheduler.

    `host`, for a late request, is given the output so far.
    """
    history = hash_tokens(prompt)
    output: list[int] = []
    while len(output) < length:
        position = len(prompt) + len(output)
        if host is None:
            tokens: tuple[int, ...] = (shadow_token(history, position, sampling, vocab_size),)
        else:
            word = host(output)
            if isinstance(word, Adjustment):
                tokens = (late_token(shadow_logits(history, position, sampling, vocab_size), word),)
            else:
                tokens = word
        for token_id in tokens:
            output.append(token_id)
            history = extend_history(history, token_id)
    return output[:length]
