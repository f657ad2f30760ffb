"""The host's logits are those that the device samples from, where both apply the same settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.sampler import adjust
from asyncllm.engine.plan import Adjustment, RowBias, RowJoin, RowSampling
from asyncllm.engine.row_logits import adjusted_logits

VOCAB_SIZE, PROMPT = 100, 12


def sampling(**changes: object) -> RowSampling:
    return RowSampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, **changes)  # type: ignore[arg-type]


CASES = {
    "nothing": sampling(),
    "early": sampling(suppress_before=40, suppressed=(3, 4)),
    "not early": sampling(suppress_before=20, suppressed=(3, 4)),
    "lists": sampling(allowed=tuple(range(5, 90)), banned=(6, 7)),
    "bias": sampling(logit_bias=((1, -3.5), (50, 7.25))),
    "penalties": sampling(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4),
    "all": sampling(
        suppress_before=40,
        suppressed=(3,),
        banned=(9,),
        logit_bias=((1, -3.5),),
        repetition_penalty=0.8,
        frequency_penalty=-0.2,
        presence_penalty=1.5,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("has_word", [False, True])
def test_equal(name: str, has_word: bool) -> None:
    rng = np.random.default_rng(0)
    settings, logits = CASES[name], rng.normal(0, 4, VOCAB_SIZE).astype(np.float32)
    history = rng.integers(0, VOCAB_SIZE, 30).astype(np.int32)
    adjustment = Adjustment()
    if has_word:
        mask = rng.integers(0, 2**32, 4, dtype=np.uint32)
        adjustment = Adjustment(mask, RowBias(np.array([8, 20], np.int32), np.array([-np.inf, 2.5], np.float32)))
    rows = RowState(1, 1, 1, VOCAB_SIZE)
    rows.join(RowJoin(0, 0, settings, PROMPT, history))
    where = np.zeros(1, np.int64)
    on_device = replace(
        rows.sampling(where, np.array([30])),
        masks=None if adjustment.mask is None else adjustment.mask[None],
        biases=[] if adjustment.bias is None else [(0, adjustment.bias)],
    )
    expected = torch.from_numpy(logits.copy())[None]
    adjust(expected, on_device)
    found = adjusted_logits(logits, settings, history.tolist(), PROMPT, adjustment)
    np.testing.assert_allclose(found, expected[0].numpy(), rtol=1e-6)
