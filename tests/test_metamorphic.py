"""The same request gives the same result, however the engine comes to compute it (DESIGN's first invariant).

Every variant runs the same requests on the same weights, and each completion must equal the baseline's in ids, text,
finish and stop reason and token counts (cached tokens apart). The models are float32 with wide logit margins.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncllm import AsyncEngine, Completion, PositionLogprobs, SamplingParams, StructuredOutput
from asyncllm.params import RepetitionDetection
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "windows_only": {"model_type": "mistral", "sliding_window": 24},
    "mixed_windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
}
# Blocks of 16: hardly more than the longest request needs, which for windows alone is what one step computes.
SMALL_POOLS = {"llama": 15, "windows_only": 8, "mixed_windows": 24}
DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
NAMES = tuple(DEFAULTS)
SHARED = list(range(40, 90))  # 50 ids: three full blocks of 16 and a bit


@dataclass(frozen=True)
class Request:
    prompt: Any
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)


def requests() -> list[Request]:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    # Short prompts with long answers: admitted together, they outgrow a small pool.
    # Seeds whose draws all lie clear (over 2e-6) of the border between two tokens, where float32 rounding would decide.
    growing = [SamplingParams(temperature=1.0, seed=620 + i, max_tokens=70, ignore_eos=True) for i in range(5)]
    stop_ids = list(range(60, 120))
    return [
        *(Request([11 + i], params) for i, params in enumerate(growing)),
        Request(SHARED, greedy),
        Request([*SHARED, 7, 8, 9], greedy),
        Request(SHARED[:33], SamplingParams(temperature=0.8, seed=1, max_tokens=30)),
        Request(SHARED[:32], SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=2, max_tokens=30)),
        Request([5], SamplingParams(temperature=1.3, min_p=0.05, seed=3, max_tokens=40, ignore_eos=True)),
        Request("The quick brown fox", SamplingParams(temperature=0.9, seed=4, max_tokens=40, stop=["e", "th"])),
        Request("What would", SamplingParams(temperature=1.0, seed=5, min_tokens=12, max_tokens=40, stop=[" "])),
        Request("One, two", SamplingParams(temperature=1.0, seed=6, max_tokens=50, stop_token_ids=stop_ids)),
        Request(
            "ten", SamplingParams(temperature=1.0, seed=7, max_tokens=50, stop=["a"], include_stop_str_in_output=True)
        ),
        Request([{"role": "user", "content": "Hi!"}], SamplingParams(temperature=0.7, seed=8, max_tokens=20)),
        Request(list(range(100, 300)), SamplingParams(temperature=0.8, seed=9, max_tokens=20)),
        Request("One, two", SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=30, stop_token_ids=stop_ids)),
        Request(SHARED[:33], SamplingParams(n=3, temperature=0.8, seed=12, max_tokens=20, ignore_eos=True)),
        Request("cut", SamplingParams(temperature=1.0, seed=10, max_tokens=1)),
        Request("none", SamplingParams(max_tokens=0)),
        *(Request(SHARED[i:40], params) for i, params in enumerate(parameters())),
        *(Request(SHARED[i:40], params) for i, params in enumerate(forms())),
        *(Request(SHARED[i:40], params) for i, params in enumerate(hooked())),
    ]


def parameters() -> list[SamplingParams]:
    """Every parameter of a row, in requests that run beside each other."""
    return [
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.4, presence_penalty=0.5, logprobs=2),
        SamplingParams(seed=21, max_tokens=20, frequency_penalty=1.5, logit_bias={7: 4.0, 60: -3.0}, prompt_logprobs=1),
        SamplingParams(
            seed=22, max_tokens=20, allowed_token_ids=range(30, 90), min_tokens=4, logprob_token_ids=[1, 44]
        ),
        SamplingParams(seed=23, max_tokens=20, typical_p=0.8, temperature=1.2, ignore_eos=True),
        SamplingParams(seed=24, max_tokens=20, xtc_probability=0.7, xtc_threshold=0.01, top_k=40, logprobs=0),
        SamplingParams(seed=25, max_tokens=20, top_n_sigma=1.5, min_p=0.02, bad_words=["a", "e"]),
        SamplingParams(seed=26, max_tokens=0, prompt_logprobs=0),
        SamplingParams(seed=27, max_tokens=12, truncate_prompt_tokens=9, detokenize=False),
        SamplingParams(  # special tokens, and what they look like beside each other
            temperature=0,
            max_tokens=20,
            ignore_eos=True,
            logit_bias={0: 20.0, 1: 20.0, 2: 20.0},
            frequency_penalty=1.7,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        ),
    ]


def forms() -> list[SamplingParams]:
    """Structured outputs, with forced tokens and without; with scores, for which forced tokens are sampled too."""
    record = StructuredOutput(
        json_schema={
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "state": {"enum": ["active", "inactive", "unknown"]},
                "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
            },
            "required": ["name", "state", "sizes"],
            "additionalProperties": False,
        }
    )
    return [
        SamplingParams(seed=31, max_tokens=60, structured_output=record),
        SamplingParams(seed=32, max_tokens=60, structured_output=record, logprobs=1),
        SamplingParams(seed=33, max_tokens=12, structured_output=record, min_tokens=5, frequency_penalty=0.7),
        SamplingParams(temperature=0, max_tokens=30, structured_output=StructuredOutput(regex="[a-f]{3,9}(-[0-9]+)?")),
        SamplingParams(seed=34, max_tokens=30, structured_output=StructuredOutput(choice=["left", "right", "lefty"])),
        SamplingParams(n=3, seed=36, max_tokens=40, structured_output=record),
        SamplingParams(
            seed=35, max_tokens=30, stop=[")"], structured_output=StructuredOutput(grammar='start: "(" [start] ")"')
        ),
        SamplingParams(
            seed=37,
            max_tokens=30,
            structured_output=StructuredOutput(regex="[a-f]{3,9}(-[0-9]+)?"),
            allowed_token_ids=range(15, 72),
            bad_words=["ab", "c"],
        ),
        SamplingParams(  # 30 is "<"
            seed=38,
            max_tokens=40,
            structured_output=StructuredOutput(regex="[a-f]{3,9}", after_reasoning="qwen3"),
            thinking_token_budget=5,
            logit_bias={30: 60.0},
        ),
    ]


def favour(token_ids: Sequence[int], logits: np.ndarray) -> None:
    logits[(31 * len(token_ids)) % len(logits)] += 6


async def forbid(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    await asyncio.sleep(0)
    return np.where(np.arange(len(logits)) % 3 == len(token_ids) % 3, -np.inf, logits)


async def look(token_id: int) -> None:
    await asyncio.sleep(0)


def hooked() -> list[SamplingParams]:
    """Where the host is asked before each token, and where something is computed there."""
    loop = RepetitionDetection(max_pattern_size=4, min_count=2)
    return [
        SamplingParams(seed=41, max_tokens=20, logits_processors=[favour, forbid]),
        SamplingParams(
            n=2, seed=42, max_tokens=16, logits_processors=[forbid], repetition_penalty=1.3, logprobs=1, on_token=look
        ),
        SamplingParams(temperature=0, max_tokens=30, on_token=look),
        SamplingParams(temperature=0, max_tokens=40, dry_multiplier=2.0, dry_allowed_length=1, ignore_eos=True),
        SamplingParams(
            temperature=0,
            max_tokens=40,
            dry_multiplier=1.5,
            dry_base=1.2,
            dry_penalty_last_n=30,
            dry_sequence_breakers=["a", "."],
            ignore_eos=True,
        ),
        SamplingParams(temperature=0, max_tokens=40, repetition_detection=loop, ignore_eos=True),
        SamplingParams(seed=43, max_tokens=30, bad_words=["ab", "e t", "the"]),
    ]


@dataclass(frozen=True)
class Scores:
    """Log-probabilities, equal to others within rounding."""

    positions: Sequence[PositionLogprobs | None] | None

    def entries(self) -> tuple[list[Any], list[float]]:
        found = [entry for each in self.positions or () if each for entry in (each.chosen, *each.top)]
        return [(entry.token_id, entry.bytes, entry.text) for entry in found], [entry.logprob for entry in found]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Scores)
        (mine, my_scores), (theirs, their_scores) = self.entries(), other.entries()
        return mine == theirs and my_scores == pytest.approx(their_scores, abs=1e-4)

    __hash__ = None  # type: ignore[assignment]


def outcome(completion: Completion) -> tuple[Any, ...]:
    """All of a completion that may not depend on how it was computed."""
    usage = completion.usage
    return (
        completion.prompt_token_ids,
        usage.prompt_tokens,
        usage.completion_tokens,
        [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in completion.choices],
        [Scores(c.logprobs) for c in completion.choices],
        Scores(completion.prompt_logprobs),
    )


async def generate(engine: AsyncEngine, request: Request) -> Completion:
    return await engine.generate(request.prompt, request.params, **request.options)


async def together(engine: AsyncEngine) -> list[Any]:
    return [outcome(c) for c in await asyncio.gather(*(generate(engine, request) for request in requests()))]


async def one_by_one(engine: AsyncEngine) -> list[Any]:
    return [outcome(await generate(engine, request)) for request in requests()]


async def backwards(engine: AsyncEngine) -> list[Any]:
    return [outcome(await generate(engine, request)) for request in reversed(requests())][::-1]


async def twice(engine: AsyncEngine) -> list[Any]:
    await together(engine)
    warm = await together(engine)
    assert engine.statistics().prefix_hit_rate > 0.3
    return warm


async def streamed(engine: AsyncEngine) -> list[Any]:
    """Collected by hand from the deltas, which must add up to what `result()` says."""

    async def one(request: Request) -> Any:
        stream = engine.stream(request.prompt, request.params, **request.options)
        deltas = [delta async for delta in stream]
        completion = await stream.result()
        for choice in completion.choices:
            own = [delta for delta in deltas if delta.index == choice.index]
            assert "".join(delta.text for delta in own) == choice.text
            assert tuple(i for delta in own for i in delta.token_ids) == choice.token_ids
            assert tuple(each for delta in own for each in delta.logprobs or ()) == (choice.logprobs or ())
            assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == choice.finish_reason
        assert deltas[-1].usage == completion.usage
        assert all(delta.usage is None for delta in deltas[:-1])
        return outcome(completion)

    return list(await asyncio.gather(*(one(request) for request in requests())))


async def slowly_read(engine: AsyncEngine) -> list[Any]:
    """Read only after everything is done: pending deltas merge, nothing is lost."""
    streams = [engine.stream(request.prompt, request.params, **request.options) for request in requests()]
    for stream in streams:
        await stream.start()
    while engine.statistics().requests_running or engine.statistics().requests_waiting:  # noqa: ASYNC110 (no such event)
        await asyncio.sleep(0.01)
    return [outcome(await stream.result()) for stream in streams]


async def with_cancelled_mates(engine: AsyncEngine) -> list[Any]:
    """Between requests that start and are cancelled all the time."""

    async def mate(seed: int) -> None:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=60, ignore_eos=True)
        async with engine.stream(SHARED[: 10 + seed % 30], params) as stream:
            read = 0
            async for _ in stream:
                read += 1
                if read > seed % 7:
                    break

    mates = asyncio.gather(*(mate(seed) for seed in range(30)))
    outcomes = await together(engine)
    await mates
    return outcomes


async def from_two_threads(engine: AsyncEngine) -> list[Any]:
    """Two event loops in two threads use one engine at once."""
    outcomes: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: outcomes.append(asyncio.run(together(engine)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


@dataclass(frozen=True)
class Variant:
    config: dict[str, Any]
    run: Callable[[AsyncEngine], Awaitable[list[Any]]]
    small_pool: bool = False


BASE = {"dtype": "float32", "block_size": 16, "num_blocks": 400, "max_model_len": 512}
VARIANTS = {
    "together": Variant({}, together),
    "backwards": Variant({}, backwards),
    "warm_cache": Variant({}, twice),
    "streamed": Variant({}, streamed),
    "slowly_read": Variant({}, slowly_read),
    "cancelled_mates": Variant({}, with_cancelled_mates),
    "two_threads": Variant({}, from_two_threads),
    "no_prefix_cache": Variant({"prefix_caching": False}, together),
    "chunked_prefill": Variant({"max_batched_tokens": 19}, together),
    "few_rows": Variant({"max_num_seqs": 2}, together),
    "blocks_of_8": Variant({"block_size": 8}, twice),
    "blocks_of_64": Variant({"block_size": 64, "num_blocks": 100}, together),
    "run_ahead_0": Variant({"run_ahead": 0}, together),
    "run_ahead_2": Variant({"run_ahead": 2}, together),
    "small_pool_run_ahead_0": Variant({"run_ahead": 0}, together, small_pool=True),
    "small_pool": Variant({}, together, small_pool=True),
    "small_pool_run_ahead_2": Variant({"run_ahead": 2, "max_batched_tokens": 40}, together, small_pool=True),
    "small_pool_no_cache": Variant({"prefix_caching": False}, together, small_pool=True),
    "process": Variant({"isolation": "process"}, streamed),
    "process_warm_cache": Variant({"isolation": "process", "run_ahead": 2}, twice),
    "process_slowly_read": Variant({"isolation": "process"}, slowly_read),
    "process_cancelled_mates": Variant({"isolation": "process"}, with_cancelled_mates),
    "process_two_threads": Variant({"isolation": "process"}, from_two_threads),
    "process_small_pool": Variant({"isolation": "process", "run_ahead": 0}, together, small_pool=True),
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    return write_tiny_model(folder, config=MODELS[request.param], chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def device() -> str:
    """Where the table runs; `tests/gpu` runs it elsewhere."""
    return "cpu"


@pytest.fixture(scope="module")
def baseline(model: Path, device: str) -> list[Any]:
    async def run() -> list[Any]:
        async with AsyncEngine(str(model), **BASE, device=device, run_ahead=1) as engine:
            return await one_by_one(engine)

    return asyncio.run(run())


def test_every_parameter_is_in_the_table() -> None:
    given = {name for request in requests() for name in NAMES if getattr(request.params, name) != DEFAULTS[name]}
    assert given == set(NAMES)


def test_requests_of_the_table_exercise_what_they_claim(baseline: list[Any]) -> None:
    answers = [choices for *_, choices, _, _ in baseline]
    finishes = [choices[0][3] for choices in answers]
    assert {"stop", "length"} <= set(finishes)
    stop_reasons = [choices[0][4] for choices in answers]
    assert any(isinstance(reason, str) for reason in stop_reasons)
    assert any(isinstance(reason, int) for reason in stop_reasons)
    assert len({choices[0][1] for choices in answers}) > 14  # the answers differ from one another
    compact = next(i for i, each in enumerate(requests()) if not each.params.spaces_between_special_tokens)
    assert {0, 1, 2} <= set(answers[compact][0][1])


LONG = [name for name in VARIANTS if name.startswith("process_")]
"""With a model to load in a process of its own each."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in LONG else ()) for n in VARIANTS])
async def test_variant_equals_baseline(name: str, model: Path, device: str, baseline: list[Any]) -> None:
    variant = VARIANTS[name]
    pool = {"num_blocks": SMALL_POOLS[model.name]} if variant.small_pool else {}
    async with AsyncEngine(str(model), **{**BASE, **variant.config, **pool}, device=device) as engine:
        outcomes = await variant.run(engine)
        for _ in range(500):  # an output that ended between two steps leaves its blocks to the one under way
            statistics = engine.statistics()
            if statistics.blocks_used == 0:
                break
            await asyncio.sleep(0.01)
        assert statistics.blocks_used == statistics.rows_used == 0
        assert statistics.blocks_used + statistics.blocks_cached + statistics.blocks_free == statistics.blocks_total
        if variant.small_pool:
            assert statistics.preemptions > 0
    for mine, theirs, request in zip(outcomes, baseline, requests(), strict=True):
        assert mine == theirs, request
