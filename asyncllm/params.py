"""SamplingParams: what a caller may ask of one request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal, cast

from asyncllm.errors import InvalidParamsError
from asyncllm.param_checks import (
    MAX_COUNT,
    check_flag,
    check_given,
    check_integer,
    check_number,
    checked_biases,
    checked_ids,
    checked_strings,
)
from asyncllm.structured import StructuredOutput

MAX_TEMPERATURE = 3.4e38
"""The largest that float32 holds, as devices do."""
MAX_CHOICES = 1024
MAX_LOGPROBS = 20
"""Alternatives of one position, unless all are asked for."""
MAX_LOGPROB_IDS = 256
MAX_BIAS = 100.0
MAX_BIASES = MAX_STOP_IDS = 10_000
MAX_ALLOWED_IDS = 300_000
"""More than any vocabulary has. These bounds keep the checks, which run on the caller's event loop, under 20 ms."""
MAX_PLAIN_ITEMS = 256
"""Biases, stop ids and bad words of parameters that are quickly looked through."""

ALL_LOGPROBS: Literal["all"] = "all"
"""For `logprobs` and `prompt_logprobs`: the whole vocabulary."""

LogitsProcessor = Callable[..., Any]
"""`processor(token_ids, logits)`, plain or async: ids of prompt and output, and the row's own logits [vocabulary]
(float32, NumPy) after bans, bias and penalties; it changes them in place, or returns others of that shape."""
OnToken = Callable[..., Any]
"""`on_token(token_id)`, plain or async: called for each token, in order, before the next one is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """Ends a request whose output ends with the same `min_pattern_size` to `max_pattern_size` tokens, repeated
    `min_count` times in a row."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 3

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            check_given(f"repetition_detection.{name}", getattr(self, name))
        check_integer("repetition_detection.max_pattern_size", self.max_pattern_size, 1, 4096)
        check_integer("repetition_detection.min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        check_integer("repetition_detection.min_count", self.min_count, 2, MAX_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request is sampled and when it ends. Frozen; impossible values raise `InvalidParamsError`.

    A field left at None takes the model's own default (its generation_config, unless the engine was made with
    `model_defaults=False`), else the value named here. Order of operations: bans (allowed_token_ids,
    structured_output, bad_words, min_tokens), logit_bias, penalties (repetition, frequency, presence, dry),
    logits_processors; greedy takes the largest here; temperature, top_n_sigma, top_k, typical_p, top_p, min_p, xtc,
    draw.
    """

    n: int = 1
    """Choices: so many answers, each with draws of its own."""
    temperature: float | None = None
    """Divides the logits; 0 is greedy. Else 1.0."""
    top_k: int | None = None
    """Keep the k most likely tokens (and all that tie with the k-th); 0 keeps all. Else 0."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens whose probabilities sum to at least top_p, in (0, 1]. Else 1.0."""
    min_p: float | None = None
    """Keep tokens at least min_p times as likely as the most likely one, in [0, 1]. Else 0.0."""
    typical_p: float | None = None
    """Keep the smallest set of tokens whose surprise is nearest to the expected one and whose probabilities sum to at
    least typical_p, in (0, 1]. Else 1.0."""
    top_n_sigma: float = 0.0
    """Keep tokens within so many standard deviations (of the row's logits) of the largest logit; 0 keeps all."""
    xtc_probability: float = 0.0
    """With this probability, drop all tokens of at least xtc_threshold but the least likely of them."""
    xtc_threshold: float = 0.1
    """The probability that counts for xtc_probability; over 0.5 it has no effect."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the output holds, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that the output holds it, in [-2, 2]."""
    repetition_penalty: float | None = None
    """Divides positive logits, and multiplies negative ones, of tokens that prompt or output hold. Else 1.0."""
    dry_multiplier: float = 0.0
    """Penalty of a token that would repeat what came before (DRY); 0 turns it off."""
    dry_base: float = 1.75
    """The penalty is dry_multiplier * dry_base ** (length of the repeated sequence - dry_allowed_length)."""
    dry_allowed_length: int = 2
    """Repeating a sequence shorter than this costs nothing."""
    dry_penalty_last_n: int | None = None
    """How far DRY looks back, in tokens; None for the whole context."""
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    """Texts over which DRY follows no sequence."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    """Added to the logits of these ids, in [-100, 100]; at most 10,000, kept as a sorted tuple of pairs."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these ids may be sampled."""
    bad_words: Sequence[str] = ()
    """Texts whose tokens never come one after another, at the start of a text or after a space: the last one is banned
    where the others have just come. Other tokens may spell the same."""
    seed: int | None = None
    """The draws are a function of (seed, choice, position); None draws a seed at submission."""
    max_tokens: int | None = None
    """Generate at most this many tokens; 0 gives an empty answer, None goes on to the end of the context."""
    min_tokens: int = 0
    """No end-of-sequence id, stop id or stop string ends the request before this many tokens. A stop string counts only
    where all of it comes after them."""
    stop: str | Sequence[str] = ()
    """Strings that end the text, matched on the decoded text wherever the tokens are cut."""
    stop_token_ids: Sequence[int] = ()
    """Ids that end the request, beside the model's own end-of-sequence ids; their text is not shown."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop id, in the text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (not past `stop_token_ids`)."""
    logprobs: int | Literal["all"] | None = None
    """Give each token's log-probability, and those of so many most likely tokens: 0 to 20, or "all". None: none."""
    prompt_logprobs: int | Literal["all"] | None = None
    """The same for the tokens of the prompt, but for its first."""
    logprob_token_ids: Sequence[int] | None = None
    """Give the log-probabilities of these ids too, at each token; implies logprobs."""
    skip_special_tokens: bool = True
    """Leave the tokenizer's special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Where special tokens are shown: with the spaces that the tokenizer puts between them."""
    detokenize: bool = True
    """Make text of the tokens; without it there are ids alone."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many last tokens of the prompt. Where ids are given, those cut away are not validated."""
    thinking_token_budget: int | None = None
    """End the model's reasoning after so many tokens of it, by the closing tag that its chat template knows."""
    repetition_detection: RepetitionDetection | None = None
    """End a choice that repeats itself, with the stop reason "repetition"; min_tokens does not hold it up."""
    structured_output: StructuredOutput | None = None
    """What form the output must have: a StructuredOutput, or a Pydantic model. Where it is complete the output ends,
    before min_tokens if it must."""
    logits_processors: Sequence[LogitsProcessor] = ()
    """Called in their order before each token is sampled. Async ones run in the event loop of the request, with its
    context variables, plain ones on a thread of each call's own. One that raises, or takes longer than the engine's
    `hook_timeout`, ends its request with `HookFailed`."""
    on_token: OnToken | None = None
    """Called with each token, in the same way, before the next one is sampled."""

    def __post_init__(self) -> None:
        for name, value, default in zip(_NAMES, _values(self), _DEFAULTS, strict=True):
            if value is not default:  # what nearly all fields are is known to be right
                kept = _CHECKS[name](name, value)
                if kept is not value:
                    object.__setattr__(self, name, kept)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParamsError(f"min_tokens ({self.min_tokens}) is over max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise InvalidParamsError("stop strings are looked for in the text, which detokenize=False leaves out")
        if self.allowed_token_ids is not None:
            self._check_bans(self.allowed_token_ids)

    @property
    def has_hooks(self) -> bool:
        """Whether functions of the caller's are to be called."""
        return bool(self.logits_processors) or self.on_token is not None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is to be computed between two tokens, and nothing of it is long, or the caller's own."""
        return (
            not self.logits_processors
            and self.on_token is None
            and self.structured_output is None
            and self.allowed_token_ids is None
            and not self.dry_multiplier
            and self.thinking_token_budget is None
            and len(self.logit_bias) + len(self.stop_token_ids) + len(self.bad_words) <= MAX_PLAIN_ITEMS
        )

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` by id."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    def _check_bans(self, allowed: Sequence[int]) -> None:
        """What can be seen to leave nothing legal without knowing the vocabulary."""
        if not allowed:
            raise InvalidParamsError("allowed_token_ids is empty: nothing may be sampled")
        if self.min_tokens and frozenset(self.stop_token_ids).issuperset(allowed):
            raise InvalidParamsError(
                "allowed_token_ids holds nothing but stop_token_ids: nothing is left for min_tokens"
            )


Check = Callable[[str, Any], Any]
"""`check(name, value)` returns what the field keeps; raises `InvalidParamsError`."""


def _number(low: float, high: float, *, above: bool = False, given: bool = True) -> Check:
    def check(name: str, value: Any) -> Any:
        if given:
            check_given(name, value)
        check_number(name, value, low, high, above=above)
        return value

    return check


def _integer(low: int, high: int | None, *, given: bool = False) -> Check:
    def check(name: str, value: Any) -> Any:
        if given:
            check_given(name, value)
        check_integer(name, value, low, high)
        return value

    return check


def _flag(name: str, value: Any) -> Any:
    check_flag(name, value)
    return value


def _strings(most: int, most_characters: int) -> Check:
    return lambda name, value: checked_strings(name, value, most, most_characters)


def _ids(most: int) -> Check:
    return lambda name, value: checked_ids(name, value, most)


def _ids_if_given(most: int) -> Check:
    return lambda name, value: None if value is None else checked_ids(name, value, most)


def _biases(name: str, value: Any) -> Any:
    return checked_biases(name, value, MAX_BIASES, MAX_BIAS)


def _logprobs(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        check_integer(name, value, 0, MAX_LOGPROBS)
    elif value != ALL_LOGPROBS:
        raise InvalidParamsError(f'{name} must be a whole number or "all", got {value!r:.80}')
    return value


def _functions(name: str, value: Any) -> Any:
    if not isinstance(value, Sequence) or not all(map(callable, value)):
        raise InvalidParamsError(f"{name} must be a list of functions, got {value!r:.80}")
    return tuple(value)


def _function(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise InvalidParamsError(f"{name} must be a function, got {value!r:.80}")
    return value


def _repetitions(name: str, value: Any) -> Any:
    if not isinstance(value, RepetitionDetection | None):
        raise InvalidParamsError(f"{name} must be a RepetitionDetection, got {value!r:.80}")
    return value


def _structure(name: str, value: Any) -> Any:
    if value is None:
        return None
    structured = StructuredOutput.from_model(value) if hasattr(value, "model_json_schema") else value
    if not isinstance(structured, StructuredOutput):
        raise InvalidParamsError(f"{name} must be a StructuredOutput, got {structured!r:.80}")
    return structured


_CHECKS: Mapping[str, Check] = {
    "n": _integer(1, MAX_CHOICES, given=True),
    "temperature": _number(0.0, MAX_TEMPERATURE, given=False),
    "top_k": _integer(0, MAX_COUNT),
    "top_p": _number(0.0, 1.0, above=True, given=False),
    "min_p": _number(0.0, 1.0, given=False),
    "typical_p": _number(0.0, 1.0, above=True, given=False),
    "top_n_sigma": _number(0.0, MAX_TEMPERATURE),
    "xtc_probability": _number(0.0, 1.0),
    "xtc_threshold": _number(0.0, 1.0),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.01, 100.0, given=False),
    "dry_multiplier": _number(0.0, 1000.0),
    "dry_base": _number(1.0, 1000.0),
    "dry_allowed_length": _integer(1, MAX_COUNT, given=True),
    "dry_penalty_last_n": _integer(0, MAX_COUNT),
    "dry_sequence_breakers": _strings(64, 4096),
    "logit_bias": _biases,
    "allowed_token_ids": _ids_if_given(MAX_ALLOWED_IDS),
    "bad_words": _strings(1024, 65536),
    "seed": _integer(-(2**63), 2**64 - 1),
    "max_tokens": _integer(0, None),
    "min_tokens": _integer(0, MAX_COUNT, given=True),
    "stop": _strings(64, 4096),
    "stop_token_ids": _ids(MAX_STOP_IDS),
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "logprob_token_ids": _ids_if_given(MAX_LOGPROB_IDS),
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "detokenize": _flag,
    "truncate_prompt_tokens": _integer(1, MAX_COUNT),
    "thinking_token_budget": _integer(0, MAX_COUNT),
    "repetition_detection": _repetitions,
    "structured_output": _structure,
    "logits_processors": _functions,
    "on_token": _function,
}
_NAMES = tuple(field.name for field in fields(SamplingParams))
_DEFAULTS = tuple(field.default for field in fields(SamplingParams))
_values = attrgetter(*_NAMES)
