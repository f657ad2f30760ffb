"""What a tokenizer is made of once its files, or its GGUF fields, are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer as a loader hands it over."""

    backend: tokenizers.Tokenizer
    eos_token_ids: frozenset[int]  # the tokenizer's own; generation_config may name more
    special_tokens: Mapping[str, str]  # name ("bos_token", ...) to text: what chat templates may use
    chat_templates: Mapping[str, str]  # name to Jinja source; the main one is "default"
