"""ServedModel: what an engine serves, from the runner to the chat template, and how it is brought up.

`AsyncEngine` takes a `ModelLoader` in place of a model's name; that is how tests and benchmarks run the whole engine
over a runner of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.runner import ModelFacts, Runner
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.errors import CheckpointError, InvalidParamsError
from asyncllm.inputs.chat_template import ChatTemplate
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.params import SamplingParams

if TYPE_CHECKING:
    from asyncllm.weights.source import ModelSource

DEFAULTED = ("temperature", "top_k", "top_p", "min_p")
"""The fields of SamplingParams for which a generation_config may name a default."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is loaded and ready."""

    runner: Runner
    facts: ModelFacts
    tokenizer: Tokenizer | None = None  # None: prompts are token ids, and there is no text
    chat_template: ChatTemplate | None = None
    eos_token_ids: frozenset[int] = frozenset()
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)  # for fields that a caller leaves open


ModelLoader = Callable[[EngineConfig, Executor], Awaitable[ServedModel]]
"""Called on the engine's loop; blocking work belongs on the executor. Gives back what it took if it fails."""


def model_loader(name: str) -> ModelLoader:
    """The loader of a Hub id, a folder or a .gguf file."""

    async def load(config: EngineConfig, workers: Executor) -> ServedModel:
        from asyncllm.engine.execution.loading import load_runner  # noqa: PLC0415  # brings torch
        from asyncllm.weights.source import resolve_source  # noqa: PLC0415  # brings huggingface_hub

        loop = asyncio.get_running_loop()
        source = await loop.run_in_executor(workers, resolve_source, name, config)
        tokenizer = await loop.run_in_executor(workers, _load_tokenizer, source)
        defaults = sampling_defaults(source.generation_config) if config.model_defaults else {}
        runner, facts = await load_runner(source, config)
        ends = [source.generation_config.get("eos_token_id"), source.config.get("eos_token_id")]
        if tokenizer is None:
            return ServedModel(runner, facts, None, None, eos_token_ids(ends, facts.vocab_size), defaults)
        return ServedModel(
            runner=runner,
            facts=facts,
            tokenizer=tokenizer,
            chat_template=ChatTemplate(config.chat_template or tokenizer.chat_templates, tokenizer.special_tokens),
            eos_token_ids=eos_token_ids([*ends, tokenizer.eos_token_ids], facts.vocab_size),
            sampling_defaults=defaults,
        )

    return load


def _load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """None only for dummy weights: they may come from a config.json alone."""
    if source.load_format == "dummy" and not source.tokenizer.present:
        return None
    return Tokenizer.load(source.tokenizer)


def eos_token_ids(values: Iterable[Any], vocab_size: int) -> frozenset[int]:
    """The union of end-of-sequence ids as configs state them: absent, one id or a list; none beyond the vocabulary."""
    ids: set[int] = set()
    for value in values:
        ids.update(value if isinstance(value, list | tuple | set | frozenset) else () if value is None else (value,))
    return frozenset(token_id for token_id in ids if type(token_id) is int and 0 <= token_id < vocab_size)


def sampling_defaults(generation_config: Mapping[str, Any]) -> Mapping[str, float | int]:
    """What a generation_config asks for where the caller asks for nothing. Raises `CheckpointError`."""
    found = {name: generation_config[name] for name in DEFAULTED if generation_config.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidParamsError as error:
        raise CheckpointError(
            f"generation_config.json has an impossible default: {error}; model_defaults=False leaves it out"
        ) from error
    return found


def scheduler_config(facts: ModelFacts, config: EngineConfig) -> SchedulerConfig:
    """The scheduler's sizes, from what the model turned out to be and what the user set."""
    return SchedulerConfig(
        max_num_seqs=facts.max_num_seqs,
        max_batched_tokens=facts.max_batched_tokens,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        groups=facts.groups,
        max_model_len=facts.max_model_len,
        run_ahead=config.run_ahead,
        prefix_caching=config.prefix_caching and facts.prefix_caching,
        ageing_seconds=config.ageing_seconds,
    )
