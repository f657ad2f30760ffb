"""Every parameter that transformers has a processor for does what that does, alone and one after another.

Its other processors have no parameter here: epsilon and eta cutoffs, top_h, no_repeat_ngram_size, exponential decay,
forced ids, and what concerns encoders, guidance, watermarks and audio. What it has none of (presence, frequency, dry,
xtc, top_n_sigma) is compared with its own definition elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from asyncllm.engine.execution.logit_adjustment import LogitAdjustment
from asyncllm.engine.execution.sampler import SampledRows, adjust, has_rare_filter, processed
from asyncllm.engine.plan import Adjustment, RowJoin, RowSampling
from asyncllm.engine.row_logits import adjusted_logits
from asyncllm.outputs.bad_words import BadSequences

VOCABULARY = 120
PROMPT = [7, 7, 31, 90, 2]
OUTPUT = [31, 4, 90, 90]
HISTORY = PROMPT + OUTPUT


def ours(logits: torch.Tensor, *, history: Sequence[int] = HISTORY, **fields: Any) -> torch.Tensor:
    """What is drawn from, [vocabulary]: adjusted, over the temperature, filtered; the largest is 0."""
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    sampling = RowSampling(**{**plain, **fields})
    join = RowJoin(0, 0, sampling, len(PROMPT), np.array(history, np.int32))
    adjustment = LogitAdjustment.of(join, VOCABULARY)
    suppresses = len(history) < sampling.suppress_before
    rows = SampledRows(
        temperature=np.array([sampling.temperature], np.float32),
        top_k=np.array([sampling.top_k], np.int64),
        top_p=np.array([sampling.top_p], np.float32),
        min_p=np.array([sampling.min_p], np.float32),
        seed=np.zeros(1, np.uint64),
        choice=np.zeros(1, np.int64),
        position=np.array([len(history)], np.int64),
        suppressed=[(0, np.array(sampling.suppressed, np.int64))] if suppresses else [],
        adjustments=[] if adjustment is None else [(0, adjustment)],
        rare=[(0, sampling)] if has_rare_filter(sampling) else [],
    )
    batch = logits[None].clone()
    adjust(batch, rows)
    on_host = adjusted_logits(logits.numpy(), sampling, history, len(PROMPT), Adjustment())
    torch.testing.assert_close(batch[0], torch.from_numpy(on_host), rtol=1e-6, atol=1e-6)
    return processed(batch, rows, np.zeros(1, np.int64))[0]


def check(mine: torch.Tensor, expected: torch.Tensor) -> None:
    """The same tokens are left, with the same probabilities."""
    assert torch.equal(mine > -torch.inf, expected > -torch.inf)
    torch.testing.assert_close(mine.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


def spread(seed: int) -> torch.Tensor:
    return 2.5 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "temperature": ({"temperature": 0.6}, theirs.TemperatureLogitsWarper(0.6)),
    "top_k": ({"top_k": 9}, theirs.TopKLogitsWarper(9)),
    "top_p": ({"top_p": 0.85}, theirs.TopPLogitsWarper(0.85)),
    "min_p": ({"min_p": 0.04}, theirs.MinPLogitsWarper(0.04)),
    "typical_p": ({"typical_p": 0.7}, theirs.TypicalLogitsWarper(0.7)),
    "repetition_penalty": ({"repetition_penalty": 1.4}, theirs.RepetitionPenaltyLogitsProcessor(1.4)),
    "repetition_penalty below 1": ({"repetition_penalty": 0.7}, theirs.RepetitionPenaltyLogitsProcessor(0.7)),
    "bad_words of one token": ({"banned": (4, 9)}, theirs.NoBadWordsLogitsProcessor([[4], [9]])),
    "banned": ({"banned": (4, 9)}, theirs.SuppressTokensLogitsProcessor([4, 9])),
    "logit_bias": (
        {"logit_bias": ((3, 2.5), (40, -99.0))},
        theirs.SequenceBiasLogitsProcessor([[[3], 2.5], [[40], -99.0]]),
    ),
    "allowed_token_ids": (
        {"allowed": (2, 30, 31)},
        theirs.PrefixConstrainedLogitsProcessor(lambda batch, ids: [2, 30, 31], num_beams=1),
    ),
    "min_tokens, not yet": (
        {"suppress_before": len(PROMPT) + 5, "suppressed": (0, 2)},
        theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, eos_token_id=[0, 2]),
    ),
    "min_tokens, by now": (
        {"suppress_before": len(PROMPT) + 4, "suppressed": (0, 2)},
        theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, eos_token_id=[0, 2]),
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_a_parameter_does_what_its_processor_does(name: str, seed: int) -> None:
    fields, processor = CASES[name]
    logits = spread(seed)
    check(ours(logits, **fields), processor(torch.tensor([HISTORY]), logits[None].clone())[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=10),
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4), min_size=1, max_size=4, unique_by=tuple),
)
def test_words_of_several_tokens(output: list[int], words: list[list[int]]) -> None:
    """Where the prompt is no part of it: transformers looks into that too."""
    expected = theirs.NoBadWordsLogitsProcessor(words)(torch.tensor([output]), torch.zeros((1, 6)))[0]
    assert BadSequences(words).banned(output) == set(torch.nonzero(expected == -torch.inf).flatten().tolist())


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0, 5, 40]),
    st.sampled_from([1.0, 0.9, 0.55]),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from([1.0, 1.3]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_one_after_another(  # noqa: PLR0917  what hypothesis draws
    temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, bans: bool, seed: int
) -> None:
    """In the order in which `generate` puts them, as far as that is ours too: its typical_p comes last."""
    chain = theirs.LogitsProcessorList()
    fields: dict[str, Any] = {}
    if penalty != 1:
        chain.append(theirs.RepetitionPenaltyLogitsProcessor(penalty))
    if bans:
        fields = {"banned": (31, 5), "suppress_before": 99, "suppressed": (2,)}
        chain.append(theirs.NoBadWordsLogitsProcessor([[31], [5]]))
        chain.append(theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 94, eos_token_id=[2]))
    chain.append(theirs.TemperatureLogitsWarper(temperature))
    if top_k:
        chain.append(theirs.TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(theirs.TopPLogitsWarper(top_p))
    if min_p:
        chain.append(theirs.MinPLogitsWarper(min_p))
    logits = spread(seed)
    fields |= {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": penalty,
    }
    check(ours(logits, **fields), chain(torch.tensor([HISTORY]), logits[None].clone())[0])
