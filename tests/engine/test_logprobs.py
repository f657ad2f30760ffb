"""Log-probabilities through the engine, against the float32 log-softmax of transformers."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncllm import AsyncEngine, Completion, PositionLogprobs, SamplingParams, StructuredOutput
from asyncllm.engine.logprob_reader import ManyLogprobs, token_text
from asyncllm.errors import InvalidParamsError
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_tiny_model

BASE: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_blocks": 64, "max_model_len": 256}
PROMPT = list(range(40, 73))  # 33 ids: two full blocks and one more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def scores(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)

    return scores


def check_position(position: PositionLogprobs, scores: torch.Tensor, token_id: int, top: int) -> None:
    entries = [position.chosen, *position.top]
    assert position.chosen.token_id == token_id
    for entry in entries:
        assert abs(entry.logprob - float(scores[entry.token_id])) < 1e-4
        rank = 1 + int((scores > scores[entry.token_id] + 2e-4).sum())
        assert rank <= entry.rank <= 1 + int((scores > scores[entry.token_id] - 2e-4).sum())
    best = [entry.token_id for entry in position.top[:top]]
    assert len(best) == top
    assert abs(scores[best] - scores.topk(top).values).max() < 1e-4 if top else True
    assert [entry.rank for entry in position.top[:top]] == sorted(entry.rank for entry in position.top[:top])


def check(completion: Completion, reference: Any, *, top: int, prompt_top: int | None) -> None:
    prompt, output = list(completion.prompt_token_ids), list(completion.token_ids)
    scores = reference([*prompt, *output])
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(output)
    for i, position in enumerate(completion.logprobs):
        check_position(position, scores[len(prompt) - 1 + i], output[i], top)
    if prompt_top is None:
        assert completion.prompt_logprobs is None
        return
    assert completion.prompt_logprobs is not None
    first, *rest = completion.prompt_logprobs
    assert first is None
    assert len(rest) == len(prompt) - 1
    for i, position in enumerate(rest):
        assert position is not None
        check_position(position, scores[i], prompt[i + 1], prompt_top)


@pytest.mark.parametrize("config", [{}, {"max_batched_tokens": 7}, {"run_ahead": 0}, {"num_blocks": 9}], ids=str)
async def test_equal_the_reference(config: dict[str, Any], folder: Path, reference: Any) -> None:
    """Among requests that ask for other things, or for nothing; with run-ahead, chunks, and preemption."""
    asked = [
        SamplingParams(seed=1, ignore_eos=True, max_tokens=30, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=30, logprobs=0),
        SamplingParams(seed=2, ignore_eos=True, max_tokens=30),
        SamplingParams(
            seed=3, ignore_eos=True, max_tokens=30, logprobs=20, prompt_logprobs=0, presence_penalty=2.0, top_k=4
        ),
        SamplingParams(seed=4, ignore_eos=True, max_tokens=30, logprob_token_ids=[5, 300]),
    ]
    async with AsyncEngine(str(folder), **{**BASE, **config}) as engine:
        done = await asyncio.gather(*(engine.generate(PROMPT[i:], params) for i, params in enumerate(asked)))
        if "num_blocks" in config:
            assert engine.statistics().preemptions > 0
    check(done[0], reference, top=3, prompt_top=2)
    check(done[1], reference, top=0, prompt_top=None)
    assert done[2].logprobs is None
    assert done[2].prompt_logprobs is None
    check(done[3], reference, top=20, prompt_top=0)
    check(done[4], reference, top=0, prompt_top=None)
    assert [[entry.token_id for entry in position.top] for position in done[4].logprobs or ()] == [[5, 300]] * 30


async def test_g18_prompt_logprobs_do_not_depend_on_the_cache(folder: Path, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, prompt_logprobs=1)
    async with AsyncEngine(str(folder), **BASE) as engine:
        for prompt in (PROMPT, PROMPT, [*PROMPT[:16], 9, 9], [*PROMPT[:32], 9, 9], PROMPT):
            completion = await engine.generate(prompt, params)
            assert completion.usage.cached_tokens == 0
            check(completion, reference, top=0, prompt_top=1)
        plain = await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3))
        assert plain.usage.cached_tokens == 32  # those prompts may be reused by others
        assert plain.token_ids == completion.token_ids


async def test_g12_a_prompt_may_be_scored_without_an_answer(folder: Path, reference: Any) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=1)
    async with AsyncEngine(str(folder), **BASE) as engine:
        completion = await engine.generate(PROMPT, params)
        check(completion, reference, top=1, prompt_top=1)
        assert (completion.text, completion.token_ids, completion.logprobs) == ("", (), ())
        assert (completion.finish_reason, completion.usage.completion_tokens) == ("length", 0)
        deltas = [delta async for delta in engine.stream(PROMPT, params)]
        assert [delta.token_ids for delta in deltas] == [()]
        statistics = engine.statistics()
        assert statistics.blocks_used == statistics.rows_used == 0


@pytest.mark.parametrize("changes", [{}, {"n": 3}, {"max_tokens": 2}, {"max_tokens": 0}, {"stop": ["e"]}], ids=str)
async def test_a_prompt_is_scored_where_all_that_follows_is_forced(
    changes: dict[str, Any], folder: Path, reference: Any
) -> None:
    params: dict[str, Any] = {"structured_output": StructuredOutput(choice=["yes"]), "max_tokens": 9, **changes}
    async with AsyncEngine(str(folder), **BASE) as engine:
        forced = await engine.generate(PROMPT, SamplingParams(**params))
        scored = await engine.generate(PROMPT, SamplingParams(**params, prompt_logprobs=1))
        assert scored.choices == forced.choices
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(PROMPT)
    scores = reference(PROMPT)
    for i, position in enumerate(scored.prompt_logprobs[1:]):
        assert position is not None
        check_position(position, scores[i], PROMPT[i + 1], 1)


async def test_a_prompt_that_nothing_may_follow_is_scored_for_its_own_sake_only(folder: Path) -> None:
    empty: dict[str, Any] = {"structured_output": StructuredOutput(regex="a?"), "allowed_token_ids": [5]}
    async with AsyncEngine(str(folder), **BASE) as engine:
        assert (await engine.generate(PROMPT, SamplingParams(**empty))).token_ids == ()
        with pytest.raises(InvalidParamsError, match="prompt_logprobs with structured_output"):
            await engine.generate(PROMPT, SamplingParams(**empty, prompt_logprobs=0))
        scored = await engine.generate(PROMPT, SamplingParams(**empty, prompt_logprobs=0, max_tokens=0))
        assert len(scored.prompt_logprobs or ()) == len(PROMPT)


async def test_no_token_has_no_logprobs(folder: Path) -> None:
    async with AsyncEngine(str(folder), **BASE) as engine:
        assert (await engine.generate(PROMPT, SamplingParams(max_tokens=0, logprobs=1))).logprobs == ()
        assert (await engine.generate(PROMPT, SamplingParams(max_tokens=0))).logprobs is None


async def test_streamed_ones_are_those_collected(folder: Path) -> None:
    params = SamplingParams(seed=5, max_tokens=20, logprobs=2)
    async with AsyncEngine(str(folder), **BASE) as engine:
        stream = engine.stream(PROMPT, params)
        deltas = [delta async for delta in stream]
        completion = await stream.result()
        assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)
        assert tuple(position for delta in deltas for position in delta.logprobs or ()) == completion.logprobs
        plain = [delta async for delta in engine.stream(PROMPT, SamplingParams(seed=5, max_tokens=3))]
        assert [delta.logprobs for delta in plain] == [None] * len(plain)


async def test_all_of_them(folder: Path, reference: Any) -> None:
    async with AsyncEngine(str(folder), **BASE) as engine:
        completion = await engine.generate(PROMPT[:3], SamplingParams(seed=1, max_tokens=2, logprobs="all"))
    assert completion.logprobs is not None
    vocabulary = reference([1]).shape[-1]
    for position in completion.logprobs:
        assert isinstance(position.top, ManyLogprobs) or vocabulary <= 512
        assert sorted(entry.token_id for entry in position.top) == list(range(vocabulary))
        assert abs(sum(math.exp(entry.logprob) for entry in position.top) - 1) < 1e-4
        assert position.top[0].rank == 1
        assert position.top[-1] == list(position.top)[-1]
        assert list(position.top[:3]) == list(position.top)[:3]
    check(completion, reference, top=10, prompt_top=None)


async def test_processed_ones_are_those_of_the_draw(folder: Path, reference: Any) -> None:
    params = SamplingParams(seed=1, max_tokens=6, logprobs=20, top_k=4, temperature=0.5, logit_bias={7: 50.0})
    async with AsyncEngine(str(folder), **BASE, logprobs_mode="processed") as engine:
        completion = await engine.generate(PROMPT, params)
        greedy = await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2, logprobs=1, top_k=4))
    scores = reference([*PROMPT, *completion.token_ids])
    for i, position in enumerate(completion.logprobs or ()):
        row = scores[len(PROMPT) - 1 + i].clone()
        row[7] += 50.0
        best = row.topk(4).values
        expected = (best / 0.5).log_softmax(-1)
        assert len(position.top) == 4  # what may not be drawn is no alternative
        np.testing.assert_allclose([entry.logprob for entry in position.top], expected, atol=2e-4)
        assert position.chosen in position.top
    check(greedy, reference, top=1, prompt_top=None)


def test_bytes_that_are_no_text_are_spelt_out() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text("é".encode()[:1]) == "bytes:\\xc3"
