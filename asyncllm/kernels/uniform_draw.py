"""Draws that depend on a request's seed, its choice and the token's position alone.

A draw is u = ((w >> 8) + ½) · 2⁻²⁴ in float32, w the first word of Philox4x32-10 (Salmon et al., 2011) with the seed as
key and (position low, position high, choice, stream) as counter. The token's own draw is that of stream 0.
"""

from __future__ import annotations

from asyncllm.kernels.language import jit, tl


@jit
def uniform_draw(seed: tl.tensor, position: tl.tensor, choice: tl.tensor, STREAM: tl.constexpr) -> tl.tensor:
    """A number in (0, 1] from Philox4x32-10, as float64. Each stream has numbers of its own."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, low, high, choice.to(tl.uint32), tl.zeros_like(low) + STREAM)
    return (((word >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08).to(tl.float64)


def philox4x32(seed: int, position: int, choice: int, stream: int = 0) -> tuple[int, ...]:
    """The four words of Philox4x32-10 for a draw."""
    mask = 0xFFFFFFFF
    counter = [position & mask, position >> 32, choice, stream]
    key = [seed & mask, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 32) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return tuple(counter)
