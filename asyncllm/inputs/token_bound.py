"""A lower bound on the number of tokens of a text, so that a prompt far too long is refused without encoding it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import tokenizers

from asyncllm.outputs.token_table import TokenTable

_LOSSLESS = frozenset({"Sequence", "ByteLevel", "Split", "Digits", "Punctuation"})
"""Pre-tokenizers that keep all of the text (a Split or Punctuation of behaviour "Removed" does not)."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Each token of a byte-level BPE stands for at most `longest` bytes of the text."""

    longest: int
    untokenised: bytes  # byte values that have no token and may leave no trace

    def at_least(self, text: str) -> int:
        """A number of tokens that the text has at least."""
        return -(-len(text.encode().translate(None, self.untokenised)) // self.longest)


def token_bound(backend: tokenizers.Tokenizer, table: TokenTable | None) -> TokenBound | None:
    """None where a token may stand for any amount of text: a normalizer or pre-tokenizer may drop text, an added token
    may swallow the spaces beside it, and other kinds of tokenizer merge what they do not know."""
    if table is None or not table.byte_level or backend.normalizer is not None:
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    if backend.pre_tokenizer is None:
        return None
    state = json.loads(backend.pre_tokenizer.__getstate__())
    for step in state.get("pretokenizers", [state]):
        if step["type"] not in _LOSSLESS or step.get("behavior") == "Removed":
            return None
    tokens = [*map(str.encode, filter(None, table.texts)), *table.fragments.values()]
    longest = max(map(len, tokens), default=0)
    single = {token[0] for token in tokens if len(token) == 1}
    return TokenBound(longest, bytes(byte for byte in range(256) if byte not in single)) if longest else None
