"""Grammars: the structured outputs of one model's requests, as constraints. Worker threads only."""

from __future__ import annotations

from threading import Lock

from asyncllm.errors import GrammarError
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.outputs.constraint import Constraint
from asyncllm.outputs.grammar import GrammarCompiler, GrammarVocabulary
from asyncllm.params import SamplingParams


class Grammars:
    """Nothing is built before the first request asks for it."""

    def __init__(self, tokenizer: Tokenizer | None, eos_ids: frozenset[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._compiler: GrammarCompiler | None = None

    def build(self) -> None:
        """Builds what the first request would. Raises `GrammarError` or `DependencyError`."""
        self._ready().build()

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """The constraint of a request at its start; None where it asks for no form. Raises `GrammarError`."""
        if params.structured_output is None:
            return None
        return self._ready().constraint(params.structured_output)

    def _ready(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._vocabulary())
            return self._compiler

    def _vocabulary(self) -> GrammarVocabulary:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise GrammarError("structured_output needs a tokenizer, which this model does not have")
        if tokenizer.table is None:
            raise GrammarError("structured_output needs tokens that stand for fixed bytes; this tokenizer's do not")

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        return GrammarVocabulary(
            tokens=[tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)],
            special_ids=tokenizer.special_ids,
            eos_ids=self._eos_ids,
            size=self._vocab_size,
            encode=encode,
        )
