"""Plans through the CPU runner: what comes out may depend on the request alone."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncllm.engine.execution.cpu_runner import CpuRunner
from asyncllm.engine.plan import Chunk, Fork, LateSamples, RowBias, RowJoin, RowLogits, RowSampling, StepPlan
from asyncllm.testing.tiny_models import write_piece_model, write_script_model, write_tiny_model
from tests.engine.execution.plan_driver import GREEDY, Piece, PlanDriver, seeded

WINDOWS = {
    "model_type": "qwen3",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
}


@pytest.fixture(scope="module", params=[{}, WINDOWS], ids=["full", "windows"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), config=request.param)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((length, seed)).integers(3, 512, length).tolist()


@pytest.fixture
def expected_tokens(folder: Path) -> dict[int, list[int]]:
    """By the prompt's length: 20 greedy tokens of transformers."""
    reference = AutoModelForCausalLM.from_pretrained(folder)
    tokens = {}
    for length in (1, 2, 15, 16, 17, 40):
        ids = torch.tensor([prompt(length)])
        output = reference.generate(ids, do_sample=False, max_new_tokens=20, eos_token_id=None)
        tokens[length] = output[0, length:].tolist()
    return tokens


async def test_greedy_is_that_of_transformers(folder: Path, expected_tokens: dict[int, list[int]]) -> None:
    async with await PlanDriver.load(folder) as driver:
        for length, expected in expected_tokens.items():
            assert await driver.generate(prompt(length), 20) == expected


@pytest.mark.parametrize("sampling", [GREEDY, seeded(7), seeded(2**64 - 1, top_k=9, top_p=0.9, min_p=0.01)], ids=str)
async def test_chunks_make_no_difference(folder: Path, sampling: RowSampling) -> None:
    async with await PlanDriver.load(folder) as driver:
        whole = await driver.generate(prompt(50), 12, sampling=sampling)
        for row, cuts in enumerate([(1,), (16, 32, 48), (49,), (7, 8, 9, 33)], start=1):
            assert await driver.generate(prompt(50), 12, row=row, cuts=cuts, sampling=sampling) == whole


async def test_rows_do_not_depend_on_their_mates(folder: Path) -> None:
    """Seven requests of all kinds that come and go, each as it is alone; one is in the middle of its prompt."""
    kinds = [GREEDY, seeded(1), seeded(2, top_k=5), seeded(3, top_p=0.7), seeded(4, min_p=0.1), seeded(1, choice=1)]
    prompts = [prompt(length, 1) for length in (5, 40, 1, 33, 17, 64)]
    async with await PlanDriver.load(folder) as driver:
        alone = [await driver.generate(each, 15, sampling=kind) for each, kind in zip(prompts, kinds, strict=True)]
        found: list[list[int]] = [[] for _ in prompts]
        rows = [9, 2, 5, 0, 11, 3]
        order = dict(zip(rows, range(6), strict=True))
        for i in range(6):  # request i joins while those before decode, and a seventh is chunked
            decode = rows[i - 1 :: -1] if i else []
            long = RowJoin(15, 99, GREEDY, 60)
            tokens = await driver.run(
                joins=[RowJoin(rows[i], i, kinds[i], len(prompts[i])), *([long] if i == 0 else [])],
                pieces=[Piece(rows[i], 0, prompts[i]), Piece(15, 10 * i, prompt(60)[10 * i : 10 * i + 10], i == 5)],
                decode=decode,
            )
            for row, token in zip([*decode, rows[i]], tokens, strict=False):
                found[order[row]].append(token)
        while any(len(each) < 15 for each in found):
            decode = [row for row in rows if len(found[order[row]]) < 15]
            for row, token in zip(decode, await driver.run(decode=decode), strict=True):
                found[order[row]].append(token)
    assert found == alone


async def test_the_seed_alone_decides(folder: Path) -> None:
    """G13, and: other seeds and choices give something else."""
    async with await PlanDriver.load(folder) as driver:
        first = await driver.generate(prompt(9), 12, sampling=seeded(42))
        assert await driver.generate(prompt(9), 12, row=4, sampling=seeded(42)) == first
        assert await driver.generate(prompt(9), 12, sampling=seeded(43)) != first
        assert await driver.generate(prompt(9), 12, sampling=seeded(42, choice=1)) != first


