"""What each token id of one tokenizer adds to the text: plain data, built once a tokenizer, shared by its streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """A tokenizer's decoder as a table. Sequences are indexed by token id, 0 to vocab_size - 1.

    Every decoder that acts on one token at a time fits: byte-level BPE, SentencePiece with or without byte fallback,
    WordPiece. What such a decoder does at the very start of a text is in `first_texts` and `stripped`.
    """

    texts: Sequence[str | None]
    """The text of an id that follows another; None for an id in `fragments`."""
    fragments: Mapping[int, bytes]
    """Ids that stand for bytes which are text only together with their neighbours."""
    special_ids: frozenset[int]
    """Ids left out of the text where special tokens are skipped."""
    absent_ids: frozenset[int]
    """Ids within the range that have no token; left out always."""
    byte_level: bool
    """True: the bytes of all tokens are joined, and each ill-formed part becomes one U+FFFD (the "substitution of
    maximal subparts" of the Unicode standard, chapter 3.9). False: a run of fragments is text if all of it is UTF-8,
    else one U+FFFD a byte."""
    first_texts: Sequence[str | None] | None = None
    """The text of an id that is the first in a text, where that differs."""
    stripped: str = ""
    """The longest run of a character that is taken off the start of a text, such as one space."""

    texts_without_special: Sequence[str | None] = field(init=False)
    """`texts` with those of `special_ids` empty."""
    silent_ids: frozenset[int] = field(init=False)
    """Special and absent ids."""

    def __post_init__(self) -> None:
        shown = list(self.texts)
        for token_id in self.special_ids:
            shown[token_id] = ""
        object.__setattr__(self, "texts_without_special", shown)
        object.__setattr__(self, "silent_ids", self.special_ids | self.absent_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one id; b"" for an id without a token."""
        if not 0 <= token_id < len(self.texts):
            return b""
        text = self.texts[token_id]
        return self.fragments[token_id] if text is None else text.encode()
