"""A whole engine without a model: the shadow device behind a runner with a thread of its own.

`AsyncEngine(ShadowModel())` streams tokens that are a function of the prompt and the sampling parameters (`expected`),
and each step checks that the scheduler's plan would have read exactly the right cache.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from queue import SimpleQueue

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.runner import ModelFacts, StepTicket
from asyncllm.engine.model import ServedModel, scheduler_config
from asyncllm.engine.plan import CacheGroup, LateTokens, RowSampling, StepPlan, StepResult
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.inputs.chat_template import ChatTemplate
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.shadow import ShadowDevice
from asyncllm.testing.shadow_tokens import reference_output

_Launched = tuple[int, StepTicket]


class ShadowRunner:
    """Runs plans on a shadow device. A step takes `latency` seconds on the runner's thread, asleep."""

    def __init__(self, config: SchedulerConfig, vocab_size: int, latency: float) -> None:
        self.device = ShadowDevice(config, vocab_size)
        self.latency = latency
        self.steps = 0  # completed
        self.faults: list[Exception] = []
        """What the device found wrong. A test looks at it at its end: the engine itself survives a failed step."""
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Launched | None] = SimpleQueue()
        self._flow = threading.Event()
        self._flow.set()
        self._failure: Exception | None = None
        self._lost = False  # a step has failed: so does every one that is launched already
        self._pending = 0
        self._thread = threading.Thread(target=self._run, name="asyncllm-shadow")
        self._thread.start()

    def hold(self) -> None:
        """Complete no step until `resume`."""
        self._flow.clear()

    def resume(self) -> None:
        """Go on completing steps."""
        self._flow.set()

    def fail_next(self, error: Exception) -> None:
        """The step that completes next fails, and those launched behind it."""
        self._failure = error

    def launch(self, plan: StepPlan) -> StepTicket:
        """As `Runner.launch`."""
        try:
            self.device.launch(plan)
        except Exception as error:
            self.faults.append(error)
            raise
        result: asyncio.Future[StepResult] = self._loop.create_future()
        late: asyncio.Future[LateTokens] | None = None if plan.late is None else self._loop.create_future()
        ticket = StepTicket(result, late)
        self._pending += 1
        self._queue.put((plan.step, ticket))
        return ticket

    async def aclose(self) -> None:
        """As `Runner.aclose`."""
        self.resume()
        self._queue.put(None)
        self._thread.join()
        self.closed = True

    def _run(self) -> None:
        while (launched := self._queue.get()) is not None:
            step, ticket = launched
            if ticket.late is not None:
                self._loop.call_soon_threadsafe(self._complete_late, ticket.late)
            time.sleep(self.latency)
            self._flow.wait()
            self._loop.call_soon_threadsafe(self._complete, step, ticket)

    def _complete_late(self, late: asyncio.Future[LateTokens]) -> None:
        if not self._lost:
            tokens = self.device.complete_late()
            assert tokens is not None
            late.set_result(tokens)

    def _complete(self, step: int, ticket: StepTicket) -> None:
        self.steps += 1
        self._pending -= 1
        if self._failure is None:
            return ticket.result.set_result(self.device.complete())
        if not self._lost:
            self._lost = True
            self.device.fail(step)
        if ticket.late is not None and not ticket.late.done():
            ticket.late.set_exception(self._failure)
        ticket.result.set_exception(self._failure)
        if self._pending == 0:  # the engine launches nothing new before it knows of all that is lost
            self._failure, self._lost = None, False


class ShadowModel:
    """A `ModelLoader`: pass it to `AsyncEngine` in place of a model's name. `runner` is there once it has loaded."""

    def __init__(  # noqa: PLR0913  # all by keyword
        self,
        *,
        vocab_size: int = 512,
        groups: tuple[CacheGroup, ...] = (CacheGroup(),),
        latency: float = 0.0,
        tokenizer: Tokenizer | None = None,
        chat_template: str | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        sampling_defaults: Mapping[str, float | int] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.runner: ShadowRunner | None = None
        self._groups = groups
        self._latency = latency
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._eos_token_ids = eos_token_ids
        self._sampling_defaults = sampling_defaults or {}

    async def __call__(self, config: EngineConfig, workers: Executor) -> ServedModel:
        """Bring the shadow up."""
        facts = ModelFacts(
            vocab_size=self.vocab_size,
            max_model_len=config.max_model_len or 512,
            block_size=config.block_size or 16,
            num_blocks=config.num_blocks or 256,
            groups=self._groups,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens or 256,
            memory_bytes={},
            dtype="none",
            device="shadow",
        )
        tokenizer, template = self._tokenizer, None
        if tokenizer is not None:
            template = ChatTemplate(self._chat_template or tokenizer.chat_templates, tokenizer.special_tokens)
        self.runner = ShadowRunner(scheduler_config(facts, config), self.vocab_size, self._latency)
        return ServedModel(
            runner=self.runner,
            facts=facts,
            tokenizer=tokenizer,
            chat_template=template,
            eos_token_ids=self._eos_token_ids,
            sampling_defaults=self._sampling_defaults,
        )

    def __getstate__(self) -> dict[str, object]:
        """For a process of its own, which has the runner."""
        return {**self.__dict__, "runner": None}

    def expected(
        self, prompt: Sequence[int], length: int, *, temperature: float = 0.0, seed: int = 0, choice: int = 0
    ) -> list[int]:
        """The ids that follow a prompt."""
        sampling = RowSampling(temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed % 2**64, choice=choice)
        return reference_output(prompt, sampling, self.vocab_size, length)
