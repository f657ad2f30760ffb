"""RequestText: the text of one choice, from the ids of its steps to what its stream may show, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncllm.outputs.detokenizer import TextStream
from asyncllm.outputs.repetition_detector import RepetitionDetector
from asyncllm.outputs.stop_matcher import StopMatcher


class RequestText:
    """Detokenises, and looks for stop strings in what comes after the first `min_tokens` tokens."""

    __slots__ = ("_detokenizer", "_found", "_matcher", "_push_ids", "_push_text", "_request", "_unmatched")

    def __init__(
        self, request: int, detokenizer: TextStream, matcher: StopMatcher, *, min_tokens: int, found: list[int]
    ) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._push_ids = detokenizer.push
        self._push_text = matcher.push
        self._unmatched = min_tokens  # so many more ids come before stop strings count
        self._found = found  # where the request is named once a stop string was found: the core's, for all requests

    def push(self, ids: Sequence[int]) -> str:
        """The text of one more id that may be shown."""
        text = self._push_ids(ids)
        if self._unmatched:
            self._unmatched -= 1
            return text
        text = self._push_text(text, self._detokenizer.held)
        if self._matcher.matched is not None:
            self._found.append(self._request)
        return text

    def flush(self) -> str:
        """The rest at the end of the request; a stop string may still be found in it."""
        text = self._detokenizer.flush()
        return text if self._unmatched else self._push_text(text) + self._matcher.flush()


class WatchedText:
    """Looks whether the ids repeat themselves, and leaves their text to others."""

    __slots__ = ("_detector", "_found", "_push", "_request")

    def __init__(
        self, request: int, push: Callable[[Sequence[int]], str] | None, detector: RepetitionDetector, found: list[int]
    ) -> None:
        """`push`: None where there is no text. The request is named in `found` once it repeats itself."""
        self._request = request
        self._push = push
        self._detector = detector
        self._found = found

    def push(self, ids: Sequence[int]) -> str:
        """The text of one more id."""
        if self._detector.push(ids[0]):
            self._found.append(self._request)
        return "" if self._push is None else self._push(ids)
