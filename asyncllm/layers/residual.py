"""The stream that the layers of a model add to."""

from __future__ import annotations

from torch import Tensor


class Residual:
    """[n, hidden]: what the embedding and the layers so far add up to. A layer reads it through a norm.

    What was added last may still be in parts, each the sum over some of a product's columns. The norm that reads the
    stream next adds them up on its way, which spares a kernel.
    """

    __slots__ = ("parts", "values")

    def __init__(self, values: Tensor) -> None:
        """`values` [n, hidden] may be overwritten."""
        self.values = values
        self.parts: Tensor | None = None  # [any number, n, hidden] float32

    def settle(self) -> Tensor:
        """`values`, when everything is in them."""
        if self.parts is not None:
            self.values = (self.values.float() + self.parts.sum(0)).to(self.values.dtype)
            self.parts = None
        return self.values
