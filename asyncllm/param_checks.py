"""What the fields of `SamplingParams` have in common: checks that raise `InvalidParamsError` and name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.errors import InvalidParamsError

MAX_COUNT = 2**31 - 1
"""The largest that int32 holds, as devices do."""
_LISTS = (tuple, list)
"""Empty ones, which nearly all requests have, are seen at once: asking an abstract class takes microseconds."""


def check_number(name: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    """A finite number in [low, high], or in (low, high] where it must be `above`; or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParamsError(f"{name} must be a number, got {value!r:.80}")
    if not low <= value <= high or (above and value == low):  # the first is false for what is not a number
        raise InvalidParamsError(f"{name} must be in {'(' if above else '['}{low:g}, {high:g}], got {value!r:.80}")


def check_integer(name: str, value: int | None, low: int, high: int | None) -> None:
    """A whole number from `low` to `high`, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParamsError(f"{name} must be a whole number, got {value!r:.80}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidParamsError(f"{name} must be {bound}, got {value!r:.80}")


def check_given(name: str, value: object) -> None:
    """Not None, which for most fields means the model's default, but not for this one."""
    if value is None:
        raise InvalidParamsError(f"{name} must not be None")


def check_flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise InvalidParamsError(f"{name} must be True or False, got {value!r:.80}")


def checked_strings(name: str, value: str | Sequence[str], most: int, most_characters: int) -> tuple[str, ...]:
    """Strings, none of them empty, none with a lone surrogate, which no text has; a string by itself counts as one."""
    if type(value) in _LISTS and not value:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or isinstance(strings, bytes) or not all(isinstance(s, str) for s in strings):
        raise InvalidParamsError(f"{name} must be a string or a list of strings, got {value!r:.80}")
    if any(not s for s in strings):
        raise InvalidParamsError(f"{name} holds an empty string, which is in every text")
    if len(strings) > most or sum(map(len, strings)) > most_characters:
        raise InvalidParamsError(f"{name} may hold at most {most} strings of {most_characters} characters in all")
    for string in strings:
        try:
            string.encode()
        except UnicodeEncodeError:
            raise InvalidParamsError(f"{name} must be valid Unicode, got {string!a:.80}") from None
    return tuple(strings)


def checked_ids(name: str, ids: Sequence[int], most: int) -> tuple[int, ...]:
    """Token ids in their order; whether the vocabulary has them is checked where that is known."""
    if type(ids) in _LISTS and not ids:
        return ()
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence):
        raise InvalidParamsError(f"{name} must be a list of token ids, got {ids!r:.80}")
    if len(ids) > most:
        raise InvalidParamsError(f"{name} may hold at most {most} ids, got {len(ids)}")
    ids = tuple(ids)
    if ids and {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) <= MAX_COUNT:
        return ids  # a whole vocabulary in milliseconds; the loop below knows what is wrong with the others
    for token_id in ids:
        if token_id is None:
            raise InvalidParamsError(f"{name} holds None")
        check_integer(f"each of {name}", token_id, 0, MAX_COUNT)
    return ids


def checked_biases(
    name: str, biases: Mapping[int, float] | Sequence[tuple[int, float]], most: int, bound: float
) -> tuple[tuple[int, float], ...]:
    """(token id, bias) in the order of ids, each once."""
    if type(biases) in (dict, *_LISTS) and not biases:
        return ()
    if isinstance(biases, Mapping | Sequence) and len(biases) > most:
        raise InvalidParamsError(f"{name} may hold at most {most} ids, got {len(biases)}")
    if isinstance(biases, Mapping):
        pairs: list[Any] = list(biases.items())
    elif isinstance(biases, Sequence) and not isinstance(biases, str | bytes | bytearray):
        pairs = list(biases)
    else:
        pairs = [None]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise InvalidParamsError(f"{name} must map token ids to numbers, got {biases!r:.80}")
    for token_id, bias in pairs:
        if token_id is None or bias is None:
            raise InvalidParamsError(f"{name} holds None")
        check_integer(f"each id of {name}", token_id, 0, MAX_COUNT)
        check_number(f"each bias of {name}", bias, -bound, bound)
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise InvalidParamsError(f"{name} holds an id twice")
    return tuple(sorted((token_id, float(bias)) for token_id, bias in pairs))
