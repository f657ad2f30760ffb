"""Incremental decoding: the text that new token ids add to a stream.

The joined deltas and the flush are the tokenizer's own decode of the ids, wherever the ids are cut. Bytes that are
not a whole character yet are held back and shown once. Nothing here raises, whatever the ids.

Does not belong here: stop strings (`stop_matcher`), reading a tokenizer (`inputs`).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from asyncllm.outputs.token_table import TokenTable

REPLACEMENT = "\ufffd"

MAX_HELD_BYTES = 64
"""Of a run of fallback bytes. A tokenizer judges such a run as a whole (one bad byte, and all of it is replaced), so
it is shown when it ends. A run longer than this that is good so far is shown as it comes, so that a model that writes
nothing but bytes is not silent; should such a run go wrong later, what was shown stays."""

WINDOW = 16
"""Ids of context, and ids that may be held back, where a stream is decoded through the tokenizer."""


class TextStream(Protocol):
    """The output side of one stream: ids in, text out."""

    held: str
    """Whole characters held back, because ids to come may still change them. They are part of the text if the stream
    ends here, so a stop string may match in them."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids add for good."""

    def flush(self) -> str:
        """What is left at the end of the stream."""


class _Run(Enum):
    """A run of fallback bytes."""

    HELD = "nothing of it is shown"
    OPEN = "it is long, and good so far: shown as it comes"
    LOST = "it is long and not UTF-8: each byte is replaced"


class Detokenizer:
    """Decodes one stream with a tokenizer's table.

    `prompt_ids` are the ids before the stream: a tokenizer that drops the space of the first word drops it only where
    nothing shown comes before. Bytes of the prompt are not joined to those of the output.
    """

    __slots__ = ("_absent", "_busy", "_bytes", "_first", "_run", "_strip", "_table", "_texts", "held")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._table = table
        self._texts = table.texts_without_special if skip_special_tokens else table.texts
        self._absent = table.silent_ids if skip_special_tokens else table.absent_ids
        self._first = table.first_texts  # until the first token
        self._strip = table.stripped  # what may still be taken off the start
        self._bytes = b""  # not shown yet
        self._run = _Run.HELD
        self._busy = False  # whether the next id needs more than a look into the table
        self.held = ""
        if self._first is not None or self._strip:
            self._pass_prompt(prompt_ids)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids add for good."""
        if not self._busy and len(ids) == 1:
            # The common case: one id a step, nothing held.
            try:
                text = self._texts[ids[0]]
            except IndexError:
                return ""
            if text is not None:
                return text
        shown = [self._push_one(token_id) for token_id in ids]
        self._settle()
        return "".join(shown)

    def flush(self) -> str:
        """What is left at the end of the stream, with U+FFFD for bytes that never became a character."""
        text = self._end_run()
        self._settle()
        return text

    def _pass_prompt(self, prompt_ids: Sequence[int]) -> None:
        for token_id in prompt_ids:
            if self._first is None and not self._strip:
                break
            self._push_one(token_id)
        self._end_run()
        self._settle()

    def _settle(self) -> None:
        self._busy = bool(self._bytes or self._strip) or self._first is not None or self._run is not _Run.HELD
        self.held = self._held_text() if self._bytes and not self._table.byte_level else ""

    def _held_text(self) -> str:
        try:
            return self._strip_start(self._bytes.decode(), keep=True)
        except UnicodeDecodeError:
            return ""

    def _push_one(self, token_id: int) -> str:
        if token_id >= len(self._texts) or token_id in self._absent:
            return ""
        texts = self._texts
        if self._first is not None:
            texts, self._first = self._first, None
        text = texts[token_id]
        if text is not None:
            return self._end_run() + self._strip_start(text)
        fragment = self._table.fragments[token_id]
        return self._join_bytes(fragment) if self._table.byte_level else self._extend_run(fragment)

    def _join_bytes(self, fragment: bytes) -> str:
        # CPython's decoder replaces the same maximal ill-formed parts as the tokenizers' (Rust's) lossy one.
        text, consumed = codecs.utf_8_decode(self._bytes + fragment, "replace", False)
        self._bytes = (self._bytes + fragment)[consumed:]
        return text

    def _extend_run(self, fragment: bytes) -> str:
        self._bytes += fragment
        if self._run is _Run.HELD:
            if len(self._bytes) <= MAX_HELD_BYTES:
                return ""
            try:
                codecs.utf_8_decode(self._bytes, "strict", False)
            except UnicodeDecodeError:
                self._run = _Run.LOST
            else:
                self._run = _Run.OPEN
        if self._run is _Run.LOST:
            text = REPLACEMENT * len(self._bytes)
            self._bytes = b""
        else:
            text, consumed = codecs.utf_8_decode(self._bytes, "replace", False)
            self._bytes = self._bytes[consumed:]
        return self._strip_start(text)

    def _end_run(self) -> str:
        data, run = self._bytes, self._run
        self._bytes, self._run = b"", _Run.HELD
        if not data:
            return ""
        if self._table.byte_level or run is _Run.OPEN:
            text = data.decode("utf-8", "replace")
        else:
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = REPLACEMENT * len(data)
        return self._strip_start(text)

    def _strip_start(self, text: str, *, keep: bool = False) -> str:
        if not self._strip:
            return text
        shortest = min(len(text), len(self._strip))
        count = next((i for i in range(shortest) if text[i] != self._strip[i]), shortest)
        if not keep:
            self._strip = self._strip[count:] if count == len(text) else ""
        return text[count:]


class CompactSpecials:
    """A stream in which a special token that follows another is shown without the space before it."""

    __slots__ = ("_after_special", "_special_ids", "_stream", "held")

    def __init__(self, stream: TextStream, special_ids: frozenset[int]) -> None:
        self._stream = stream
        self._special_ids = special_ids
        self._after_special = False
        self.held = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids add for good."""
        shown = []
        for token_id in ids:
            text = self._stream.push((token_id,))
            is_special = token_id in self._special_ids
            shown.append(text.removeprefix(" ") if is_special and self._after_special else text)
            self._after_special = is_special
        self.held = self._stream.held
        return "".join(shown)

    def flush(self) -> str:
        """What is left at the end of the stream."""
        self.held = ""
        return self._stream.flush()


class WindowDetokenizer:
    """Decodes one stream through the tokenizer's own `decode` over the last ids.

    For the decoders that no `TokenTable` describes. Exact where a token changes the text of at most the `WINDOW`
    tokens before it; tens of microseconds a push.
    """

    __slots__ = ("_context", "_decode", "_pending", "_skip", "held")

    def __init__(
        self,
        decode: Callable[[Sequence[int], bool], str],
        *,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._skip = skip_special_tokens
        self._context = list(prompt_ids[-WINDOW:])
        self._pending: list[int] = []
        self.held = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids add for good."""
        self._pending.extend(ids)
        return self._show(final=False)

    def flush(self) -> str:
        """What is left at the end of the stream."""
        return self._show(final=True)

    def _show(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context, self._skip)
        after = self._decode(self._context + self._pending, self._skip)
        if after.endswith(REPLACEMENT) and len(self._pending) < WINDOW and not final:
            return ""
        self._context = (self._context + self._pending)[-WINDOW:]
        self._pending = []
        return after[len(before) :]
