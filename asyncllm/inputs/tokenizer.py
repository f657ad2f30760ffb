"""The tokenizer of a model: text to token ids and back.

Does not belong here: how a tokenizer is read (`tokenizer_folder`, `tokenizer_gguf`), chat templates (`chat_template`),
incremental decoding (`outputs.detokenizer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncllm.errors import ContextLengthError, InvalidPromptError, TokenizerError
from asyncllm.inputs.token_bound import token_bound
from asyncllm.inputs.token_tables import build_token_table, vocabulary_size
from asyncllm.inputs.tokenizer_folder import holds_tokenizer, read_tokenizer_folder
from asyncllm.inputs.tokenizer_gguf import read_tokenizer_gguf
from asyncllm.inputs.tokenizer_parts import TokenizerParts
from asyncllm.outputs.detokenizer import CompactSpecials, Detokenizer, TextStream, WindowDetokenizer


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """Where a tokenizer comes from: a folder with its files, or the metadata fields of a GGUF file."""

    folder: Path | None = None
    gguf_fields: Mapping[str, Any] | None = None  # "tokenizer.ggml.tokens" and so on, as plain Python values

    @property
    def present(self) -> bool:
        """Whether there is a tokenizer to load at all (a folder of dummy weights may have none)."""
        if self.gguf_fields is not None:
            return "tokenizer.ggml.model" in self.gguf_fields
        return self.folder is not None and holds_tokenizer(self.folder)


class Tokenizer:
    """Encodes and decodes; may be used from any number of threads at once.

    Everything that takes long runs without the interpreter lock, except building it: reading a tokenizer.json holds
    the lock inside the `tokenizers` package (0.2 s for 50,000 tokens).
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        # Both are state of a tokenizer.json, meant for training and batches; a prompt is never cut or padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.eos_token_ids: frozenset[int] = parts.eos_token_ids
        """The tokenizer's own end-of-sequence ids; the model's generation_config may name more."""
        self.special_tokens: Mapping[str, str] = parts.special_tokens
        """Name ("bos_token", "eos_token", ...) to text."""
        self.chat_templates: Mapping[str, str] = parts.chat_templates
        """Name to Jinja source; empty where the model has none."""
        self.table = build_token_table(backend, self.special_ids)
        """What each id adds to the text; None where the tokenizer's decoder has no such form."""
        self.vocab_size: int = vocabulary_size(backend) if self.table is None else len(self.table.texts)
        """The highest id + 1. A model may have more rows in its embedding; ids from here on decode to nothing."""
        self._bound = token_bound(backend, self.table)

    @classmethod
    def load(cls, data: TokenizerData) -> Tokenizer:
        """Reads and builds a tokenizer; blocking. Raises `TokenizerError`."""
        if data.gguf_fields is not None:
            return cls(read_tokenizer_gguf(data.gguf_fields))
        if data.folder is not None:
            return cls(read_tokenizer_folder(data.folder))
        raise TokenizerError("there is no tokenizer: neither a folder with tokenizer.json nor a GGUF file was given")

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning-of-sequence token, where there is one."""
        text = self.special_tokens.get("bos_token")
        return None if text is None else self.token_id(text)

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its text in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Token ids of a text, without the interpreter lock (about 1 s a megabyte).

        `add_special_tokens` follows the tokenizer's own rule (a BOS, for many); False for text that a chat template
        rendered, which holds its special tokens already. More than `limit` ids raise `ContextLengthError`, before
        encoding where the length alone tells. Text that is not Unicode (a lone surrogate) raises `InvalidPromptError`.
        """
        try:
            if limit is not None and self._bound is not None:
                at_least = self._bound.at_least(text)
                if at_least > limit:
                    raise ContextLengthError(f"the prompt has over {at_least - 1:,} tokens; the limit is {limit:,}")
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, AttributeError, UnicodeEncodeError) as error:
            wrong = "is not valid Unicode" if isinstance(text, str) else f"must be text, got {type(text).__name__}"
            raise InvalidPromptError(f"the prompt {wrong}") from error
        count = len(encoding)
        if limit is not None and count > limit:
            raise ContextLengthError(f"the prompt has {count:,} tokens; the limit is {limit:,}")
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these ids alone; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        return self._decode(token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes that one id stands for, which may be part of a character; b"" for an id without a token."""
        if self.table is not None:
            return self.table.token_bytes(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> TextStream:
        """A fresh incremental decoder for one stream of output ids that follow `prompt_ids`."""
        stream: TextStream
        if self.table is not None:
            stream = Detokenizer(self.table, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        else:
            stream = WindowDetokenizer(self._decode, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        if skip_special_tokens or spaces_between_special_tokens:
            return stream
        return CompactSpecials(stream, self.special_ids)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        # Not the backend's `decode`: it keeps the interpreter lock.
        (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)
