"""The faults of the collection that concern structured output (G10, G29 to G32), through the public API."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from asyncllm import AsyncEngine, Completion, SamplingParams, StructuredOutput
from asyncllm.api import create_asgi_app
from asyncllm.errors import ConfigError, GrammarError, InvalidParamsError
from asyncllm.inputs.tokenizer import Tokenizer, TokenizerData
from asyncllm.outputs import grammar
from asyncllm.testing.tiny_models import write_piece_model, write_tiny_model
from tests.api.asgi_client import post
from tests.outputs.grammars import check_valid
from tests.outputs.test_json_schema import NODE, TREE

SMALL = {"dtype": "float32", "device": "cpu", "block_size": 16, "num_blocks": 512, "max_model_len": 512}
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("random"))


async def draw(engine: AsyncEngine, form: StructuredOutput, seeds: int, **more: Any) -> list[Completion]:
    """So many answers, T = 1."""
    requests = (
        engine.generate(PROMPT, SamplingParams(seed=seed, max_tokens=120, structured_output=form, **more))
        for seed in range(seeds)
    )
    return list(await asyncio.gather(*requests))


async def test_g10_masked_alternatives_have_finite_logprobs(random_model: Path) -> None:
    async with AsyncEngine(str(random_model), **SMALL) as engine:
        for completion in await draw(engine, StructuredOutput(choice=["yes", "no"]), 3, logprobs=20):
            assert completion.text in ("yes", "no")
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)
            for position in completion.logprobs:
                entries = (position.chosen, *position.top)
                assert all(math.isfinite(entry.logprob) and entry.logprob <= 0 for entry in entries)
                json.dumps([entry.logprob for entry in entries], allow_nan=False)


KEYWORDS: list[dict[str, Any]] = [
    {"type": "object", "required": ["a"], "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    {
        "type": "array",
        "items": {"type": "integer", "minimum": -3, "exclusiveMaximum": 20},
        "minItems": 1,
        "maxItems": 4,
    },
    {"type": "object", "patternProperties": {"^x?y$": {"const": 1}}, "additionalProperties": False, "minProperties": 1},
    {"type": "string", "pattern": "^[ab]+$", "maxLength": 6},
    {"type": "string", "format": "date-time"},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 100},
    {"oneOf": [{"const": "x"}, {"type": "array", "items": {"enum": [1, None]}, "maxItems": 3}]},
]


async def test_g29_every_finished_output_is_valid(random_model: Path) -> None:
    async with AsyncEngine(str(random_model), **SMALL) as engine:
        for schema in KEYWORDS:
            finished = 0
            for completion in await draw(engine, StructuredOutput(json_schema=schema), 10):
                if completion.finish_reason == "stop":
                    finished += 1
                    check_valid(schema, completion.text)
            assert finished, schema
        for keyword in ("uniqueItems", "contains", "not", "dependentRequired", "propertyNames"):
            with pytest.raises(GrammarError, match=keyword):
                await draw(engine, StructuredOutput(json_schema={keyword: {"a": 1}}), 1)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [(["go", "{", '"a"', ":", "1", "}"], '{"a":1}'), (["go", "{", "}", '"a"', ":", "2", "}"], '{"a":2}')],
)
async def test_g29_required_is_not_dropped(pieces: list[str], text: str, tmp_path: Path) -> None:
    """A model that would write `{}` cannot, where a property is required; one that writes it is let."""
    model = write_piece_model(tmp_path, pieces)
    form = StructuredOutput(json_schema={"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}})
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        params = SamplingParams(temperature=0, max_tokens=20, structured_output=form)
        completion = await engine.generate(model.prompt, params)
    assert (completion.text, completion.finish_reason) == (text, "stop")


async def test_a_form_beside_allowed_ids_and_bad_words(random_model: Path) -> None:
    """What may come is what all of them leave; where that is nothing, the output ends if it may, else with an error."""
    tokenizer = Tokenizer.load(TokenizerData(folder=random_model))

    def ids(text: str) -> list[int]:
        return [i for letter in text for i in tokenizer.encode(letter, add_special_tokens=False)]

    word = StructuredOutput(regex="[a-z]{3}")
    async with AsyncEngine(str(random_model), **SMALL) as engine:
        for completion in await draw(engine, word, 8, allowed_token_ids=ids("abc1"), bad_words=["ab"]):
            assert completion.finish_reason == "stop"
            assert re.fullmatch("[abc]{3}", completion.text)
            assert "ab" not in completion.text
        for completion in await draw(engine, StructuredOutput(regex="a[bc]?"), 3, allowed_token_ids=ids("a")):
            assert (completion.text, completion.finish_reason) == ("a", "stop")
        wrong = "structured_output with allowed_token_ids or bad_words"
        stream = engine.stream(PROMPT, SamplingParams(structured_output=word, allowed_token_ids=ids("123")))
        with pytest.raises(InvalidParamsError, match=wrong):
            await stream.start()
        choice = StructuredOutput(choice=["xa", "xb"])
        with pytest.raises(InvalidParamsError, match=wrong):
            await draw(engine, choice, 1, bad_words=["a", "b"])
        for completion in await draw(engine, choice, 3, bad_words=["b"]):
            assert completion.text == "xa"


async def test_g30_recursive_schemas(random_model: Path) -> None:
    async with AsyncEngine(str(random_model), **SMALL) as engine:
        await draw(engine, StructuredOutput(regex="a"), 1)
        for schema in (NODE, TREE):
            started = time.perf_counter()
            completions = await draw(engine, StructuredOutput(json_schema=schema), 1, logit_bias={})
            assert time.perf_counter() - started < 10
            completions += await draw(engine, StructuredOutput(json_schema=schema), 8)
            ended = [completion for completion in completions if completion.finish_reason == "stop"]
            assert ended
            for completion in ended:
                check_valid(schema, completion.text)
        for cycle in (
            {"$ref": "#"},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        ):
            with pytest.raises(GrammarError, match="itself"):
                await draw(engine, StructuredOutput(json_schema=cycle), 1)
        assert (await draw(engine, StructuredOutput(regex="a"), 1))[0].text == "a"


@pytest.mark.parametrize("form", [{"json_object": True}, {"json_schema": {**TREE, "required": ["v", "children"]}}])
async def test_g31_a_model_that_likes_blanks(form: dict[str, Any], random_model: Path) -> None:
    tokenizer = Tokenizer.load(TokenizerData(folder=random_model))
    blanks = [i for i in range(512) if tokenizer.token_bytes(i).decode(errors="replace").isspace()]
    bias = dict.fromkeys(blanks, 50.0) | {tokenizer.encode('"')[0]: 45.0, tokenizer.encode("}")[0]: 48.0}
    async with AsyncEngine(str(random_model), **SMALL) as engine:
        params = {"logit_bias": bias, "ignore_eos": False}
        for completion in await draw(engine, StructuredOutput(**form), 5, **params):
            assert completion.finish_reason == "stop"
            json.loads(completion.text)
            assert not re.search(r"\s\s", re.sub(r'"(?:[^"\\]|\\.)*"', '""', completion.text))


BAD: list[dict[str, Any]] = [
    {"json_schema": {"type": "str"}},
    {"json_schema": {"properties": {"a": "bar"}}},
    {"json_schema": {"type": "string", "pattern": "("}},
    {"json_schema": {"type": "string", "pattern": "(?<=a)b"}},
    {"regex": "(?!a)b"},
    {"grammar": "root ::= foo"},
    {"grammar": "start: foo"},
]


async def test_g32_a_bad_grammar_harms_nobody(random_model: Path) -> None:
    async with AsyncEngine(str(random_model), **SMALL) as engine:
        beside = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True)))
        for form in BAD * 2:  # the second time is no better
            started = time.perf_counter()
            with pytest.raises(GrammarError):
                await draw(engine, StructuredOutput(**form), 1)
            assert time.perf_counter() - started < 10
        with pytest.raises(InvalidParamsError, match="characters"):
            StructuredOutput(json_schema={"description": "x" * 3_000_000})
        assert len((await beside).token_ids) == 200
        good = await draw(engine, StructuredOutput(regex="ok"), 1)
        assert good[0].text == "ok"
        for _ in range(200):  # a step that is under way still holds them
            if not engine.statistics().blocks_used:
                break
            await asyncio.sleep(0.01)
        assert engine.statistics().blocks_used == 0


class Point(BaseModel):
    x: bool
    y: bool

    @field_validator("y")
    @classmethod
    def never_true(cls, value: bool) -> bool:
        if value:
            raise ValueError("y is true")
        return value


async def test_parsed_is_a_validated_model_or_says_why_not(random_model: Path) -> None:
    async with AsyncEngine(str(random_model), **SMALL) as engine:
        refused = 0
        for completion in await draw(engine, StructuredOutput.from_model(Point), 12):
            y = json.loads(completion.text)["y"]
            if y:
                refused += 1
                with pytest.raises(ValidationError, match="y is true"):
                    completion.parsed  # noqa: B018
            else:
                assert completion.parsed == Point(x=json.loads(completion.text)["x"], y=False)
        assert 0 < refused < 12
        cut = await engine.generate(PROMPT, SamplingParams(max_tokens=2, structured_output=Point))
        assert (cut.finish_reason, cut.parsed) == ("length", None)
        stopped = await engine.generate(PROMPT, SamplingParams(stop=['"x"'], structured_output=Point))
        assert (stopped.finish_reason, stopped.stop_reason, stopped.parsed) == ("stop", '"x"', None)
        direct = await engine.generate(PROMPT, StructuredOutput(choice=["left", "right"]))
        assert direct.parsed == direct.text
        assert direct.parsed in ("left", "right")
        plain = await engine.generate(PROMPT, SamplingParams(max_tokens=2))
        assert plain.parsed is None


async def test_an_output_ends_where_it_is_complete(random_model: Path) -> None:
    """Whatever the request says of its end; and no token is spent on saying so."""
    form = StructuredOutput(choice=["yes"])
    async with AsyncEngine(str(random_model), **SMALL) as engine:
        for more in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"logprobs": 1}):
            completion = await engine.generate(PROMPT, SamplingParams(structured_output=form, **more))
            assert (completion.text, completion.finish_reason) == ("yes", "stop")


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


async def test_a_model_without_a_tokenizer_refuses(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    remove_tokenizer(tmp_path)
    async with AsyncEngine(str(tmp_path), load_format="dummy", **SMALL) as engine:
        with pytest.raises(GrammarError, match="tokenizer"):
            await engine.generate([1, 2], StructuredOutput(regex="a"))
    with pytest.raises(ConfigError, match="prepare_grammars"):
        await AsyncEngine(str(tmp_path), load_format="dummy", prepare_grammars=True, **SMALL).start()


async def test_grammars_may_be_prepared_at_start(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    original = grammar._build_tokenizer
    monkeypatch.setattr(grammar, "_build_tokenizer", lambda known: (built.append(known.size), original(known))[1])
    async with AsyncEngine(str(random_model), prepare_grammars=True, **SMALL) as engine:
        assert built == [512]
        assert (await engine.generate(PROMPT, StructuredOutput(regex="ab"))).text == "ab"
        assert built == [512]


async def test_choices_share_a_grammar_and_go_their_own_ways(random_model: Path) -> None:
    async with AsyncEngine(str(random_model), **SMALL) as engine:
        params = SamplingParams(n=6, seed=3, structured_output=StructuredOutput(choice=["left", "right", "up"]))
        choices = (await engine.generate(PROMPT, params)).choices
        assert all(choice.parsed == choice.text and choice.text in ("left", "right", "up") for choice in choices)
        assert len({choice.text for choice in choices}) > 1


THOUGHT = ["go", "<think>", "Hm", "</think>", '{"a":', "1", "}"]
NUMBERED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("budget", [None, 3])
async def test_a_form_that_begins_after_the_reasoning(budget: int | None, tmp_path: Path) -> None:
    """A model that thinks first is let; with the form alone it cannot. The API lets it where it knows of the format."""
    template = "{{ messages[-1].content }}{# <think> </think> #}"
    model = write_piece_model(tmp_path, THOUGHT, chat_template=template)
    form = StructuredOutput(json_schema=NUMBERED, after_reasoning=True)
    async with AsyncEngine(str(tmp_path), **SMALL) as engine:
        params = SamplingParams(temperature=0, max_tokens=20, structured_output=form, thinking_token_budget=budget)
        completion = await engine.generate(model.prompt, params)
        assert (completion.text, completion.finish_reason) == ('<think>Hm</think>{"a":1}', "stop")
        assert completion.parsed == {"a": 1}
        begun = await engine.generate("go<think>Hm</think>", params)
        assert (begun.text, begun.parsed) == ('{"a":1}', {"a": 1})
        with pytest.raises(InvalidParamsError, match="reasoning format"):
            await engine.generate("go", StructuredOutput(json_schema=NUMBERED, after_reasoning="none such"))
        bare = await engine.generate(
            model.prompt,
            replace(params, structured_output=replace(form, after_reasoning=False), thinking_token_budget=None),
        )
        assert "<think>" not in bare.text
        body = {
            "messages": [{"role": "user", "content": "go"}],
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"schema": NUMBERED}},
        }
        message = (await post(create_asgi_app(engine), "/v1/chat/completions", body)).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm", '{"a":1}')
