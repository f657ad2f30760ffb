"""What the engine knows about execution: a runner takes plans and answers with tokens. No torch here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from asyncllm.engine.plan import CacheGroup, Float32Array, Int32Array, LateTokens, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepTicket:
    """What comes of a launched step."""

    result: asyncio.Future[StepResult]
    late: asyncio.Future[LateTokens] | None = None  # where the plan has late samples


class Runner(Protocol):
    """Runs plans on a device, one after another, in launch order."""

    def launch(self, plan: StepPlan) -> StepTicket:
        """Enqueue a step and return at once. Called on the engine's loop.

        Futures complete in launch order, and of one step the late tokens before the result: as soon as they are
        sampled, while the forward pass runs. A step that fails fails its futures, except late tokens that are told,
        with the step's own exception, and so does every later launched step that needs a row of it. Cancelling a
        future does not stop its step.
        """
        ...

    async def aclose(self) -> None:
        """Wait for all launched steps, then give back threads and memory. Idempotent."""
        ...


@runtime_checkable
class Embeds(Protocol):
    """What a runner has beside that can tell the features of texts."""

    async def embed(self, token_ids: Int32Array) -> Float32Array:
        """The features [hidden] of the last of these tokens, of length 1, computed between steps. Called on the
        engine's loop."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the loaded model and its cache turned out to be: every size that the configuration left open."""

    vocab_size: int  # ids at or above this are refused, and never sampled
    max_model_len: int  # positions of one request, prompt and output together
    block_size: int  # positions in a block of the cache
    num_blocks: int  # allocatable blocks, ids 1 to num_blocks; the null block is not counted
    groups: tuple[CacheGroup, ...]
    max_num_seqs: int  # rows
    max_batched_tokens: int  # positions that one step computes
    memory_bytes: Mapping[str, int]  # by kind: weights, cache, workspace; graphs or copies
    dtype: str  # of weights and activations: "float32", "bfloat16", …
    device: str  # "cpu", "cuda:0", …
    mixed_chunk_tokens: int = 256  # prompt tokens that a step computes beside decoding rows for little more time
    full_step_tokens: int = 1024  # of a step that is worth the reading of weights
    filled_steps: bool = False  # a step is filled up to a size that has a graph, and takes as long as that
    prefix_caching: bool = (
        True  # False: what a block holds depends on its prompt's length too (rope), so none is shared
    )
