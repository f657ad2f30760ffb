"""Weights as a quantised file holds them: small integers with a scale and a zero for each group of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Columns that share a scale and a zero."""


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """A matrix whose element (i, j) is `codes[i, j] · scales[i, g] + zeros[i, g]`, where g = j // GROUP."""

    codes: Tensor  # [rows, columns] int8, from −2^(bits − 1) to 2^(bits − 1) − 1
    scales: Tensor  # [rows, columns / GROUP] float32
    zeros: Tensor  # [rows, columns / GROUP] float32
    bits: int  # 4 or 8

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.codes.shape

    def dequantize(self) -> Tensor:
        """The matrix in float32."""
        rows, columns = self.shape
        values = self.codes.view(rows, -1, GROUP).float()
        return values.mul_(self.scales[:, :, None]).add_(self.zeros[:, :, None]).view(rows, columns)

    def take(self, rows: Tensor) -> GroupedTensor:
        """These rows, in this order."""
        return GroupedTensor(self.codes[rows], self.scales[rows], self.zeros[rows], self.bits)


def concatenate(parts: Sequence[GroupedTensor]) -> GroupedTensor:
    """The parts below each other, as wide as the widest codes among them."""
    if len(parts) == 1:
        return parts[0]
    return GroupedTensor(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.zeros for part in parts]),
        max(part.bits for part in parts),
    )
