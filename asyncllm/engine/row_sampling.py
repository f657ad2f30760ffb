"""From `SamplingParams` to a row's settings: defaults resolved, ids within the vocabulary, something legal left.

Any number of threads may use one `SamplingResolver` at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from asyncllm.engine.model import ServedModel
from asyncllm.engine.plan import LogprobsRequest, RowSampling
from asyncllm.errors import InvalidParamsError
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.param_checks import MAX_COUNT
from asyncllm.params import ALL_LOGPROBS, SamplingParams

DEFAULTS: Mapping[str, float | int] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
}

LEAST_TEMPERATURE = 1e-37
"""Of those above 0. The inverse of a smaller one is no float32; the likeliest token is all that either leaves."""

WordIds = tuple[int, ...]
"""The tokens of a text that may not be generated."""


@dataclass(frozen=True, slots=True)
class BadWords:
    """The texts that the output must not hold, as token ids."""

    banned: WordIds  # those of one token
    sequences: tuple[WordIds, ...]  # the others


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """What parameters come to, whatever the prompt is."""

    stop_ids: frozenset[int]  # all that end a request
    bad_words: BadWords
    guided: bool  # something may have to be computed between two tokens
    sampling: RowSampling  # of a first choice; its seed, and how long ids are suppressed, may depend on the request

    def sampling_for(self, params: SamplingParams, prompt_tokens: int) -> RowSampling:
        """The settings of the first choice of one request."""
        sampling = self.sampling
        if params.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=secrets.randbits(64))
        if params.min_tokens:
            sampling = replace(sampling, suppress_before=min(prompt_tokens + params.min_tokens, MAX_COUNT))
        return sampling


class SamplingResolver:
    """For one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._resolve_plain = lru_cache(maxsize=256)(self._resolve)
        self._vocabulary = model.facts.vocab_size
        self._defaults = {**DEFAULTS, **model.sampling_defaults}

    def resolve(self, params: SamplingParams) -> ResolvedParams:
        """Raises `InvalidParamsError` for what this model cannot do, and where nothing may be sampled. Equal parameters
        are resolved once, where they hold nothing of the caller's."""
        return (self._resolve_plain if params.is_plain else self._resolve)(params)

    def _resolve(self, params: SamplingParams) -> ResolvedParams:
        self._check(params)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._model.eos_token_ids
        bad_words = self._bad_words(params)
        guided = self._model.constrain is not None or not params.is_plain or bool(params.bad_words)
        return ResolvedParams(stop_ids, bad_words, guided, self.settings(params, stop_ids, bad_words))

    def _check(self, params: SamplingParams) -> None:
        size = self._vocabulary
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": [token_id for token_id, _ in params.biases],
            "allowed_token_ids": params.allowed_token_ids or (),
            "logprob_token_ids": params.logprob_token_ids or (),
        }
        for name, token_ids in named.items():
            if token_ids and max(token_ids) >= size:
                raise InvalidParamsError(f"{name}: {max(token_ids)} is outside the vocabulary (0 to {size - 1})")
        if params.min_tokens and len(set(params.stop_token_ids)) >= size:
            raise InvalidParamsError("stop_token_ids holds the whole vocabulary: nothing is left for min_tokens")
        if self._model.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    what = "stop strings" if name == "stop" else name
                    raise InvalidParamsError(f"{what} need a tokenizer, which this model does not have")

    def settings(self, params: SamplingParams, stop_ids: frozenset[int], bad_words: BadWords) -> RowSampling:
        """Those of a first choice, as far as they do not depend on its request. `stop_ids`: all that end it.

        Raises `InvalidParamsError` where nothing may be sampled.
        """
        chosen = {
            name: default if (value := getattr(params, name)) is None else value
            for name, default in self._defaults.items()
        }
        allowed = None if params.allowed_token_ids is None else tuple(sorted(set(params.allowed_token_ids)))
        suppressed = tuple(sorted(stop_ids)) if params.min_tokens else ()
        self._check_legal(allowed, bad_words.banned, suppressed)
        temperature = float(chosen["temperature"])
        return RowSampling(
            temperature=max(temperature, LEAST_TEMPERATURE) if temperature > 0 else 0.0,
            top_k=int(chosen["top_k"]),
            top_p=float(chosen["top_p"]),
            min_p=float(chosen["min_p"]),
            seed=0 if params.seed is None else params.seed % 2**64,
            suppressed=suppressed,
            typical_p=float(chosen["typical_p"]),
            top_n_sigma=float(params.top_n_sigma),
            xtc_probability=float(params.xtc_probability),
            xtc_threshold=float(params.xtc_threshold),
            repetition_penalty=float(chosen["repetition_penalty"]),
            frequency_penalty=float(params.frequency_penalty),
            presence_penalty=float(params.presence_penalty),
            logit_bias=params.biases,
            allowed=allowed,
            banned=bad_words.banned,
            logprobs=self._logprobs(params),
            prompt_logprobs=self._prompt_logprobs(params),
        )

    def _bad_words(self, params: SamplingParams) -> BadWords:
        """Each of `bad_words` as the tokens that it has at the start of a text, and after a space."""
        tokenizer = self._model.tokenizer
        if not params.bad_words or tokenizer is None:
            return BadWords((), ())
        found = {ids for word in params.bad_words for ids in _spellings(word, tokenizer)}
        return BadWords(
            tuple(sorted(ids[0] for ids in found if len(ids) == 1)), tuple(sorted(ids for ids in found if len(ids) > 1))
        )

    def _check_legal(self, allowed: WordIds | None, banned: WordIds, suppressed: WordIds) -> None:
        def left(bans: set[int]) -> int:
            return self._vocabulary - len(bans) if allowed is None else len({*allowed} - bans)

        if not left({*banned}):
            whole = "the vocabulary" if allowed is None else "allowed_token_ids"
            raise InvalidParamsError(f"bad_words bans all of {whole}")
        if suppressed and not left({*banned, *suppressed}):
            raise InvalidParamsError(
                "min_tokens bans the ids that would end the request, and allowed_token_ids or bad_words leaves no other"
            )

    def _logprobs(self, params: SamplingParams) -> LogprobsRequest | None:
        if params.logprobs is None and params.logprob_token_ids is None:
            return None
        return LogprobsRequest(self._top(params.logprobs or 0), tuple(params.logprob_token_ids or ()))

    def _prompt_logprobs(self, params: SamplingParams) -> LogprobsRequest | None:
        return None if params.prompt_logprobs is None else LogprobsRequest(self._top(params.prompt_logprobs))

    def _top(self, count: int | str) -> int:
        return self._vocabulary if count == ALL_LOGPROBS else min(int(count), self._vocabulary)


def _spellings(word: str, tokenizer: Tokenizer) -> list[WordIds]:
    bare = tuple(tokenizer.encode(word, add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
    # A word after a space is one of another first token; where the space is a token by itself, it is the bare word.
    found = [bare, spaced] if spaced and bare and spaced[0] != bare[0] and len(spaced) == len(bare) else [bare]
    return [ids for ids in found if ids]
