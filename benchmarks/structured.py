"""Structured output: compile times, mask times, and whether outputs are what they must be.

`python -m benchmarks.structured` measures all but the model's part; `--model` adds SmolLM2 on this machine's CPU:

- the public JSON Schema Test Suite (draft 2020-12), which the source archive of the `jsonschema` package carries:
  which schemas are taken, and that none of them allows an instance which is not valid;
- 200 schemas of applications (`benchmarks.schemas`): outputs drawn from the masks at random, a harsher test than any
  model, must all be valid where they end by themselves;
- the time of a mask, for SmolLM2's 49,152 tokens and for 151,936 made of pairs of them;
- what it costs a batch: 64 rows, half of them with a JSON schema, against none, over a device that takes 5 ms a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from numpy.typing import NDArray

from asyncllm import AsyncEngine, EngineConfig, SamplingParams, StructuredOutput
from asyncllm.cli import find_smollm2
from asyncllm.engine.execution.runner import ModelFacts, StepTicket
from asyncllm.engine.model import ModelLoader, ServedModel
from asyncllm.engine.plan import CacheGroup, LateTokens, StepPlan, StepResult
from asyncllm.errors import GrammarError
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.outputs.grammar import GrammarCompiler, GrammarConstraint, GrammarVocabulary
from asyncllm.weights.source import resolve_source
from benchmarks.schemas import application_schemas
from benchmarks.structured_report import write_section

RESULTS = Path(__file__).parent / "results" / "structured.json"
README = Path(__file__).parent.parent / "README.md"
EOS = 2
LARGE = 151_936
CLOSING = (b'"', b"]", b"}", b",")


@dataclass
class Times:
    """Milliseconds."""

    compile: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    forced: list[float] = field(default_factory=list)

    def summary(self) -> Mapping[str, Any]:
        return {name: _percentiles(values) for name, values in asdict(self).items()}


@dataclass
class Outcomes:
    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    outputs: int = 0
    ended: int = 0  # by themselves, not at the longest length
    valid: int = 0
    instances: int = 0
    too_loose: list[str] = field(default_factory=list)  # instances that are not valid, and possible
    too_strict: int = 0  # instances that are valid, and not possible (another order of properties, say)

    def summary(self) -> Mapping[str, Any]:
        return {
            **asdict(self),
            "refused": dict(self.refused.most_common()),
            "compiled": self.schemas - self.refused.total(),
        }


class Vocabulary:
    """A grammar's view of a tokenizer, and what random outputs need of it."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.compiler = GrammarCompiler(
            GrammarVocabulary(
                tokens=tokens,
                special_ids=tokenizer.special_ids,
                eos_ids=frozenset({EOS}),
                size=len(tokens),
                encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            )
        )
        self.compiler.build()
        self._closing = np.array([token.startswith(CLOSING) for token in tokens])
        self._bytes = {token[0]: i for i, token in enumerate(tokens) if len(token) == 1}

    def spelled(self, text: str) -> list[int]:
        """One token a byte, but where no token is that byte: SmolLM2 lacks some that no text has often."""
        return [self._bytes[byte] for byte in text.encode()]

    def draw(self, start: GrammarConstraint, rng: random.Random, times: Times, longest: int) -> str | None:
        """A random output; None if it did not end. What closes something open comes more often than by even odds."""
        state = start.copy()
        ids: list[int] = []
        while not state.finished and len(ids) < longest:
            began = time.perf_counter()
            forced = state.forced()
            times.forced.append((time.perf_counter() - began) * 1e3)
            if not forced:
                began = time.perf_counter()
                mask = state.mask()
                times.mask.append((time.perf_counter() - began) * 1e3)
                legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                if EOS in legal and (len(legal) == 1 or rng.random() < 0.3):
                    state.accept([EOS])
                    break
                legal = legal[legal != EOS]
                closing = legal[self._closing[legal]]
                choices = closing if len(closing) and rng.random() < 0.4 else legal
                forced = (int(choices[rng.randrange(len(choices))]),)
            state.accept(forced)
            ids += forced
        return b"".join(self.tokens[i] for i in ids).decode(errors="replace") if state.finished else None