async def test_a_resumed_request_goes_on_as_it_would_have(folder: Path) -> None:
    """Preempted: it joins again with all it knows, in other blocks and chunks."""
    sampling = seeded(5)
    async with await PlanDriver.load(folder) as driver:
        expected = await driver.generate(prompt(30), 20, sampling=sampling)
        known = [*prompt(30), *expected[:8]]
        for row, cuts in ((1, ()), (2, (30,)), (3, (37,)), (4, (16, 20))):
            assert await driver.generate(known, 12, row=row, cuts=cuts, sampling=sampling) == expected[8:]


@pytest.mark.parametrize("length", [24, 40])
async def test_a_rope_that_depends_on_length_knows_the_prompt(length: int, tmp_path: Path) -> None:
    """Chunked, and resumed, a request is rotated for the prompt it was submitted with; the original length is 32."""
    config = {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    write_tiny_model(tmp_path, config=config)
    async with await PlanDriver.load(tmp_path, max_model_len=128) as driver:
        expected = await driver.generate(prompt(length), 20)
        assert await driver.generate(prompt(length), 20, row=1, cuts=(7, 20)) == expected
        known = [*prompt(length), *expected[:12]]
        resumed = [RowJoin(2, 2, GREEDY, length)]
        tokens = await driver.run(joins=resumed, pieces=[Piece(2, 0, known)])
        tokens += [token for _ in range(7) for token in await driver.run(decode=[2])]
        assert tokens == expected[12:]


async def test_steps_may_be_launched_ahead(folder: Path) -> None:
    """The sampled token feeds the next step without the host."""
    async with await PlanDriver.load(folder) as driver:
        expected = await driver.generate(prompt(20), 10)
        plans = [driver.plan(joins=[RowJoin(3, 3, GREEDY)], pieces=[Piece(3, 0, prompt(20))])]
        plans += [driver.plan(decode=[3]) for _ in range(9)]
        results = await asyncio.gather(*(driver.runner.launch(plan).result for plan in plans))
        assert [result.step for result in results] == [plan.step for plan in plans]
        assert [int(token) for result in results for token in result.token_ids] == expected


async def test_blocks_that_fell_out_of_the_window_are_not_read(folder: Path) -> None:
    """They are given to another row, whose tokens overwrite them."""
    async with await PlanDriver.load(folder) as driver:
        windowed = [group for group, each in enumerate(driver.facts.groups) if each.window is not None]
        expected = await driver.generate(prompt(60), 12)
        await driver.generate(prompt(60), 1, row=1)
        tokens = await driver.generate(prompt(60), 1, row=2)
        for group in windowed:
            for index in range((60 - 20) // driver.facts.block_size):
                driver.give(group, row=1, index=index, block=driver.tables[group, 2, index])
        await driver.run(joins=[RowJoin(1, 1, GREEDY)], pieces=[Piece(1, 0, prompt(60, 1))])
        for _ in range(11):
            tokens += await driver.run(decode=[2])
        assert tokens == expected


async def test_copy_on_write(folder: Path) -> None:
    """Two rows share a prefix; one copies the block it goes on in, before it writes there."""
    async with await PlanDriver.load(folder) as driver:
        first = await driver.generate(prompt(40), 10)
        other = [*prompt(40)[:36], *prompt(9, 2)]
        expected = await driver.generate(other, 10, row=1)
        await driver.generate(prompt(40), 1, row=2)
        copies = driver.share(source=2, target=3, positions=36)
        plan = driver.plan(joins=[RowJoin(3, 3, GREEDY)], pieces=[Piece(3, 36, other[36:])], keep=[3])
        tokens = [int((await driver.runner.launch(replace(plan, copies=copies)).result).token_ids[0])]
        rest = []
        for _ in range(9):
            token, mate = await driver.run(decode=[3, 2])
            tokens.append(token)
            rest.append(mate)
        assert tokens == expected
        assert rest == first[1:]


async def test_suppressed_ids_until_a_position(folder: Path) -> None:
    async with await PlanDriver.load(folder) as driver:
        free = await driver.generate(prompt(10), 10)
        banned = tuple(set(free))
        sampling = replace(GREEDY, suppress_before=14, suppressed=banned)
        held = await driver.generate(prompt(10), 10, sampling=sampling)
        assert not set(held[:4]) & set(banned)
        first_free = replace(GREEDY, suppress_before=10, suppressed=banned)
        assert await driver.generate(prompt(10), 10, sampling=first_free) == free


async def test_scripts_come_out_exactly(tmp_path: Path) -> None:
    script = [301, 475, 303, 331, 490, 297, 2]
    async with await PlanDriver.load(write_script_model(tmp_path, [script, [7, 8, 8]])) as driver:
        assert await driver.generate([5, 6, 301], 6) == script[1:]
        assert await driver.generate([301, 7], 6) == [8] * 6


async def test_scripts_of_pieces(tmp_path: Path) -> None:
    model = write_piece_model(tmp_path, ["Say:", "{", '"', "a", '"', ":", "1", "}"])
    async with await PlanDriver.load(model.folder) as driver:
        assert tuple(await driver.generate([3], len(model.token_ids))) == model.token_ids


async def test_ties_go_to_the_lowest_id(tmp_path: Path) -> None:
    folder = write_script_model(tmp_path, [[10, 40]], ties=[(40, 300), (40, 39)])
    async with await PlanDriver.load(folder) as driver:
        assert await driver.generate([10], 1) == [39]


async def test_a_failed_step_fails_what_needs_it(folder: Path) -> None:
    async with await PlanDriver.load(folder) as driver:
        expected = await driver.generate(prompt(20), 6)
        joins = [RowJoin(0, 0, GREEDY), RowJoin(1, 1, GREEDY)]
        await driver.run(joins=joins, pieces=[Piece(0, 0, prompt(20)), Piece(1, 0, prompt(20, 1))])
        failing = driver.plan(joins=[RowJoin(2, 2, GREEDY)], pieces=[Piece(2, 0, [10**6])], decode=[1])
        independent, dependent, later = (driver.plan(decode=rows) for rows in ([0], [1, 0], [2]))
        futures = [driver.runner.launch(plan).result for plan in (failing, independent, dependent, later)]
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(results[0], IndexError)
        assert results[1].token_ids.tolist() == [expected[1]]  # type: ignore[union-attr]
        assert "rows [1]" in str(results[2])
        assert "rows [2]" in str(results[3])
        # a new request in a broken row is as good as any
        assert await driver.generate(prompt(20), 6, row=1) == expected


async def test_close_waits_and_gives_back(folder: Path) -> None:
    before = set(threading.enumerate())
    driver = await PlanDriver.load(folder)
    plans = [driver.plan(joins=[RowJoin(0, 0, GREEDY)], pieces=[Piece(0, 0, prompt(20))])]
    plans += [driver.plan(decode=[0]) for _ in range(5)]
    futures = [driver.runner.launch(plan).result for plan in plans]
    assert isinstance(driver.runner, CpuRunner)
    executor = weakref.ref(driver.runner._executor)
    await asyncio.gather(driver.runner.aclose(), driver.runner.aclose())
    assert all(len(future.result().token_ids) == 1 for future in futures)
    assert not any(thread.name == "asyncllm-cpu" for thread in {*threading.enumerate()} - before)
    gc.collect()
    assert executor() is None
    with pytest.raises(RuntimeError, match="closed"):
        driver.runner.launch(plans[0])
    await driver.runner.aclose()


async def test_a_step_without_samples(folder: Path) -> None:
    async with await PlanDriver.load(folder) as driver:
        piece = Piece(0, 0, prompt(20)[:7], False)
        assert await driver.run(joins=[RowJoin(0, 0, seeded(1))], pieces=[piece]) == []


def late_plan(driver: PlanDriver, rows: Sequence[int], decoding: int, **late: Any) -> StepPlan:
    """Late rows are sampled; the first of them compute their new token too."""
    plan = driver.plan(decode=rows[:decoding])
    samples = LateSamples(np.array(rows, np.int32), decoding, **{"masks": None, "biases": (None,) * len(rows), **late})
    return replace(plan, decode_rows=np.zeros(0, np.int32), late=samples)


async def run_late(driver: PlanDriver, plan: StepPlan) -> list[int]:
    ticket = driver.runner.launch(plan)
    assert ticket.late is not None
    tokens, result = await ticket.late, await ticket.result
    assert tokens.step == result.step == plan.step
    assert not len(result.token_ids)
    return tokens.token_ids.tolist()


@pytest.mark.parametrize("sampling", [GREEDY, seeded(3)], ids=["greedy", "seeded"])
async def test_a_late_row_without_a_word_to_say_is_like_any_other(folder: Path, sampling: RowSampling) -> None:
    late = replace(sampling, late=True)
    async with await PlanDriver.load(folder) as driver:
        expected = await driver.generate(prompt(20), 6, sampling=sampling)
        piece = Chunk(1, 0, np.array(prompt(20), np.int32), samples=False, keeps=True)
        plan = driver.plan(joins=[RowJoin(1, 1, late, 20)], pieces=[Piece(1, 0, prompt(20), False)])
        assert not len((await driver.runner.launch(replace(plan, chunks=(piece,))).result).token_ids)
        tokens = [token for _ in range(5) for token in await run_late(driver, late_plan(driver, [1], 1))]
        tokens += await run_late(driver, late_plan(driver, [1], 0))
        assert tokens == expected


async def test_words_about_late_rows(folder: Path) -> None:
    """Masks, biases and logits in place of the model's; and the host reads what is kept."""
    vocab_size = 512
    late = replace(GREEDY, late=True, reads_logits=True)
    async with await PlanDriver.load(folder) as driver:
        token_ids = np.array(prompt(20), np.int32)
        chunks = tuple(Chunk(row, 0, token_ids, samples=False, keeps=True) for row in range(4))
        pieces = [Piece(row, 0, prompt(20), False) for row in range(4)]
        plan = driver.plan(joins=[RowJoin(row, row, late, 20) for row in range(4)], pieces=pieces)
        result = await driver.runner.launch(replace(plan, chunks=chunks)).result
        assert result.logits is not None
        assert result.logits.shape == (4, vocab_size)
        order = result.logits[0].argsort()[::-1]
        masks = np.full((4, vocab_size // 32), 0xFFFFFFFF, np.uint32)
        masks[1] = 0
        for token_id in order[[5, 9]]:
            masks[1, token_id // 32] |= np.uint32(1 << int(token_id) % 32)
        ban = RowBias(order[:2].astype(np.int32), np.array([-np.inf, -np.inf], np.float32))
        other = RowLogits(np.eye(vocab_size, dtype=np.float32)[77])
        words = {"masks": masks[[3, 0, 1, 2]], "biases": (other, None, None, ban)}
        tokens = await run_late(driver, late_plan(driver, [3, 0, 1, 2], 0, **words))
        assert tokens == [77, order[0], order[5], order[2]]


async def test_forks_share_the_logits_of_the_prompt(folder: Path) -> None:
    async with await PlanDriver.load(folder, block_size=16) as driver:
        settings = [seeded(3, choice=choice) for choice in range(3)]
        expected = [(await driver.generate(prompt(32), 4, sampling=sampling)) for sampling in settings]
        await driver.generate(prompt(32), 1, row=5)  # to be shared: two whole blocks
        for row in (1, 2):
            driver.share(source=5, target=row, positions=32)
        joins = [RowJoin(row, row, sampling, 32) for row, sampling in enumerate(settings)]
        plan = driver.plan(joins=joins, pieces=[Piece(0, 0, prompt(32))], keep=[1, 2])
        for row in (1, 2):
            driver.move(row, 32)
        result = await driver.runner.launch(replace(plan, forks=(Fork(0, 2), Fork(0, 1)))).result
        first = result.token_ids.tolist()
        assert first == [expected[0][0], expected[2][0], expected[1][0]]
        rest = [await driver.run(decode=[0, 2, 1]) for _ in range(3)]
        assert [list(tokens) for tokens in zip(*rest, strict=True)] == [expected[i][1:] for i in (0, 2, 1)]
        assert len({tuple(tokens) for tokens in expected}) == 3


async def test_a_failed_step_fails_its_late_tokens_too(folder: Path) -> None:
    async with await PlanDriver.load(folder) as driver:
        plan = late_plan(driver, [1], 0)  # nobody has kept logits for this row
        ticket = driver.runner.launch(plan)
        assert ticket.late is not None
        results = await asyncio.gather(ticket.late, ticket.result, return_exceptions=True)
        assert all(isinstance(result, KeyError) for result in results)
