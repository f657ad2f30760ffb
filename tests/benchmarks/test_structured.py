"""The benchmark's own parts: its schemas, its random outputs, its device."""

from __future__ import annotations

import json
import random

from asyncllm import StructuredOutput
from benchmarks.schemas import application_schemas
from benchmarks.structured import Times, Vocabulary, is_valid, measure_throughput, possible
from tests.outputs.grammars import tokenizer


def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer(), [tokenizer().token_bytes(i) for i in range(512)])


def test_two_hundred_schemas_are_enforced() -> None:
    schemas, mine, times = application_schemas(), vocabulary(), Times()
    assert len({named.name for named in schemas}) == len({json.dumps(named.schema) for named in schemas}) == 200
    assert [named.schema for named in application_schemas()] == [named.schema for named in schemas]
    ended = 0
    for i, named in enumerate(schemas):
        start = mine.compiler.constraint(StructuredOutput(json_schema=named.schema))
        if i % 4 == 0:
            text = mine.draw(start, random.Random(i), times, longest=400)
            if text is not None:
                ended += 1
                assert is_valid(named.schema, text), text
                assert possible(start, mine.spelled(text))
    assert ended > 35
    assert times.mask


def test_validity_is_that_of_decimals() -> None:
    assert is_valid({"multipleOf": 0.01}, "4.35")
    assert not is_valid({"multipleOf": 0.01}, "4.355")
    assert not is_valid({}, "{")


async def test_a_batch_on_a_timed_device() -> None:
    found = await measure_throughput(tokenizer(), 0.001, 1, vocab_size=512, tokens=20)
    assert found["tokens_per_second"]["half"] > 0
