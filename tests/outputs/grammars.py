"""Grammars for tests: one compiler over a tiny byte-level vocabulary, texts put to a grammar, and random outputs."""

from __future__ import annotations

import functools
import json
import random
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema
import numpy as np
from numpy.typing import NDArray

from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.outputs.grammar import GrammarCompiler, GrammarConstraint, GrammarVocabulary
from asyncllm.structured import StructuredOutput
from asyncllm.testing.byte_tokenizer import byte_tokenizer

EOS = 2
SIZE = 520
"""Of the logits: the tokenizer has 512 ids."""


def vocabulary(tokenizer: Tokenizer, size: int, eos_ids: frozenset[int] = frozenset({EOS})) -> GrammarVocabulary:
    return GrammarVocabulary(
        tokens=[tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        eos_ids=eos_ids,
        size=size,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


@functools.cache
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary(tokenizer(), SIZE))


@functools.cache
def byte_ids() -> dict[int, int]:
    table = [tokenizer().token_bytes(i) for i in range(tokenizer().vocab_size)]
    return {token[0]: i for i, token in enumerate(table) if len(token) == 1}


def constraint(**form: Any) -> GrammarConstraint:
    return compiler().constraint(StructuredOutput(**form))


def accepts(start: GrammarConstraint, text: str) -> bool:
    """Whether the text is a complete output, however it is cut into tokens."""
    matcher = start.copy()._matcher
    ids = [byte_ids()[byte] for byte in text.encode()]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def legal(mask: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The ids whose bits are set."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def random_output(
    start: GrammarConstraint, rng: random.Random, longest: int = 250, jumps: bool = True
) -> tuple[list[int], bool]:
    """Tokens drawn from the masks, and whether the output is complete. It ends, and closes what is open, more readily
    than even odds would."""
    state = start.copy()
    ids: list[int] = []
    closing = frozenset(byte_ids()[byte] for byte in b'"]},')
    while not state.finished and len(ids) < longest:
        forced = state.forced() if jumps else ()
        if forced:
            state.accept(forced)
            ids += forced
            continue
        choices = legal(state.mask()).tolist()
        if EOS in choices and (len(choices) == 1 or rng.random() < 0.3):
            state.accept([EOS])
            break
        preferred = [i for i in choices if i in closing] if rng.random() < 0.4 else []
        ids.append(rng.choice(preferred or [i for i in choices if i != EOS]))
        state.accept(ids[-1:])
    return ids, state.finished


def outputs(start: GrammarConstraint, seeds: int, longest: int = 250) -> list[str]:
    """The complete ones of so many random outputs."""
    found = [random_output(start, random.Random(seed), longest) for seed in range(seeds)]
    return [tokenizer().decode(ids) for ids, complete in found if complete]


def check_valid(schema: Any, text: str) -> None:
    """The text is JSON, and valid: decimals are compared as such, and formats are looked at."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    dialect = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    with localcontext(prec=10_000):  # for the remainders of large numbers
        dialect(exact, format_checker=dialect.FORMAT_CHECKER).validate(json.loads(text, parse_float=_number))


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of too many digits even for it
        return float(text)
