"""The benchmark's own parts: its schemas, its random outputs, its device."""

from __future__ import annotations

import json
import random
import subprocess

import pytest

from asyncllm import StructuredOutput
from benchmarks.schemas import application_schemas
from benchmarks.structured import Times, Vocabulary, is_valid, measure_suite, measure_throughput, possible
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


@pytest.mark.full
def test_the_public_suite_finds_nothing_too_loose() -> None:
    try:
        found = measure_suite(vocabulary(), None, draws=3)
    except subprocess.CalledProcessError:
        pytest.skip("the suite cannot be fetched")
    assert found["too_loose"] == []
    assert found["valid"] == found["ended"] > 400
    assert found["compiled"] > 180


def test_validity_is_that_of_decimals() -> None:
    assert is_valid({"multipleOf": 0.01}, "4.35")
    assert not is_valid({"multipleOf": 0.01}, "4.355")
    assert not is_valid({}, "{")


async def test_a_batch_on_a_timed_device() -> None:
    found = await measure_throughput(tokenizer(), 0.001, 1, vocab_size=512, tokens=20)
    assert found["tokens_per_second"]["half"] > 0
