"""Which tokens are legal, as bits: what constraints say and what samplers read."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
"""[ceil(vocabulary / 32)]: bit v % 32 of word v // 32 is set where token v is legal. Bits past the vocabulary are 0."""


def token_mask(token_ids: Collection[int], vocab_size: int) -> Mask:
    """The mask that leaves these tokens, each below `vocab_size`, and no others."""
    legal = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    legal[list(token_ids)] = True
    return np.packbits(legal, bitorder="little").view(np.uint32)
