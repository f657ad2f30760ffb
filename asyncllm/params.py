"""SamplingParams: what a caller may ask of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncllm.errors import InvalidParamsError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_TEMPERATURE = 3.4e38
"""The largest that float32 holds, as devices do."""
MAX_COUNT = 2**31 - 1
"""The largest that int32 holds, as devices do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request is sampled and when it ends. Frozen; impossible values raise `InvalidParamsError`.

    A field left at None takes the model's own default (its generation_config, unless the engine was made with
    `model_defaults=False`), else the value named here. Order of operations: min_tokens' bans, temperature,
    top_k, top_p, min_p, draw.
    """

    temperature: float | None = None
    """Divides the logits; 0 is greedy. Else 1.0."""
    top_k: int | None = None
    """Keep the k most likely tokens (and all that tie with the k-th); 0 keeps all. Else 0."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens whose probabilities sum to at least top_p, in (0, 1]. Else 1.0."""
    min_p: float | None = None
    """Keep tokens at least min_p times as likely as the most likely one, in [0, 1]. Else 0.0."""
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
    skip_special_tokens: bool = True
    """Leave the tokenizer's special tokens out of the text."""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_integer("top_k", self.top_k, 0, MAX_COUNT)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        _check_integer("max_tokens", self.max_tokens, 0, None)
        if self.min_tokens is None:
            raise InvalidParamsError("min_tokens must be a whole number, got None")
        _check_integer("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParamsError(f"min_tokens ({self.min_tokens}) is over max_tokens ({self.max_tokens})")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParamsError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))


def _check_number(name: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParamsError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high or (above and value == low):  # the first is false for what is not a number
        raise InvalidParamsError(f"{name} must be in {'(' if above else '['}{low:g}, {high:g}], got {value!r:.80}")


def _check_integer(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParamsError(f"{name} must be a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidParamsError(f"{name} must be {bound}, got {value!r}")


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise InvalidParamsError(f"stop must be a string or a list of strings, got {stop!r}")
    if any(not s for s in strings):
        raise InvalidParamsError("stop holds an empty string, which would end every request at once")
    if len(strings) > MAX_STOP_STRINGS or sum(map(len, strings)) > MAX_STOP_CHARACTERS:
        raise InvalidParamsError(
            f"stop may hold at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARACTERS} characters in all"
        )
    return tuple(strings)


def _stop_ids(ids: Sequence[int]) -> tuple[int, ...]:
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence):
        raise InvalidParamsError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    for token_id in ids:
        _check_integer("each of stop_token_ids", token_id, 0, 2**31 - 1)
        if token_id is None:
            raise InvalidParamsError("stop_token_ids holds None")
    return tuple(ids)
