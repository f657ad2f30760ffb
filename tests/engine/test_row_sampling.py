"""From parameters to a row's settings, and what is refused on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from asyncllm import SamplingParams
from asyncllm.engine.execution.runner import ModelFacts, Runner
from asyncllm.engine.model import ServedModel
from asyncllm.engine.plan import CacheGroup, LogprobsRequest
from asyncllm.engine.row_sampling import BadWords, SamplingResolver
from asyncllm.errors import InvalidParamsError
from asyncllm.inputs.tokenizer import Tokenizer

SIZE = 100


@dataclass
class Words:
    """A tokenizer of words: each is an id, and another one after a space; a hyphen makes two of it."""

    known = ("cat", "dog", "-", " cat", " dog")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        parts = text.replace("-", "\0-\0").split("\0")
        return [self.known.index(part) for part in parts]


def resolver(*, tokenizer: object | None = None, defaults: dict[str, Any] | None = None) -> SamplingResolver:
    facts = ModelFacts(
        vocab_size=SIZE,
        max_model_len=64,
        block_size=16,
        num_blocks=8,
        groups=(CacheGroup(),),
        max_num_seqs=4,
        max_batched_tokens=64,
        memory_bytes={},
        dtype="float32",
        device="cpu",
    )
    model = ServedModel(
        cast(Runner, None), facts, tokenizer=cast("Tokenizer | None", tokenizer), sampling_defaults=defaults or {}
    )
    return SamplingResolver(model)


def test_defaults() -> None:
    row = resolver(defaults={"repetition_penalty": 1.1, "top_k": 4}).resolve(SamplingParams(seed=-1, top_k=0)).sampling
    assert (row.temperature, row.top_k, row.repetition_penalty, row.typical_p) == (1.0, 0, 1.1, 1.0)
    assert row.seed == 2**64 - 1
    assert row.logprobs is None
    assert row.prompt_logprobs is None
    assert row.counts_tokens
    assert not resolver().resolve(SamplingParams()).sampling.needs_history


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 0.0])
def test_every_temperature_has_an_inverse(temperature: float) -> None:
    resolved = resolver().resolve(SamplingParams(temperature=temperature)).sampling.temperature
    assert (resolved == 0.0) == (temperature == 0.0)
    if resolved:
        assert np.isfinite(np.float32(2.0) / np.float32(resolved))


def test_equal_parameters_are_resolved_once_and_each_request_has_what_is_its_own() -> None:
    shared = resolver()
    params, equal = (SamplingParams(min_tokens=2, stop_token_ids=[3]) for _ in range(2))
    resolved = shared.resolve(params)
    assert shared.resolve(equal) is resolved
    assert shared.resolve(SamplingParams(min_tokens=2, stop_token_ids=[4])).stop_ids == {4}
    one, other = resolved.sampling_for(params, 5), resolved.sampling_for(equal, 9)
    assert (one.suppressed, one.suppress_before, other.suppress_before) == ((3,), 7, 11)
    assert one.seed != other.seed
    seeded = SamplingParams(seed=5)
    assert [shared.resolve(seeded).sampling_for(seeded, n).seed for n in (5, 9)] == [5, 5]
    long = [SamplingParams(allowed_token_ids=[1, 2]) for _ in range(2)]
    assert shared.resolve(long[0]) is not shared.resolve(long[1])


def test_log_probabilities() -> None:
    def asked(**fields: Any) -> tuple[LogprobsRequest | None, LogprobsRequest | None]:
        row = resolver().resolve(SamplingParams(**fields)).sampling
        return row.logprobs, row.prompt_logprobs

    assert asked(logprobs=0) == (LogprobsRequest(0), None)
    assert asked(logprobs="all", prompt_logprobs=0) == (LogprobsRequest(SIZE), LogprobsRequest(0))
    assert asked(logprob_token_ids=[4, 2]) == (LogprobsRequest(0, (4, 2)), None)
    assert asked(logprobs=3, logprob_token_ids=[4]) == (LogprobsRequest(3, (4,)), None)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {SIZE: 5}},
        {"stop_token_ids": [10**6], "min_tokens": 1},
        {"allowed_token_ids": [3, SIZE]},
        {"logprob_token_ids": [2**31 - 1]},
        {"bad_words": ["cat"]},
    ],
    ids=str,
)
def test_g15_what_the_model_does_not_have_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParamsError, match=next(iter(fields))):
        resolver().resolve(SamplingParams(**fields))


def test_bad_words_in_both_spellings() -> None:
    words = resolver(tokenizer=Words()).resolve(SamplingParams(bad_words=["cat", " dog", "cat-dog"])).bad_words
    assert words == BadWords((0, 3, 4), ((0, 2, 1), (3, 2, 1)))  # " dog" is not "dog"
    assert resolver(tokenizer=Words()).resolve(SamplingParams()).bad_words == BadWords((), ())


@pytest.mark.parametrize(
    ("fields", "banned", "named"),
    [
        ({"allowed_token_ids": [3, 4]}, (3, 4), "bad_words"),
        ({}, tuple(range(SIZE)), "bad_words"),
        ({"allowed_token_ids": [3, 7], "min_tokens": 2}, (3,), "min_tokens"),
        ({"min_tokens": 1}, tuple(i for i in range(SIZE) if i != 7), "min_tokens"),
    ],
    ids=str,
)
def test_something_must_be_legal(fields: dict[str, Any], banned: tuple[int, ...], named: str) -> None:
    with pytest.raises(InvalidParamsError, match=named):
        resolver().settings(SamplingParams(**fields), frozenset({7}), BadWords(banned, ()))
    resolver().settings(SamplingParams(**fields), frozenset({7}), BadWords(banned[1:], ()))
