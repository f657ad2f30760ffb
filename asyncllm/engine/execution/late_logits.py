"""What the host says about late rows, written into their logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.plan import LateSamples, RowBias, RowLogits


def adjust_logits(logits: Tensor, late: LateSamples) -> None:
    """Change `logits` [late rows, vocabulary] float32 in place."""
    if late.masks is not None:
        bits = np.unpackbits(late.masks.view(np.uint8), axis=-1, bitorder="little")[:, : logits.shape[-1]]
        logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)
    for row, bias in zip(logits, late.biases, strict=True):
        if isinstance(bias, RowBias):
            row.index_add_(0, torch.from_numpy(bias.token_ids.astype(np.int64)), torch.from_numpy(bias.values))
        elif isinstance(bias, RowLogits):
            row.copy_(torch.from_numpy(bias.values))