def possible(start: GrammarConstraint, ids: Sequence[int]) -> bool:
    state = start.copy()
    try:
        state.accept(ids)
    except GrammarError:
        return False
    return state.finished or bool(state.mask()[EOS // 32] >> EOS % 32 & 1)


def is_valid(schema: Any, text: str) -> bool:
    """Decimals as decimals: a double is hardly ever a multiple of 0.01."""
    dialect = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        dialect(exact, format_checker=dialect.FORMAT_CHECKER).validate(json.loads(text, parse_float=Decimal))
    except (jsonschema.ValidationError, ValueError):
        return False
    return True


def test_suite(folder: Path | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each case of the suite with its name."""
    with tempfile.TemporaryDirectory() as made:
        root = folder if folder is not None else _fetch_suite(Path(made))
        for path in sorted([*root.glob("*.json"), *(root / "optional" / "format").glob("*.json")]):
            for case in json.loads(path.read_text(encoding="utf-8")):
                yield f"{path.stem}: {case['description']}", case


def _fetch_suite(folder: Path) -> Path:
    wanted = f"jsonschema=={version('jsonschema')}"
    command = ["download", "--quiet", "--no-deps", "--no-binary", "jsonschema", "--dest", str(folder), wanted]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/json/tests/draft2020-12"))


def measure_suite(vocabulary: Vocabulary, folder: Path | None, draws: int) -> Mapping[str, Any]:
    times, outcomes, rng = Times(), Outcomes(), random.Random(1)
    for name, case in test_suite(folder):
        start = _compiled(vocabulary, case["schema"], times, outcomes)
        if start is None:
            continue
        for test in case["tests"]:
            text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
            try:
                ids = vocabulary.spelled(text)
            except (KeyError, UnicodeEncodeError):
                continue
            outcomes.instances += 1
            if possible(start, ids) != test["valid"]:
                if test["valid"] or name.startswith("format:"):  # there the suite takes formats as annotations
                    outcomes.too_strict += 1
                else:
                    outcomes.too_loose.append(f"{name}: {text:.100}")
        _draw(vocabulary, start, case["schema"], draws, rng, times, outcomes)
    return {**outcomes.summary(), "ms": times.summary()}


def measure_applications(vocabulary: Vocabulary, draws: int) -> Mapping[str, Any]:
    times, outcomes, rng = Times(), Outcomes(), random.Random(2)
    for named in application_schemas():
        start = _compiled(vocabulary, named.schema, times, outcomes)
        if start is not None:
            _draw(vocabulary, start, named.schema, draws, rng, times, outcomes)
    return {**outcomes.summary(), "ms": times.summary()}


def _compiled(vocabulary: Vocabulary, schema: Any, times: Times, outcomes: Outcomes) -> GrammarConstraint | None:
    outcomes.schemas += 1
    began = time.perf_counter()
    try:
        start = vocabulary.compiler.constraint(StructuredOutput(json_schema=schema))
    except GrammarError as error:
        outcomes.refused[_reason(str(error))] += 1
        return None
    times.compile.append((time.perf_counter() - began) * 1e3)
    return start


def _reason(message: str) -> str:
    """Without the place, so that equal reasons count together."""
    return message.removeprefix("json_schema").removeprefix(":").partition(" (at ")[0].strip()[:60]


def _draw(  # noqa: PLR0913, PLR0917
    vocabulary: Vocabulary,
    start: GrammarConstraint,
    schema: Any,
    draws: int,
    rng: random.Random,
    times: Times,
    outcomes: Outcomes,
) -> None:
    for _ in range(draws):
        outcomes.outputs += 1
        text = vocabulary.draw(start, rng, times, longest=400)
        if text is not None:
            outcomes.ended += 1
            outcomes.valid += is_valid(schema, text)


async def measure_model(schemas: int | None, max_tokens: int) -> Mapping[str, Any]:
    """Each application schema filled in by SmolLM2, 64 at a time."""
    outcomes = Outcomes()
    async with AsyncEngine(str(find_smollm2()), device="cpu", max_num_seqs=64, max_model_len=1024) as engine:

        async def fill(name: str, schema: Any, seed: int) -> None:
            message = {"role": "user", "content": f"Make up an example of {name.partition('-')[0]} data, as JSON."}
            form = StructuredOutput(json_schema=schema)
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, structured_output=form)
            completion = await engine.generate([message], params)
            outcomes.outputs += 1
            if completion.finish_reason == "stop":
                outcomes.ended += 1
                outcomes.valid += is_valid(schema, completion.text)

        chosen = application_schemas()[slice(None, None, 1 if schemas is None else 200 // schemas)]
        began = time.perf_counter()
        await asyncio.gather(*(fill(named.name, named.schema, i) for i, named in enumerate(chosen)))
        seconds = time.perf_counter() - began
        tokens = engine.statistics().tokens_generated
    return {
        "schemas": len(chosen),
        "outputs": outcomes.outputs,
        "ended": outcomes.ended,
        "valid": outcomes.valid,
        "tokens": tokens,
        "seconds": round(seconds, 1),
    }


ROWS = 64
LONG_RECORD = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "city": {"type": "string"},
            "born": {"type": "string", "format": "date"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "state": {"enum": ["active", "inactive", "unknown"]},
        },
        "required": ["name", "city", "born", "age", "state"],
        "additionalProperties": False,
    },
}


class TimedRunner:
    """A device that takes so long for a step, and no processor time: each step begins when the one before is done, has
    its late tokens at once and the others at its end. Any legal token will do."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._free_at = 0.0
        self._rng = random.Random(0)

    def launch(self, plan: StepPlan) -> StepTicket:
        begins = max(self._loop.time(), self._free_at)
        self._free_at = begins + self._seconds
        result: asyncio.Future[StepResult] = self._loop.create_future()
        token_ids = np.full(plan.num_sampled, 70 + plan.step % 26, np.int32)
        self._loop.call_at(self._free_at, result.set_result, StepResult(plan.step, token_ids))
        if plan.late is None:
            return StepTicket(result)
        late: asyncio.Future[LateTokens] = self._loop.create_future()
        assert plan.late.masks is not None
        picked = self._pick(plan.late.masks)
        self._loop.call_at(begins + 1e-6, late.set_result, LateTokens(plan.step, picked))
        return StepTicket(result, late)

    def _pick(self, masks: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Some legal token of each row, cheaply: a device does this on its own time."""
        start, rows = self._rng.randrange(masks.shape[1]), np.arange(len(masks))
        later = masks[:, start:] != 0
        words = start + later.argmax(axis=1)
        none = np.flatnonzero(~later[rows, words - start])
        words[none] = (masks[none] != 0).argmax(axis=1)
        bits = masks[rows, words].astype(np.int64)
        token_ids: NDArray[np.int32] = (32 * words + np.log2(bits & -bits).astype(np.int64)).astype(np.int32)
        return token_ids

    async def aclose(self) -> None:
        pass


def timed_model(tokenizer: Tokenizer, seconds: float, vocab_size: int) -> ModelLoader:
    async def load(config: EngineConfig, workers: Executor) -> ServedModel:
        facts = ModelFacts(
            vocab_size=vocab_size,
            max_model_len=1024,
            block_size=16,
            num_blocks=8192,
            groups=(CacheGroup(),),
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=2048,
            memory_bytes={},
            dtype="none",
            device="cpu",
        )
        return ServedModel(TimedRunner(seconds), facts, tokenizer, eos_token_ids=frozenset({EOS}))

    return load


async def measure_throughput(
    tokenizer: Tokenizer, seconds: float, passes: int, *, vocab_size: int = 49_152, tokens: int = 200
) -> Mapping[str, Any]:
    """Tokens a second of 64 rows, and of a row without a schema; the passes without and with schemas alternate."""
    rates: dict[str, list[float]] = {"none": [], "half": [], "free row, none": [], "free row, half": []}
    processor: dict[str, list[float]] = {"none": [], "half": []}
    config = EngineConfig(max_num_seqs=ROWS, prefix_caching=False)
    async with AsyncEngine(timed_model(tokenizer, seconds, vocab_size), config=config) as engine:
        await _batch(engine, ROWS // 2, tokens)
        for _ in range(passes):
            for name, structured in (("none", 0), ("half", ROWS // 2)):
                began = time.process_time()
                batch = await _batch(engine, structured, tokens)
                processor[name].append((time.process_time() - began) / batch.tokens * 1e6)
                rates[name].append(batch.rate)
                rates[f"free row, {name}"].append(batch.free_row_rate)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "tokens_per_second": {name: round(value, 1) for name, value in middle.items()},
        "loss": round(1 - middle["half"] / middle["none"], 4),
        "loss_of_a_free_row": round(1 - middle["free row, half"] / middle["free row, none"], 4),
        "processor_us_per_token": {name: round(statistics.median(values), 1) for name, values in processor.items()},
        "step_ms": seconds * 1e3,
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


@dataclass(frozen=True)
class Batch:
    tokens: int
    rate: float  # tokens a second
    free_row_rate: float  # of one row without a schema


async def _batch(engine: AsyncEngine, structured: int, row_tokens: int) -> Batch:
    form = StructuredOutput(json_schema=LONG_RECORD)

    async def row(i: int) -> tuple[int, float]:
        structure = form if i < structured else None
        params = SamplingParams(
            seed=i, max_tokens=row_tokens, ignore_eos=True, structured_output=structure, detokenize=False
        )
        completion = await engine.generate([100 + i, 7, 8], params)
        return len(completion.token_ids), time.perf_counter()

    began = time.perf_counter()
    rows = await asyncio.gather(*(row(i) for i in range(ROWS)))
    free = rows[structured:]
    tokens = sum(count for count, _ in rows)
    return Batch(
        tokens,
        tokens / (max(end for _, end in rows) - began),
        row_tokens / (statistics.median(end for _, end in free) - began),
    )


def enlarged(tokens: Sequence[bytes]) -> list[bytes]:
    """`LARGE` tokens: those given, and pairs of them."""
    rng, made, seen = random.Random(0), list(tokens), set(tokens)
    while len(made) < LARGE:
        token = rng.choice(tokens[100:]) + rng.choice(tokens[100:])
        if token not in seen and len(token) <= 24:
            seen.add(token)
            made.append(token)
    return made


def _percentiles(values: Sequence[float]) -> Mapping[str, float]:
    if not values:
        return {}
    points = np.percentile(values, [50, 99, 100])
    return {name: round(float(point), 4) for name, point in zip(("p50", "p99", "max"), points, strict=True)}


def write_results(found: Mapping[str, Any], output: Path) -> None:
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    output.write_text(text, encoding="utf-8")
    print(text)
    if output == RESULTS:
        write_section(README, found)


def main() -> None:
    found: dict[str, Any]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="the suite's folder of one draft, in place of a download")
    parser.add_argument("--draws", type=int, default=5, help="random outputs of each schema")
    parser.add_argument("--model", action="store_true", help="SmolLM2 fills in the application schemas")
    parser.add_argument("--model-schemas", type=int, choices=(10, 50, 200), help="only so many of them")
    parser.add_argument("--only", choices=("throughput", "model"), help="measure only this again")
    parser.add_argument("--passes", type=int, default=5, help="of the batch")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_source(find_smollm2(), EngineConfig()).tokenizer)
    if arguments.only:
        found = json.loads(arguments.output.read_text(encoding="utf-8"))
        if arguments.only == "model":
            found["model"] = asyncio.run(measure_model(arguments.model_schemas, 300))
        else:
            found["throughput"] = asyncio.run(measure_throughput(tokenizer, 0.005, arguments.passes))
        return write_results(found, arguments.output)
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    found = {"llguidance": version("llguidance"), "jsonschema": version("jsonschema")}
    began = time.perf_counter()
    small = Vocabulary(tokenizer, tokens)
    found["build_seconds"] = {str(len(tokens)): round(time.perf_counter() - began, 3)}
    found["suite"] = measure_suite(small, arguments.suite, arguments.draws)
    found["applications"] = measure_applications(small, arguments.draws)
    began = time.perf_counter()
    large = Vocabulary(tokenizer, enlarged(tokens))
    found["build_seconds"][str(LARGE)] = round(time.perf_counter() - began, 3)
    found["applications_large"] = measure_applications(large, arguments.draws)
    found["throughput"] = asyncio.run(measure_throughput(tokenizer, 0.005, arguments.passes))
    if arguments.model:
        found["model"] = asyncio.run(measure_model(arguments.model_schemas, 300))
    elif arguments.output.exists():  # the last one stays
        found["model"] = json.loads(arguments.output.read_text(encoding="utf-8")).get("model")
    write_results(found, arguments.output)
    wrong = [found[part] for part in ("suite", "applications", "applications_large")]
    if any(part["too_loose"] or part["valid"] != part["ended"] for part in wrong):
        raise SystemExit("an output or an instance that is not valid was possible")


if __name__ == "__main__":
    main()
