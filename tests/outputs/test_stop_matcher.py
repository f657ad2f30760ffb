from __future__ import annotations

from collections.abc import Sequence
from time import process_time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncllm.outputs.stop_matcher import StopMatcher
from tests.inputs.toy_tokenizers import smollm2

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
PIECES = st.lists(st.text("abc\n", max_size=4), max_size=20)


def naive(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The match that ends first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def withheld(text: str, stops: Sequence[str]) -> str:
    """The longest suffix that begins a stop string."""
    suffixes = (text[start:] for start in range(len(text) + 1))
    return next(suffix for suffix in suffixes if any(stop.startswith(suffix) for stop in stops))


@given(stops=STOPS, pieces=PIECES, include=st.booleans())
@example(stops=("ab", "b"), pieces=["a", "b"], include=False)
@example(stops=("aab", "b", "abb"), pieces=["aa", "ab", "b"], include=True)
@settings(max_examples=400, deadline=None)
def test_streamed_is_the_naive_search_of_the_whole(stops: tuple[str, ...], pieces: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown, known = "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        known += piece
        text, stop = naive(known, stops, include)
        assert matcher.matched == stop
        if stop is not None:
            assert shown == text
        else:
            assert shown + withheld(known, stops) == known
    shown += matcher.flush()
    assert shown == naive("".join(pieces), stops, include)[0]


@given(stops=STOPS, pieces=PIECES, held=st.text("abc\n", max_size=4))
@settings(max_examples=200, deadline=None)
def test_held_text_counts_only_where_it_completes_a_match(stops: tuple[str, ...], pieces: list[str], held: str) -> None:
    peeking, plain = StopMatcher(stops), StopMatcher(stops)
    shown = "".join(peeking.push(piece) for piece in pieces) + peeking.push("a", held)
    plainly = "".join(plain.push(piece) for piece in pieces) + plain.push("a")
    if naive("".join(pieces) + "a" + held, stops, False)[1] is None:
        assert shown == plainly
        assert peeking.matched is None
        assert peeking.flush() == plain.flush()
    else:
        assert (shown, peeking.matched) == naive("".join(pieces) + "a" + held, stops, False)


def run(ids: Sequence[int], *stops: str, include: bool = False) -> tuple[list[str], str | None]:
    stream, matcher = smollm2().detokenizer(), StopMatcher(stops, include)
    deltas = []
    for token_id in ids:
        deltas.append(matcher.push(stream.push([token_id]), stream.held))
        if matcher.matched is not None:
            return deltas, matcher.matched
    return [*deltas, matcher.push(stream.flush()) + matcher.flush()], None


def test_a_stop_string_of_several_tokens_is_never_shown_in_part() -> None:
    ids = [33203, 23960, 57, 58]
    assert run(ids, "DEFGHIJ") == (["", "", "", ""], "DEFGHIJ")
    assert run(ids, "DEFGHIK") == (["", "", "", "DEFGHIJ", ""], None)
    assert run(ids, "DEFGHIJ", include=True) == (["", "", "", "DEFGHIJ"], "DEFGHIJ")


def test_withheld_text_is_flushed_at_another_ending() -> None:
    deltas, matched = run([5633, 63, 422, 16049, 312, 3256, 2], "TRE\nAAAA")
    assert "".join(deltas) == "UNO DUE TRE"
    assert matched is None


def test_a_stop_string_delays_nothing_that_it_does_not_touch() -> None:
    ids = smollm2().encode("A B C D")
    assert run(ids, "✿RESULT✿") == (["A", " B", " C", " D", ""], None)


@pytest.mark.parametrize(
    ("ids", "stop", "text"),
    [([30, 1116, 57], "\n\n", "."), ([30, 198, 198, 198], "\n\n", "."), ([81, 82, 28, 83], "b,c", "a")],
)
def test_a_stop_string_matches_however_the_tokens_are_cut(ids: list[int], stop: str, text: str) -> None:
    deltas, matched = run(ids, stop)
    assert ("".join(deltas), matched) == (text, stop)


def test_after_a_match_text_is_dropped() -> None:
    matcher = StopMatcher(("b",))
    assert [matcher.push(piece) for piece in ("ab", "c", "b")] == ["a", "", ""]
    assert (matcher.matched, matcher.flush()) == ("b", "")


def test_the_match_that_ends_first_wins_then_the_longest() -> None:
    cases = {("bcd", "c"): ("ab", "c"), ("c", "bc"): ("a", "bc"), ("abcd", "zabcd", "d"): ("", "abcd")}
    for stops, outcome in cases.items():
        matcher = StopMatcher(stops)
        assert (matcher.push("abcd"), matcher.matched) == outcome


@pytest.mark.parametrize(
    "stops",
    [("a" * 4095 + "b",), tuple("a" * length + "b" for length in range(1, 64)), ("ab" * 2047 + "c", "ba" * 10 + "d")],
)
def test_time_is_linear_in_repetitive_text(stops: tuple[str, ...]) -> None:
    def seconds(length: int) -> float:
        matcher = StopMatcher(stops)
        start = process_time()
        for _ in range(length):
            matcher.push("a")
            matcher.push("ab")
        return process_time() - start

    seconds(1000)
    assert seconds(16_000) < 10 * seconds(4_000) + 0.05  # 4 if linear, 16 if quadratic


def test_long_texts_at_once() -> None:
    matcher = StopMatcher(("\n\nHuman:", "###"))
    text = "a # b \n" * 100_000
    start = process_time()
    assert matcher.push(text) == text[:-1]
    assert process_time() - start < 2
    assert (matcher.push("\nHuman:"), matcher.matched) == ("", "\n\nHuman:")
