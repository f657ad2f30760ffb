"""Thresholds on float32 numbers, found without sorting: by trying several at a time over their bits."""

from __future__ import annotations

from asyncllm.kernels.language import jit, tl


@jit
def order_of(x: tl.tensor) -> tl.tensor:
    """Integers in the order of float32 numbers (and the other way: it is its own inverse)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def number_of(order: tl.tensor) -> tl.tensor:
    """The number of such an integer."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def largest_threshold(
    x: tl.tensor,
    measure: tl.tensor,
    above: tl.tensor,
    need: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """The largest threshold t in [lowest, highest] with above + sum of measure[x >= t] >= need, or lowest.

    Each turn tries WAYS thresholds between those that still stand.
    """
    orders = order_of(x)
    low = order_of(lowest).to(tl.int64)
    high = order_of(highest).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        marks = low + step * (1 + tl.arange(0, WAYS))
        sums = tl.sum(tl.where(orders[None, :] >= marks.to(tl.int32)[:, None], measure[None, :], 0.0), axis=1)
        passed = tl.sum(((above + sums >= need) & (marks < high)).to(tl.int64), axis=0)
        high = tl.minimum(high, low + step * (passed + 1))
        low += step * passed
    return number_of(low.to(tl.int32))
