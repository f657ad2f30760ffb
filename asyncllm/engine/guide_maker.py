"""GuideMaker: from `SamplingParams` to the guides of a request's choices. Runs on worker threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from asyncllm.engine.guide import Guide, Guidelines
from asyncllm.engine.model import Constrain, ServedModel
from asyncllm.engine.plan import RowSampling
from asyncllm.engine.row_sampling import BadWords
from asyncllm.errors import InvalidParamsError
from asyncllm.outputs.bad_words import BadSequences
from asyncllm.outputs.constraint import Constraint
from asyncllm.outputs.dry import DryHistory, DrySettings
from asyncllm.outputs.reasoned_form import ReasonedForm
from asyncllm.outputs.reasoning import (
    closed_in_prompt,
    find_reasoning_format,
    guess_reasoning_format,
    opens_in_prompt,
)
from asyncllm.outputs.thinking_budget import ThinkingBudget
from asyncllm.params import SamplingParams

_TAIL = 32
"""So many last tokens of a prompt hold the tag that begins the reasoning, if one does."""


class GuideMaker:
    """For one model."""

    def __init__(self, model: ServedModel, constrain: Constrain) -> None:
        self._model = model
        self._constrain = constrain
        template = model.chat_template
        source = None if template is None else template.source
        self._reasoning_format = None if source is None else guess_reasoning_format(source)
        self._breakers = lru_cache(maxsize=16)(self._find_breakers)

    def make(
        self, params: SamplingParams, bad_words: BadWords, prompt: Sequence[int], sampling: RowSampling
    ) -> Sequence[Guide | None]:
        """A guide for each choice; None where the host has nothing to say, or nobody gets what is sampled. Raises
        `RequestError`, also where its other parameters leave nothing that a constraint begins with."""
        constraint = self._constraint(params, bad_words, prompt)
        sequences = BadSequences(bad_words.sequences) if bad_words.sequences else None
        dry = self._dry(params)
        if constraint is None and sequences is None and dry is None and not params.has_hooks:
            return [None] * params.n
        told = (params.logprobs, params.logprob_token_ids, params.prompt_logprobs)

        def guide(own: Constraint | None) -> Guide:
            lines = Guidelines(
                constraint=own,
                bad_sequences=sequences,
                dry=None if dry is None else DryHistory(dry),
                jumps=all(asked is None for asked in told),
                tells_tokens=params.has_hooks,
                end_ids=self._model.eos_token_ids,
            )
            return Guide(lines, prompt=prompt, sampling=sampling, vocab_size=self._model.facts.vocab_size)

        scored, unheard = params.prompt_logprobs is not None, params.max_tokens == 0
        if constraint is not None and (params.allowed_token_ids or params.bad_words or scored):
            ends = guide(constraint.copy()).advance(()).adjustment is None
            if ends and scored and not unheard:
                raise InvalidParamsError(
                    "prompt_logprobs with structured_output: nothing may come next, so nothing would be computed; "
                    "max_tokens=0 scores the prompt alone"
                )
        if unheard:
            return [None] * params.n
        if constraint is None:
            return [guide(None) for _ in range(params.n)]
        return [guide(constraint), *(guide(constraint.copy()) for _ in range(params.n - 1))]

    def _constraint(self, params: SamplingParams, bad_words: BadWords, prompt: Sequence[int]) -> Constraint | None:
        form, budget = self._constrain(params), params.thinking_token_budget
        after = params.structured_output is not None and params.structured_output.after_reasoning
        name = after if isinstance(after, str) else self._reasoning_format
        if budget is None and (form is None or not after or form.finished):
            return form
        if form is not None and not after:
            raise InvalidParamsError(
                "thinking_token_budget with structured_output: it leaves no place for reasoning, but after_reasoning"
            )
        tokenizer, size = self._model.tokenizer, self._model.facts.vocab_size
        if tokenizer is None or name is None:
            if budget is not None:
                raise InvalidParamsError("thinking_token_budget: this model's chat template knows of no reasoning")
            return form
        format = find_reasoning_format(name)
        start, end = (tokenizer.encode(tag, add_special_tokens=False) for tag in (format.start, format.end))
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        thinking = ThinkingBudget(start, end, budget, size, begun=opens_in_prompt(name, tail))
        if budget is not None:
            _check_legal(thinking.end, params, bad_words)
        if form is None:
            return thinking
        if closed_in_prompt(name, tail):
            return form
        if format.special_tokens and params.skip_special_tokens and params.detokenize:
            raise InvalidParamsError(
                "structured_output.after_reasoning: this model's tags are special tokens, without which its answer "
                "cannot be told from its reasoning: skip_special_tokens must be False"
            )
        return ReasonedForm(form, thinking, self._model.eos_token_ids, size)

    def _dry(self, params: SamplingParams) -> DrySettings | None:
        if params.dry_multiplier == 0:
            return None
        return DrySettings(
            multiplier=params.dry_multiplier,
            base=params.dry_base,
            allowed_length=params.dry_allowed_length,
            last_n=params.dry_penalty_last_n,
            breakers=self._breakers(tuple(params.dry_sequence_breakers)),
        )

    def _find_breakers(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The tokens that hold one of these texts; none where there is no tokenizer."""
        tokenizer = self._model.tokenizer
        if tokenizer is None or not texts:
            return frozenset()
        parts = [text.encode() for text in texts]
        pieces: Mapping[int, bytes] = {i: tokenizer.token_bytes(i) for i in range(self._model.facts.vocab_size)}
        return frozenset(i for i, piece in pieces.items() if any(part in piece for part in parts))


def _check_legal(end: Sequence[int], params: SamplingParams, bad_words: BadWords) -> None:
    """Raise `InvalidParamsError` where the tokens that end the reasoning may not come."""
    allowed = params.allowed_token_ids
    if allowed is not None and not set(end) <= set(allowed):
        raise InvalidParamsError(
            f"thinking_token_budget with allowed_token_ids: these lack some of {[*end]}, which end the reasoning"
        )
    bans = (*bad_words.sequences, *((token_id,) for token_id in bad_words.banned))
    if any(tuple(end[i : i + len(ban)]) == ban for ban in bans for i in range(len(end))):
        raise InvalidParamsError(f"thinking_token_budget with bad_words: they ban {[*end]}, which end the reasoning")
