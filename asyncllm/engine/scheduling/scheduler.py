"""The scheduler: which request computes what in the next step, and in which blocks.

It decides and never computes: no clock, no randomness, no I/O, so the same calls give the same plans. What does
not belong here: text, stop strings, sampling, devices, streams. A feature that gives tokens another way (drafts, a
grammar's forced tokens) changes counts, not this order of events.

**One rule for tokens.** A request has *known* tokens (prompt, and output that reached the host) and *planned*
positions. A step gives it some of the difference, within a budget of positions. A row that has caught up is steady:
each step computes the token which the step before sampled, without the host knowing it (see `row_table`).

**What always holds**, whatever is launched and not yet applied:

1. Planned positions = known tokens + tokens on their way - 1 for a row that has caught up; its known and coming
   tokens never pass its limit (max_tokens, the context, the pool), so nothing surplus is planned for an ending that
   can be foreseen.
2. A step's result is read with the step's own row map. A row may have a new owner as soon as no later plan uses it;
   internal ids are never reused.
3. A request keeps every block until no launched step has it in it: blocks are given back when its last step is
   applied, those of a passed window by applied positions. A preempted request goes back to the queue then, too,
   so tokens on their way are delivered, never sampled again.
4. A block that is written has one holder. A hit that ends inside a block is continued in a copy.
5. The prefix index holds only blocks that a launched step fills or has filled, with known tokens: those of chunks
   from their plan on (later launches, and later chunks of the same step, read them in order), generated ones from
   the apply after; never a surplus token. A failed step takes out what it put in.
6. Blocks go to the most important first. Who lacks some takes them from the least important, youngest running
   request, or waits for those that are on their way; so the most important request always gets on, and alone it
   fits (`check_admissible`, and its limit). A request is admitted when all its known tokens have blocks and
   every running row can have one more; the first in the queue is never passed over. There are at most as many
   rows as positions in a step, so a lagging row always has a share of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from operator import attrgetter

from asyncllm.engine.plan import Chunk, StepPlan, StepResult
from asyncllm.engine.scheduling.kv_cache import KvCache
from asyncllm.engine.scheduling.reports import Ended, SchedulerCounts, StepTokens
from asyncllm.engine.scheduling.request import Phase, Request, RequestSpec
from asyncllm.engine.scheduling.roster import Roster
from asyncllm.engine.scheduling.row_table import RowMap, RowTable, SteadyRows
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.engine.scheduling.step_draft import LaunchedStep, StepDraft
from asyncllm.engine.scheduling.told_scores import told_scores
from asyncllm.errors import ContextLengthError
from asyncllm.results import FinishReason

_by_order = attrgetter("order")  # most important first

__all__ = ["Ended", "RequestSpec", "Scheduler", "SchedulerConfig", "SchedulerCounts", "StepTokens"]


class Scheduler:
    """Plans steps for requests. Call `schedule`, launch what it returns, `apply` results in launch order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._capacity = config.capacity
        self._in_flight: deque[LaunchedStep] = deque()  # launched, not applied
        self.cache = KvCache(config.groups, config.block_size, config.num_blocks, config.prefix_caching)
        self._rows = RowTable(min(config.max_num_seqs, config.max_batched_tokens))
        self._roster = Roster(self._rows, self.cache, self._in_flight)
        self._sampled: list[Request] = []  # by a chunk of the last plan: steady from the next one on
        self._finals: list[Request] = []  # of the last plan: they leave their rows before the next one
        self._next_step = 0
        self._last_steady: SteadyRows | None = None  # of the last plan; None where the runner may have missed it
        self._blocked: tuple[Request, int] | None = None  # the first in the queue, and the blocks it demands
        self._prompt_tokens = self._prompt_tokens_cached = 0
        self._tokens_generated = self._tokens_computed = 0

    # --- requests come and go ---

    def check_admissible(self, prompt_tokens: int) -> None:
        """Raise `ContextLengthError` for a prompt that leaves no room for one token, even alone."""
        config = self.config
        if prompt_tokens >= config.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens, and the context of {config.max_model_len} must hold "
                "at least one more"
            )
        if prompt_tokens >= self._capacity:
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens, and the KV pool, which holds {self._capacity} of one request "
                f"({config.num_blocks} blocks of {config.block_size}), must hold at least one more; "
                "a larger num_blocks or kv_cache_memory would do"
            )

    def add(self, spec: RequestSpec) -> None:
        """Queue a request; raises as `check_admissible` does."""
        prompt_tokens = len(spec.token_ids)
        self.check_admissible(prompt_tokens)
        limit = min(prompt_tokens + spec.max_tokens, self._capacity)
        self._roster.add(Request(spec, spec.order(self.config.ageing_seconds), limit, len(self.config.groups)))

    def finish(self, request: int, reason: FinishReason) -> None:
        """End a request: aborted, or a stop string was found. Nothing happens where it has ended, or is unknown."""
        live = self._roster.live(request)
        if live is not None:
            self._roster.end(live, reason)
            self._roster.drain()

    def next_deadline(self) -> float | None:
        """The earliest deadline of a live request."""
        return self._roster.next_deadline

    def take_ended(self) -> list[Ended]:
        """Requests that have ended since the last call, except those that `fail` returned."""
        return self._roster.take_ended()

    def take_released(self) -> list[int]:
        """Requests whose row and blocks have all come back since the last call."""
        return self._roster.take_released()

    # --- planning ---

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, to be launched at once. Requests end whose deadline is `now` or earlier.

        None where there is nothing to plan: no request, `run_ahead` + 1 steps in flight, or all await results.
        """
        self._roster.expire(now)
        self._roster.drain()
        if len(self._in_flight) > self.config.run_ahead:
            return None
        self._turn_rows()
        draft = StepDraft(self._next_step, self.config.max_batched_tokens - self._rows.num_steady)
        if self._plan_running(draft):
            self._plan_waiting(draft, now)
        steady = self._rows.steady()
        if not steady.map.ids and not draft.chunks:
            return None
        plan = draft.plan(steady, steady is not self._last_steady)
        launched = draft.launched(steady)
        self._rows.advance(steady, draft.step)
        self._in_flight.append(launched)
        self._next_step += 1
        self._last_steady = steady
        self._finals = draft.finals
        self._tokens_computed += plan.num_tokens
        return plan

    def _turn_rows(self) -> None:
        """Who sampled through a chunk of the last plan is steady now; whose last token it was leaves the row."""
        for request in self._sampled:
            if request.phase is Phase.RUNNING:
                self._rows.enter_steady(request)
                self._watch(request)
        for request in self._finals:
            if request.phase is Phase.LAST:
                self._rows.vacate(request)
        self._sampled, self._finals = [], []

    def _watch(self, request: Request) -> None:
        """Look at a steady row again when its blocks are full or its last token is due."""
        self._rows.watch(request, min(self.cache.covered(request), request.limit - 2))

    def _plan_running(self, draft: StepDraft) -> bool:
        """Plan what is more than a steady row's next position; False where a request lacks blocks."""
        satisfied = True
        for request in sorted([*self._rows.due(), *self._rows.lagging()], key=_by_order):
            if request.row is None:
                continue  # preempted for a more important one
            plan = self._plan_due if self._rows.is_steady(request) else self._plan_chunk
            satisfied &= plan(request, draft)
        return satisfied

    def _plan_due(self, request: Request, draft: StepDraft) -> bool:
        """A steady row needs a block, or samples its last token."""
        position = self._rows.position(request)
        if not self._make_place(request, position + 1):
            self._rows.leave_steady(request)
            return False
        self.cache.grow(request, position + 1, draft)
        if position % self.config.block_size == 0:
            draft.borders.append(request)
        if position == request.limit - 2:
            self._finalize(request, draft)
        else:
            self._watch(request)
        return True

    def _plan_chunk(self, request: Request, draft: StepDraft) -> bool:
        """A lagging row gets as many of its known tokens as budget and blocks allow."""
        start = self._rows.position(request)
        if start >= request.known or draft.budget == 0:
            return True  # its tokens are on their way; or others took the step's positions
        if not self._make_place(request, start + 1):
            return False
        self.cache.give_back(request)
        wanted = min(request.known, start + draft.budget)
        end = min(wanted, self.cache.reach(request))
        self.cache.grow(request, end, draft)
        assert request.row is not None
        samples = end == request.known
        draft.chunks.append(Chunk(request.row, start, request.tokens(start, end), samples))
        draft.chunk_requests.append(request)
        draft.budget -= end - start
        draft.entered.update(self.cache.remember(request, end))
        self._rows.advance_to(request, end, draft.step)
        if samples and end + 1 == request.limit:
            self._finalize(request, draft)
        elif samples:
            self._sampled.append(request)
        return end == wanted

    def _finalize(self, request: Request, draft: StepDraft) -> None:
        """This step samples the request's last token."""
        request.phase = Phase.LAST
        draft.finals.append(request)

    def _plan_waiting(self, draft: StepDraft, now: float) -> None:
        """Admit requests in their order as long as rows, blocks and budget last."""
        owed = sum(map(self.cache.owed, self._rows.lagging())) if self._roster.first_waiting else 0
        while self._rows.free and draft.budget:
            request = self._roster.first_waiting
            if request is None or not self._admit(request, owed, draft, now):
                break
            owed += self.cache.owed(request)

    def _admit(self, request: Request, owed: int, draft: StepDraft, now: float) -> bool:
        """Give the first in the queue a row, if there are blocks for all that it knows, and to spare: `owed` for what
        running requests know, and one in each group for every running row."""
        spare = self.cache.pool.available - owed - len(self.config.groups) * self._rows.used
        if self._blocked is not None and self._blocked[0] is request and spare < self._blocked[1]:
            return False  # as at the last try, without looking for its prefix again
        hit = self.cache.index.longest_hit(request, draft.entered)
        demand = self.cache.demand(request, hit)
        if spare < demand:
            self._blocked = (request, demand)
            return False
        row = self._roster.admit(request, hit.positions)
        draft.joins.append(request.join(row))
        self.cache.open(request, hit, draft)
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.cached_tokens = hit.positions
            self._prompt_tokens += len(request.spec.token_ids)
            self._prompt_tokens_cached += hit.positions
        self._plan_chunk(request, draft)
        return True

    def _make_place(self, request: Request, positions: int) -> bool:
        """Whether blocks for the first `positions` positions can be had now.

        Preempts less important requests where that is what it takes, but nobody while enough blocks come back by
        themselves.
        """
        short, pool = self.cache.shortfall(request, positions), self.cache.pool
        if short == 0:
            return True
        self.cache.give_back(request)
        if short > pool.available:
            for other in self._rows.holders():
                self.cache.give_back(other)
        while short > pool.available:
            if short <= pool.available + self._roster.coming_blocks():
                return False
            victim = max(self._rows.holders(), key=_by_order)
            if victim is request:
                return False
            self._roster.preempt(victim)
        return True

    # --- results ---

    def apply(self, result: StepResult) -> StepTokens:
        """Take in the result of the oldest launched step. Requests end whose token was their last."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            raise ValueError(f"step {result.step} is not the oldest launched step")
        step = self._in_flight.popleft()
        row_map = step.row_map
        token_ids: list[int] = result.token_ids.tolist()
        if len(token_ids) != len(row_map.ids):
            raise ValueError(f"step {result.step} samples {len(row_map.ids)} tokens, its result has {len(token_ids)}")
        told = None if result.logprobs is None else told_scores(step, result.logprobs)
        if step.has_ended:
            live = [i for i, request in enumerate(row_map.requests) if request.phase is not Phase.ENDED]
            row_map = RowMap.of([row_map.requests[i] for i in live])
            token_ids = [token_ids[i] for i in live]
        deque(map(list.append, row_map.outputs, token_ids), maxlen=0)  # the fastest loop there is
        self._tokens_generated += len(token_ids)
        for chunk, request in zip(step.chunks, step.chunk_requests, strict=True):
            request.computed = chunk.start + len(chunk.token_ids)
            request.caught_up |= chunk.samples
        if not self._roster.stop_ids.isdisjoint(token_ids):
            self._end_stopped(row_map, token_ids)
        for request in step.finals:
            if request.phase is Phase.LAST:
                self._roster.end(request, FinishReason.LENGTH)
        for request in step.borders:
            if request.phase is not Phase.ENDED:
                self.cache.remember(request, request.applied)
        for block in step.sources:
            self.cache.pool.release(block)
        self._roster.drain()
        if told is not None:
            return StepTokens(step.step, row_map.ids, token_ids, told.sampled, told.prompts)
        return StepTokens(step.step, row_map.ids, token_ids)

    def _end_stopped(self, row_map: RowMap, token_ids: Sequence[int]) -> None:
        """End the requests whose new token is one of their own stop ids."""
        for request, token_id in zip(row_map.requests, token_ids, strict=True):
            if token_id in request.spec.stop_token_ids and len(request.output) > request.spec.min_tokens:
                self._roster.end(request, FinishReason.STOP, token_id)

    def fail(self, step: int) -> list[int]:
        """This launched step, and every later one, did not run or failed.

        Returns the live requests that had a part in them; they have ended, and `take_ended` does not repeat them.
        """
        failed: list[LaunchedStep] = []
        while self._in_flight and self._in_flight[-1].step >= step:
            failed.append(self._in_flight.pop())
        ended: list[int] = []
        for launched in reversed(failed):
            for block in launched.entered:
                self.cache.index.forget(block)
            for block in launched.sources:
                self.cache.pool.release(block)
            for request in (*launched.row_map.requests, *launched.chunk_requests):
                if request.phase is not Phase.ENDED:
                    ended.append(request.id)
                    self._roster.end(request, None)
                request.last_step = min(request.last_step, step - 1)
        self._last_steady = None
        self._roster.drain()
        return ended

    # --- what can be seen ---

    def counts(self) -> SchedulerCounts:
        """A snapshot of how full everything is, and totals since the start."""
        pool = self.cache.pool
        return SchedulerCounts(
            running=self._roster.num_running,
            waiting=self._roster.num_waiting,
            rows_used=self._rows.used,
            blocks_total=pool.num_blocks,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_free=pool.available - pool.cached,
            steps_in_flight=len(self._in_flight),
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            tokens_generated=self._tokens_generated,
            tokens_computed=self._tokens_computed,
            preemptions=self._roster.preemptions,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where the state contradicts itself. For tests: it looks at everything."""
        assert len(self._in_flight) <= self.config.run_ahead + 1, "too many steps in flight"
        self._rows.check_integrity()
        self._roster.check_integrity()
        coming = Counter(id(request) for step in self._in_flight for request in step.row_map.requests)
        for request in self._rows.holders():
            planned = self._rows.position(request)
            assert request.applied <= planned <= self.cache.covered(request), f"request {request.id}: no place"
            assert request.known + coming[id(request)] <= request.limit, f"request {request.id}: surplus is planned"
            if self._rows.is_steady(request):
                assert planned == request.known + coming[id(request)] - 1, f"request {request.id}: miscounted"
