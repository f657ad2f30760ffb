"""Grammars of one tokenizer: compiled once, shared by requests, stepped through one choice at a time.

llguidance does the work. What is ours: the limits that keep a grammar from taking all time or memory, the rule that a
grammar which cannot be enforced is refused, and the cache. Compiling and masks run without the interpreter lock.

Does not belong here: what text a StructuredOutput becomes (`grammar_source`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, cast

import numpy as np

from asyncllm.errors import DependencyError, GrammarError
from asyncllm.outputs.token_mask import Mask
from asyncllm.structured import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

MAX_GRAMMARS = 256
MAX_CACHED_CHARACTERS = 8 * 2**20
"""Of all cached grammars' sources."""


@dataclass(frozen=True, slots=True, eq=False)
class GrammarVocabulary:
    """What a grammar must know of a tokenizer and its model."""

    tokens: Sequence[bytes]
    """By id, what each adds to a text; b"" for an id that has no token."""
    special_ids: frozenset[int]
    """Ids that stand for no text; a grammar may name them."""
    eos_ids: frozenset[int]
    size: int
    """Of the model's logits, which may be more than there are tokens: the others are never legal."""
    encode: Callable[[str], Sequence[int]]
    """Ids of a text, without special tokens."""


class GrammarCompiler:
    """Any number of threads may use one. The first use builds what llguidance keeps of a vocabulary, with the
    interpreter lock held: 0.2 s for 50,000 tokens, 1 s for 150,000."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._building = Lock()
        self._lock = Lock()  # of what follows
        self._compiled: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        self._characters = 0
        self._specials = {vocabulary.tokens[i].decode(errors="replace"): i for i in vocabulary.special_ids}

    def constraint(self, structured: StructuredOutput) -> GrammarConstraint:
        """A constraint at its start. Compiles unless an equal one was compiled, or is being compiled: then it waits.

        Raises `GrammarError` for what cannot be compiled or enforced, `DependencyError` without the extra.
        """
        key = (structured.kind, structured.source)
        with self._lock:
            compiled = self._compiled.get(key)
            first = compiled is None
            if compiled is None:
                compiled = self._compiled[key] = Future()
                self._characters += len(key[1])
            self._compiled.move_to_end(key)
            self._evict()
        if first:
            self._compile_into(compiled, key, structured)
        try:
            return self._start(compiled.result())
        except GrammarError as error:
            raise GrammarError(str(error)) from error.__cause__  # of one's own: an exception gathers tracebacks

    def build(self) -> LLTokenizer:
        """Builds what the first use would."""
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = _build_tokenizer(self._vocabulary)
            return self._tokenizer

    def _start(self, matcher: LLMatcher) -> GrammarConstraint:
        return GrammarConstraint(matcher.deep_copy(), self._vocabulary.size, self.build().vocab_size)

    def _evict(self) -> None:
        while len(self._compiled) > MAX_GRAMMARS or (
            self._characters > MAX_CACHED_CHARACTERS and len(self._compiled) > 1
        ):
            self._drop(next(iter(self._compiled)))

    def _drop(self, key: tuple[str, str]) -> None:
        del self._compiled[key]
        self._characters -= len(key[1])

    def _compile_into(self, future: Future[LLMatcher], key: tuple[str, str], structured: StructuredOutput) -> None:
        try:
            future.set_result(self._compile(structured))
        except BaseException as error:
            with self._lock:
                if self._compiled.get(key) is future:
                    self._drop(key)  # an error is not kept: it may have been memory
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _compile(self, structured: StructuredOutput) -> LLMatcher:
        tokenizer = self.build()
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  an extra

        from asyncllm.outputs.grammar_source import grammar_source  # noqa: PLC0415  imports the extra

        grammar = grammar_source(structured, self._specials)
        try:
            limits = LLParserLimits(  # what a grammar may cost: to compile, for one mask, and in memory
                max_items_in_row=5_000,
                initial_lexer_fuel=2_000_000,  # about 40 ms
                step_lexer_fuel=400_000,  # about 30 ms
                step_max_items=100_000,  # about 5 ms
                max_lexer_states=50_000,  # about 75 MB
                max_grammar_size=500_000,
                verbose_errors=False,
            )
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # what a fault in Rust raises is not an Exception
                raise
            raise GrammarError(f"{structured.kind} cannot be compiled: {error!s:.200}") from None
        if matcher.is_error():
            raise GrammarError(f"{structured.kind} cannot be compiled: {_reason(matcher)}")
        start = self._start(matcher)
        try:
            legal = start.mask()
            start.accept(start.forced())  # where much is forced, what explodes does so here, and not in an answer
            if not start.finished:
                start.mask()
        except GrammarError:
            raise GrammarError(f"{structured.kind}: no output can satisfy it: {start.reason()}") from None
        if not legal.any() and not matcher.is_accepting():
            raise GrammarError(f"{structured.kind}: no output can satisfy it with this tokenizer")
        return matcher


class GrammarConstraint:
    """The `Constraint` of one choice."""

    __slots__ = ("_address", "_mask", "_matcher", "_rest", "_size", "_total", "_words")

    def __init__(self, matcher: LLMatcher, size: int, total: int) -> None:
        self._matcher = matcher
        self._size = size  # of the model's vocabulary
        self._total = total  # of the matcher's, which may have one more
        self._words = np.zeros(-(-total // 32), dtype=np.uint32)  # its mask
        self._address = self._words.ctypes.data
        self._mask: Mask = self._words[: -(-size // 32)]
        self._rest = np.uint32((1 << size % 32) - 1) if total > size else None  # of the mask's last word

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens came next. Raises `GrammarError` for one that is not legal."""
        for token_id in token_ids:
            if not self._matcher.consume_token(token_id):
                self._check()

    def mask(self) -> Mask:
        """Which tokens may come next."""
        self._matcher.unsafe_compute_mask_ptr(self._address, self._words.nbytes)
        self._check()
        if self._rest is not None:
            self._words[self._size // 32] &= self._rest
        return self._mask

    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next."""
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tuple(tokens)

    @property
    def finished(self) -> bool:
        """The output is complete, and nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def copy(self) -> GrammarConstraint:
        """The same state, to go on with on its own."""
        return GrammarConstraint(self._matcher.deep_copy(), self._size, self._total)

    def reason(self) -> str:
        """Why it cannot go on."""
        return _reason(self._matcher)

    def _check(self) -> None:
        # first of all: a matcher that failed allows the end of the sequence
        if self._matcher.is_error():
            raise GrammarError(f"structured_output: the grammar cannot go on: {self.reason()}")


def _reason(matcher: LLMatcher) -> str:
    """What llguidance says, on one line."""
    lines = [line.strip() for line in matcher.get_error().partition("<state>")[0].splitlines()]
    first, last = lines[0] if lines else "", next((line for line in lines[1:] if line.startswith("error:")), "")
    return f"{first:.300} {last:.200}".strip() or matcher.stop_reason()


class _Wrapper:
    """A vocabulary in the form that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._encode = vocabulary.encode
        size = vocabulary.size
        self.tokens = [*vocabulary.tokens[:size], *[b""] * (size - len(vocabulary.tokens))]
        eos = sorted(vocabulary.eos_ids)
        if not eos:  # llguidance needs one; past the logits, no mask of ours has it
            eos = [len(self.tokens)]
            self.tokens.append(b"<|end|>")
        self.eos_token_id = eos[0]
        self.eos_token_ids = eos
        # an end-of-sequence id that is text as well would be legal inside a string, and end it
        self.special_token_ids = sorted({i for i in vocabulary.special_ids if i < size}.union(eos))
        self._by_bytes = {token: i for i, token in enumerate(self.tokens) if token}
        for token_id in self.special_token_ids:
            self._by_bytes.pop(self.tokens[token_id], None)
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids whose bytes are exactly this text: the tokenizer's own, unless those would be others."""
        data = text if isinstance(text, bytes) else text.encode()
        try:
            ids = [*self._encode(data.decode())]
        except UnicodeDecodeError:
            return self._greedy(data)
        return ids if b"".join(map(self.tokens.__getitem__, ids)) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token first. A tokenizer that puts a space before each text never gives its middle back."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            for length in range(min(self._longest, len(data) - start), 0, -1):
                token_id = self._by_bytes.get(data[start : start + length])
                if token_id is not None:
                    ids.append(token_id)
                    start += length
                    break
            else:
                break  # a byte without a token: what can be said stops here
        return ids


def _build_tokenizer(vocabulary: GrammarVocabulary) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer  # noqa: PLC0415  an extra
    except ImportError as error:
        raise DependencyError("structured output needs llguidance: pip install 'asyncllm[grammar]'") from error
    wrapper = _Wrapper(vocabulary)
    return LLTokenizer(cast("TokenizerWrapper", wrapper), eos_token=wrapper.eos_token_ids)
