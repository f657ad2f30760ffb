"""A model whose steps take their time and no processor: what an engine is about beside the model can be measured."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.runner import ModelFacts, StepTicket
from asyncllm.engine.model import ServedModel
from asyncllm.engine.plan import CacheGroup, StepPlan, StepResult
from asyncllm.inputs.chat_template import ChatTemplate
from asyncllm.inputs.tokenizer import Tokenizer


class IdleRunner:
    """As a device is: steps follow each other without a gap while they are launched in time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[StepPlan, asyncio.Future[StepResult], float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="idle-device")
        self._thread.start()

    def launch(self, plan: StepPlan) -> StepTicket:
        """As `Runner.launch`."""
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._queue.put((plan, future, time.monotonic()))
        return StepTicket(future)

    async def aclose(self) -> None:
        """As `Runner.aclose`."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        ends = 0.0
        while (launched := self._queue.get()) is not None:
            plan, future, at = launched
            ends = max(ends, at) + self._seconds
            time.sleep(max(ends - time.monotonic(), 0.0))
            result = StepResult(plan.step, np.full(plan.num_sampled, 70 + plan.step % 26, np.int32))
            self._loop.call_soon_threadsafe(future.set_result, result)


@dataclass(frozen=True)
class IdleModel:
    """A `ModelLoader` that crosses to another process."""

    seconds: float  # of a step
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None

    async def __call__(self, config: EngineConfig, workers: Executor) -> ServedModel:
        """Bring it up."""
        length, block_size = config.max_model_len or 4096, config.block_size or 16
        facts = ModelFacts(
            vocab_size=512,
            max_model_len=length,
            block_size=block_size,
            num_blocks=config.max_num_seqs * -(-length // block_size),
            groups=(CacheGroup(),),
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens or 8192,
            memory_bytes={},
            dtype="none",
            device="none",
        )
        template = None if self.chat_template is None else ChatTemplate(self.chat_template)
        return ServedModel(IdleRunner(self.seconds), facts, self.tokenizer, template)
