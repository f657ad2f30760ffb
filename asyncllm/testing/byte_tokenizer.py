"""A tokenizer in memory, for models that have none of their own: `tiny_models.write_byte_tokenizer`, read back."""

from __future__ import annotations

import tempfile
from pathlib import Path

from asyncllm.inputs.tokenizer import Tokenizer, TokenizerData
from asyncllm.testing.tiny_models import write_byte_tokenizer


def byte_tokenizer(*, chat_template: str | None = None) -> Tokenizer:
    """A byte-level tokenizer of 512 tokens. Takes some tens of milliseconds; the same one each time."""
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder), chat_template=chat_template)
        return Tokenizer.load(TokenizerData(folder=Path(folder)))
