"""ServedModel: what an engine serves, from the runner to the chat template, and how it is brought up.

`AsyncEngine` takes a `ModelLoader` in place of a model's name; that is how tests and benchmarks run the whole engine
over a runner of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.head_start import HeadStart
from asyncllm.engine.execution.runner import ModelFacts, Runner
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.errors import AsyncLLMError, CheckpointError, InvalidParamsError, ModelLoadError
from asyncllm.inputs.chat_template import ChatTemplate
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.metrics import ModelDescription
from asyncllm.outputs.constraint import Constraint
from asyncllm.params import SamplingParams

if TYPE_CHECKING:
    from asyncllm.weights.source import ModelSource

DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""The fields of SamplingParams for which a generation_config may name a default."""

UNSUPPORTED = (("no_repeat_ngram_size", 0), ("do_sample", True))
"""Other fields of a generation_config that would change an answer, and the value at which they do not."""

logger = logging.getLogger("asyncllm")


Constrain = Callable[[SamplingParams], Constraint | None]
"""The constraint of a request at its start; None where it has none. Called on worker threads; raises `RequestError`."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is loaded and ready."""

    runner: Runner
    facts: ModelFacts
    tokenizer: Tokenizer | None = None  # None: prompts are token ids, and there is no text
    chat_template: ChatTemplate | None = None
    eos_token_ids: frozenset[int] = frozenset()
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)  # for fields that a caller leaves open
    constrain: Constrain | None = None  # in place of the constraints that structured outputs make

    def describe(self, name: str) -> ModelDescription:
        """What a user may know of it, under that name."""
        facts, template = self.facts, self.chat_template
        return ModelDescription(
            name=name,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            max_num_seqs=facts.max_num_seqs,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            dtype=facts.dtype,
            device=facts.device,
            has_tokenizer=self.tokenizer is not None,
            chat_template=None if template is None else template.source,
            tool_template=None if template is None else template.tool_source,
        )


ModelLoader = Callable[[EngineConfig, Executor], Awaitable[ServedModel]]
"""Called on the engine's loop; blocking work belongs on the executor. Gives back what it took if it fails."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The loader of a Hub id, a folder or a .gguf file."""

    name: str

    async def __call__(self, config: EngineConfig, workers: Executor) -> ServedModel:
        """As `ModelLoader`."""
        try:
            with HeadStart() as head_start:
                return await _load(self.name, config, workers, head_start)
        except AsyncLLMError:
            raise
        except Exception as error:  # what a damaged model makes of the packages that read it
            # the repr of an OSError leaves out the name of its file
            reason = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else repr(error)
            raise ModelLoadError(f"{self.name} cannot be loaded: {reason}") from error


async def _load(name: str, config: EngineConfig, workers: Executor, head_start: HeadStart) -> ServedModel:
    from asyncllm.weights.source import resolve_source  # noqa: PLC0415  # brings safetensors

    loop = asyncio.get_running_loop()
    source = await loop.run_in_executor(workers, resolve_source, name, config)
    head_start.begin(config.device)
    defaults = sampling_defaults(source.generation_config) if config.model_defaults else {}
    ends = [source.generation_config.get("eos_token_id"), source.config.get("eos_token_id")]
    tokenizer = await loop.run_in_executor(workers, _load_tokenizer, source)
    template = None
    if tokenizer is not None:
        template = ChatTemplate(config.chat_template or tokenizer.chat_templates, tokenizer.special_tokens)
        ends.append(tokenizer.eos_token_ids)
    from asyncllm.engine.execution.loading import load_runner  # noqa: PLC0415  # brings torch, so not for a wrong name

    # last: whatever fails before it has nothing to give back
    runner, facts = await load_runner(source, config, head_start)
    return ServedModel(runner, facts, tokenizer, template, eos_token_ids(ends, facts.vocab_size), defaults)


def _load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """None only for dummy weights: they may come from a config.json alone."""
    if source.load_format == "dummy" and not source.tokenizer.present:
        return None
    return Tokenizer.load(source.tokenizer)


def eos_token_ids(values: Iterable[Any], vocab_size: int) -> frozenset[int]:
    """The union of end-of-sequence ids as configs state them: absent, one id or a list; none beyond the vocabulary."""
    ids: list[Any] = []
    for value in values:
        ids += value if isinstance(value, list | tuple | set | frozenset) else (value,)
    return frozenset(token_id for token_id in ids if type(token_id) is int and 0 <= token_id < vocab_size)


def sampling_defaults(generation_config: Mapping[str, Any]) -> Mapping[str, float | int]:
    """What a generation_config asks for where the caller asks for nothing. Raises `CheckpointError`."""
    found = {name: generation_config[name] for name in DEFAULTED if generation_config.get(name) is not None}
    ignored = [name for name, neutral in UNSUPPORTED if generation_config.get(name, neutral) not in (None, neutral)]
    if ignored:
        logger.warning("the model's generation_config has defaults that are not applied: %s", ", ".join(ignored))
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
        mixed_chunk_tokens=config.mixed_chunk_tokens or facts.mixed_chunk_tokens,
        full_step_tokens=facts.full_step_tokens,
        filled_steps=facts.filled_steps,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        groups=facts.groups,
        max_model_len=facts.max_model_len,
        run_ahead=config.run_ahead,
        prefix_caching=config.prefix_caching and facts.prefix_caching,
        ageing_seconds=config.ageing_seconds,
    )
