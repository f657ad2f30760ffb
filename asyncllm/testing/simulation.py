"""Simulation: a scheduler and a shadow device driven by hand, every answer checked against an oracle.

The oracle knows what each request's tokens must be (`reference_output`), how it must end, whose prefixes may be
shared and who may not be passed over. It shares no code with the scheduler but the block hash. Plans and results
go through bytes on their way, and the log of calls is replayed at the end: the same calls give the same plans.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from asyncllm.engine.plan import Chunk, StepPlan
from asyncllm.engine.scheduling.prefix_index import block_hash, root_hash
from asyncllm.engine.scheduling.reports import Ended, StepTokens
from asyncllm.engine.scheduling.request import RequestSpec
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.results import FinishReason
from asyncllm.testing.shadow import ShadowDevice
from asyncllm.testing.shadow_tokens import Word, arbitrary_word, extend_history, hash_tokens, reference_output

_SIZES = sorted({times << power for times in (1, 3) for power in range(24)})


@dataclass(slots=True)
class Expected:
    """What the oracle knows of a request."""

    spec: RequestSpec
    limit: int  # tokens, prompt and output
    reference: list[int]  # the output if only the limit ended it
    output: list[int] = field(default_factory=list)  # delivered
    ended: Ended | None = None
    failed: bool = False
    aborted: bool = False
    spoken: int | None = None  # late: how many tokens were out when the host last said its word
    joined: bool = False
    leading: bool = False  # there is another whose prompt it can wait for
    prompted: bool = False  # a step has computed all of its prompt
    released: bool = False

    @property
    def live(self) -> bool:
        """Neither ended nor failed."""
        return self.ended is None and not self.failed

    @property
    def awaiting(self) -> bool:
        """A late request whose next token needs the host's word."""
        return self.spec.sampling.late and self.live and self.spoken != len(self.output)

    @property
    def history(self) -> list[int]:
        """Prompt and delivered tokens."""
        return [*self.spec.token_ids.tolist(), *self.output]


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a block with a certain hash must hold."""

    last_position: int
    history: int


class Simulation:
    """Drive it with `add`, `launch`, `complete`, `abort`, `fail` and `wait`; each checks what it sees and raises
    AssertionError where something is wrong. `finish` runs everything to its end."""

    def __init__(self, config: SchedulerConfig, vocab_size: int, scheduler_type: type[Scheduler] = Scheduler) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.now = 0.0
        self.scheduler = scheduler_type(config)
        self.device = ShadowDevice(config, vocab_size)
        self.requests: dict[int, Expected] = {}  # all that ever were
        self._live: dict[int, Expected] = {}
        self.steps_in_flight: list[int] = []
        self._contents: dict[bytes, BlockContent] = {}  # of every block that may be in the prefix index
        self._chains: dict[int, bytes] = {}  # request -> the hash of its last full block
        self._log: list[tuple[str, object]] = []  # calls that change the scheduler
        self._plans: list[bytes] = []
        self._rows: dict[int, int] = {}  # row -> who took it last
        self._most_share = 0  # tokens: the largest share of what waited, since nothing did

    @property
    def live(self) -> list[int]:
        """Requests that have not ended."""
        return list(self._live)

    # --- what can happen ---

    def add(self, spec: RequestSpec) -> None:
        """Queue a request that is admissible."""
        self._call("add", spec)
        limit = min(len(spec.token_ids) + spec.max_tokens, self.config.capacity)
        prompt = spec.token_ids.tolist()
        host = partial(self._host, prompt) if spec.sampling.late else None
        reference = reference_output(prompt, spec.sampling, self.vocab_size, limit - len(prompt), host)
        self.requests[spec.request] = self._live[spec.request] = expected = Expected(spec, limit, reference)
        if spec.fork_of is not None:
            leader = self.requests[spec.fork_of]
            expected.leading = leader.live and not leader.joined and not leader.output
        self._chains[spec.request] = root_hash({} if spec.cache_salt is None else {"salt": spec.cache_salt})
        self._note_blocks(expected, 0)
        self.check()

    def launch(self) -> StepPlan | None:
        """Schedule a step and launch it."""
        plan = self.scheduler.schedule(self.now)
        self._log.append(("schedule", self.now))
        self._plans.append(pickle.dumps(plan))
        self._take_ended()
        for request, expected in self._live.items():
            deadline = expected.spec.deadline
            assert deadline is None or self.now < deadline, f"request {request} outlived its deadline"
        self._note_share(plan)
        if plan is None:
            idle = not self.steps_in_flight and not any(expected.awaiting for expected in self._live.values())
            assert not idle or not self._live, "nothing is in flight, and still nothing is planned"
        else:
            plan = pickle.loads(self._plans[-1])
            assert plan is not None
            self._check_joins(plan)
            self.device.launch(plan)
            self.steps_in_flight.append(plan.step)
        self.check()
        return plan

    def complete(self) -> StepTokens | None:
        """The oldest launched step completes, if there is one."""
        if not self.steps_in_flight:
            return None
        self.complete_late()
        result = pickle.loads(pickle.dumps(self.device.complete()))
        self.steps_in_flight.pop(0)
        tokens: StepTokens = self._call("apply", result)
        self._receive(tokens.requests, tokens.token_ids)
        return tokens

    def complete_late(self) -> None:
        """The late tokens of the oldest launched step are known, if they are not yet."""
        late = pickle.loads(pickle.dumps(self.device.complete_late())) if self.steps_in_flight else None
        if late is not None:
            tokens: StepTokens = self._call("apply_late", late)
            self._receive(tokens.requests, tokens.token_ids)

    def speak(self, request: int) -> None:
        """The host says its word about the next token of a late request, if that is due."""
        expected = self.requests[request]
        if not expected.awaiting:
            return
        word = self._host(expected.spec.token_ids.tolist(), expected.output)
        expected.spoken = len(expected.output)
        if isinstance(word, tuple):
            taken = self._call("force", request, word)
            assert word[: len(taken)] == tuple(taken)
            self._receive([request] * len(taken), taken)
            assert len(taken) == len(word) or not expected.live, f"request {request} drops tokens that it was given"
        else:
            self._call("bind", request, word)
            self.check()

    def _host(self, prompt: Sequence[int], output: Sequence[int]) -> Word:
        return arbitrary_word(hash_tokens([*prompt, *output]), self.vocab_size)

    def abort(self, request: int) -> None:
        """Abort a request, dead or alive."""
        expected = self.requests[request]
        expected.aborted |= expected.live
        self._log.append(("finish", request))
        self.scheduler.finish(request, FinishReason.ABORT)
        self._take_ended()
        self.check()

    def fail(self, step: int) -> None:
        """This launched step fails, with all later ones."""
        self.device.fail(step)
        self.steps_in_flight = [earlier for earlier in self.steps_in_flight if earlier < step]
        for request in self._call("fail", step):
            expected = self.requests[request]
            assert expected.live, f"request {request} failed after its end"
            expected.failed = True
            del self._live[request]
        self._take_ended()
        self.check()

    def _receive(self, requests: Sequence[int], token_ids: Sequence[int]) -> None:
        for request, token_id in zip(requests, token_ids, strict=True):
            self._deliver(self.requests[request], token_id)
        self._take_ended()
        for request in requests:
            expected = self.requests[request]
            assert self._final_reason(expected) is None or not expected.live, f"request {request} outlived its end"
        self.check()

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def run(self, steps: int) -> None:
        """Say every word that is due, launch as far ahead as the scheduler goes, complete the oldest step; `steps`
        times."""
        for _ in range(steps):
            for request in self.live:
                self.speak(request)
            while len(self.steps_in_flight) <= self.config.run_ahead and self.launch() is not None:
                pass
            self.complete()

    def finish(self) -> None:
        """Run everything to its end: nothing is left, everything is released, and the log replays."""
        bound = 100 + 10 * sum(expected.limit for expected in self._live.values()) * (1 + len(self._live))
        while self._live or self.steps_in_flight:
            self.run(1)
            bound -= 1
            assert bound > 0, f"requests {self.live} never end"
        counts = self.scheduler.counts()
        assert counts.blocks_used == counts.rows_used == counts.running == counts.waiting == 0, f"left over: {counts}"
        assert all(expected.released for expected in self.requests.values()), "a request was never released"
        assert self.scheduler.next_deadline() is None
        self.check_replay()

    # --- what is checked ---

    def check(self) -> None:
        """Checks that hold at any moment."""
        self.scheduler.check_integrity()
        for request in self.scheduler.take_released():
            expected = self.requests[request]
            assert not expected.live, f"request {request} was released alive"
            assert not expected.released, f"request {request} was released twice"
            expected.released = True
        held = self.scheduler.cache.pool.holders
        lost = [block for block in self.device.blocks_in_flight() if not held(block)]
        assert not lost, f"blocks {lost} are free while a launched step uses them"
        for block, (group, digest) in self.scheduler.cache.index.entries.items():
            content = self._contents.get(digest)
            assert content is not None, f"block {block} is in the prefix index with tokens that nobody was given"
            assert self.device.holds(block, group, content.last_position, content.history), (
                f"block {block} does not hold what the prefix index says"
            )
        counts = self.scheduler.counts()
        assert counts.blocks_used + counts.blocks_cached + counts.blocks_free == counts.blocks_total
        assert counts.running + counts.waiting == len(self._live), "live requests miscounted"

    def check_replay(self) -> None:
        """The same calls, on a new scheduler, give the same plans."""
        scheduler = type(self.scheduler)(self.config)
        plans = iter(self._plans)
        for name, argument in self._log:
            if name == "schedule":
                assert isinstance(argument, float)
                assert pickle.dumps(scheduler.schedule(argument)) == next(plans), "a replayed plan differs"
            elif name == "finish":
                assert isinstance(argument, int)
                scheduler.finish(argument, FinishReason.ABORT)
            else:
                assert isinstance(argument, tuple)
                getattr(scheduler, name)(*argument)

    def _check_joins(self, plan: StepPlan) -> None:
        starts = {chunk.row: chunk.start for chunk in plan.chunks}
        self._rows.update((join.row, join.request) for join in plan.joins)
        for chunk in plan.chunks:
            self.requests[self._rows[chunk.row]].prompted |= chunk.samples or chunk.keeps
        forked = {self._rows[fork.row]: plan.chunks[fork.chunk] for fork in plan.forks}
        for join in plan.joins:
            expected = self.requests[join.request]
            assert expected.live, f"request {join.request} joins after its end"
            if join.request in forked:
                self._check_fork(expected, forked[join.request])
                continue
            assert not self._follows(expected), f"request {join.request} does not wait for the prompt that it shares"
            cached = starts[join.row]
            sharers = [
                other
                for other in self.requests.values()
                if other is not expected
                and other.spec.cache_salt == expected.spec.cache_salt
                and other.history[:cached] == expected.history[:cached]
            ]
            assert not cached or sharers or expected.joined, f"request {join.request} shares a prefix with nobody"
            assert cached < len(expected.history), f"request {join.request} computes nothing"
            expected.joined = True
        for join in plan.joins:
            for other in self._live.values():
                if join.request in forked or self._follows(other):
                    continue
                passed_over = not other.joined and self._precedes(other, self.requests[join.request])
                assert not passed_over, f"request {join.request} passes over request {other.spec.request}"

    def _note_share(self, plan: StepPlan | None) -> None:
        """Steps with decoding rows compute no more known tokens than the share that waiting requests have in them, or a
        full step where there are more requests than rows, and what fills the step up to one of the sizes that devices
        like."""
        rows: list[int] = [] if plan is None else plan.decode_rows.tolist()
        if plan is not None and plan.late is not None:
            rows += plan.late.rows[: plan.late.decoding].tolist()
        decoding = {self._rows[row] for row in rows}
        waiting = [len(expected.history) for request, expected in self._live.items() if request not in decoding]
        share = math.ceil(sum(waiting) * len(waiting) / max(1, len(waiting) + len(decoding)))
        self._most_share = max(self._most_share, share) if waiting else 0
        if plan is not None and rows and plan.chunks:
            computed = sum(len(chunk.token_ids) for chunk in plan.chunks)
            least = max(self.config.mixed_chunk_tokens, self._most_share)
            config = self.config
            crowded = len(self._live) > min(config.max_num_seqs, config.max_batched_tokens)
            full = config.full_step_tokens if crowded else 0
            # late rows whose word is not said decode too
            counts = range(len(rows), max(len(rows), self.config.max_num_seqs - len(plan.chunks)) + 1)
            most = max(next(size for size in _SIZES if size >= max(count + least, full)) - count for count in counts)
            assert computed <= most, f"{len(rows)} rows are held up by {computed} tokens"

    def _check_fork(self, expected: Expected, chunk: Chunk) -> None:
        leader = self.requests[self._rows[chunk.row]]
        assert expected.spec.fork_of == leader.spec.request, f"request {expected.spec.request} forks from another"
        assert expected.history == leader.history, f"request {expected.spec.request} forks from another history"
        assert chunk.start + len(chunk.token_ids) == len(leader.history)
        expected.joined = True

    def _follows(self, expected: Expected) -> bool:
        """Whether the request waits for the prompt of the one whose choice it is."""
        if expected.spec.fork_of is None or expected.joined or not expected.leading:
            return False
        leader = self.requests[expected.spec.fork_of]
        return leader.live and not leader.prompted

    def _precedes(self, a: Expected, b: Expected) -> bool:
        """Whether a is to be admitted before b: by level of priority and age, deadline, arrival."""

        def rank(expected: Expected) -> tuple[float, float, float, int]:
            spec = expected.spec
            level = spec.priority + spec.arrival // self.config.ageing_seconds
            return (level, math.inf if spec.deadline is None else spec.deadline, spec.arrival, spec.request)

        return rank(a) < rank(b)

    def _deliver(self, expected: Expected, token_id: int) -> None:
        request = expected.spec.request
        assert expected.live, f"request {request} gets a token after its end"
        at = len(expected.output)
        assert at < len(expected.reference), f"request {request} gets more tokens than it may"
        assert token_id == expected.reference[at], f"request {request}: token {at} is wrong"
        known = len(expected.spec.token_ids) + at
        expected.output.append(token_id)
        self._note_blocks(expected, known)

    def _note_blocks(self, expected: Expected, start: int) -> None:
        """The blocks that are full with the tokens from position `start` on may be in the prefix index now."""
        size, history = self.config.block_size, expected.history
        for end in range((start // size + 1) * size, len(history) + 1, size):
            tokens = np.array(history[end - size : end], dtype=np.int32).tobytes()
            digest = self._chains[expected.spec.request] = block_hash(self._chains[expected.spec.request], tokens)
            state = 0
            for token_id in history[:end]:
                state = extend_history(state, token_id)
            self._contents[digest] = BlockContent(end - 1, state)

    def _final_reason(self, expected: Expected) -> FinishReason | None:
        """How the request must have ended by its tokens."""
        spec, output = expected.spec, expected.output
        if output and output[-1] in spec.stop_token_ids and len(output) > spec.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) == len(expected.reference) else None

    def _take_ended(self) -> None:
        for ended in self.scheduler.take_ended():
            expected = self.requests[ended.request]
            assert expected.live, f"request {ended.request} ends twice"
            expected.ended = ended
            del self._live[ended.request]
            by_tokens = self._final_reason(expected)
            if ended.reason is FinishReason.ABORT:
                assert expected.aborted, f"request {ended.request} was not aborted"
            elif ended.reason is FinishReason.DEADLINE:
                deadline = expected.spec.deadline
                assert deadline is not None, f"request {ended.request} has no deadline"
                assert deadline <= self.now, f"request {ended.request} expired too early"
            else:
                assert ended.reason is by_tokens, f"request {ended.request} ends with {ended.reason}, not {by_tokens}"
            stop_id = expected.output[-1] if ended.reason is FinishReason.STOP else None
            assert ended.stop_token_id == stop_id

    def _call(self, name: str, *arguments: object) -> Any:
        self._log.append((name, arguments))
        return getattr(self.scheduler, name)(*arguments)
