"""Log probabilities, in the layout of chats and in the older one of completions. All numbers are finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asyncllm.results import PositionLogprobs, TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def finite(logprob: float) -> float:
    """A number that JSON can say; one above 0, or none at all, is rounding."""
    return min(max(logprob, LOWEST), 0.0) if logprob == logprob else LOWEST  # noqa: PLR0124  # NaN


def chat_logprobs(positions: Iterable[PositionLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        _chat_entry(position.chosen) | {"top_logprobs": [_chat_entry(each) for each in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _chat_entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": finite(entry.logprob), "bytes": list(entry.bytes)}


class CompletionLogprobs:
    """Makes the layout of completions, position by position. Offsets go on from one part to the next."""

    def __init__(self) -> None:
        self._offset = 0

    def prompt(self, first: str, positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """Of an echoed prompt; its first token, `first`, follows nothing, so it has none."""
        part = _empty()
        for position in positions:
            if position is None:
                self._add(part, first, None, None)
            else:
                self._add_position(part, position)
        return part

    def answer(self, positions: Iterable[PositionLogprobs]) -> dict[str, Any]:
        """Of tokens that were generated."""
        part = _empty()
        for position in positions:
            self._add_position(part, position)
        return part

    def _add_position(self, part: dict[str, Any], position: PositionLogprobs) -> None:
        chosen = position.chosen
        top = {chosen.text: finite(chosen.logprob)}
        for entry in position.top:
            top.setdefault(entry.text, finite(entry.logprob))
        self._add(part, chosen.text, finite(chosen.logprob), top)

    def _add(self, part: dict[str, Any], text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        part["tokens"].append(text)
        part["token_logprobs"].append(logprob)
        part["top_logprobs"].append(top)
        part["text_offset"].append(self._offset)
        self._offset += len(text)


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parts of one choice as one."""
    whole = _empty()
    for part in parts:
        for name, values in part.items():
            whole[name] += values
    return whole


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: for each position a mapping of token id to logprob, rank and text."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(entry.token_id): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.text}
            for entry in (*position.top, position.chosen)
        }
        for position in positions
    ]
