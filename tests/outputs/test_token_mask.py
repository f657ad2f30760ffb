from __future__ import annotations

import numpy as np
import pytest

from asyncllm.outputs.token_mask import token_mask


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_token_is_legal_where_its_bit_is_set(vocab_size: int, share: float) -> None:
    legal = np.flatnonzero(np.random.default_rng(0).random(vocab_size) < share).tolist()
    mask = token_mask(legal, vocab_size)
    assert (mask.shape, mask.dtype) == ((-(-vocab_size // 32),), np.uint32)
    found = [i for i in range(32 * len(mask)) if int(mask[i // 32]) >> i % 32 & 1]
    assert found == legal
