"""Of which sizes steps have graphs, and what a graph must be worth before it is captured."""

from __future__ import annotations

GRAPH_TOKENS = 8192
"""Larger steps are launched by hand: they take the device longer than the host."""

_CAPTURE_BYTES = 1 << 46
"""Bytes of weights, times tokens, that cost about as much as a capture. One keeps the engine's thread for 60 to 100 ms
on an H200, where a token of a model of 8 billion parameters takes 20 µs."""


def graph_sizes(max_tokens: int) -> list[int]:
    """The numbers of tokens that steps are filled up to: by an eighth at most, where that costs time."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    limit = min(max_tokens, GRAPH_TOKENS)
    while sizes[-1] < limit:
        sizes += [sizes[-1] * eighths // 8 for eighths in range(9, 17)]
    return [*(size for size in sizes if size < limit), limit]


def first_graph_sizes(max_tokens: int, *, chunks: bool) -> list[int]:
    """Those that get a graph at the start, the largest first: all where steps only decode, else so many that steps of
    any other size need not wait for theirs."""
    sizes = graph_sizes(max_tokens)
    if not chunks:
        return sizes[::-1]
    powers = [1 << i for i in range(4, GRAPH_TOKENS.bit_length())]
    halves = [3 * power for power in powers if power >= 128]
    return sorted({sizes[-1], *({*powers, *halves} & {*sizes})}, reverse=True)


def padding_before_capture(weight_bytes: int) -> int:
    """Tokens by which larger graphs fill up the steps of one size, in all, before it is worth a graph of its own."""
    return max(1, _CAPTURE_BYTES // max(1, weight_bytes))
