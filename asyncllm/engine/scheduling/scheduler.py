"""The scheduler: which request computes what in the next step, and in which blocks.

It decides and never computes: no clock, no randomness, no I/O, so the same calls give the same plans. What does
not belong here: text, stop strings, sampling, devices, streams. A feature that gives tokens another way (drafts, a
grammar's forced tokens) changes counts, not this order of events.

**One rule for tokens.** A request has *known* tokens (prompt, and output that reached the host) and *planned*
positions. A step gives it some of the difference, within a budget of positions. A row that has caught up is steady:
each step computes the token which the step before sampled, without the host knowing it (see `row_table`).

**Late rows** are never steady. A step that computes their last known token keeps the logits; when the host has said
its word about them (`bind`), the next plan samples them and computes the new token at once, which the host gets to
know (`apply_late`) while that step still runs. Or the host knows the next tokens itself (`force`): they are known
tokens like any others. Until then the row is left out of plans.

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
   rows as positions in a step, so some known token is always computed.
7. Beside decoding rows a step computes only so many known tokens that they do not wait long, and where requests wait
   for rows, these are taken little by little (`chunk_limit`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from asyncllm.engine.plan import NO_TOKEN, Adjustment, LateTokens, StepPlan, StepResult
from asyncllm.engine.scheduling.kv_cache import KvCache
from asyncllm.engine.scheduling.reports import Ended, SchedulerCounts, StepTokens
from asyncllm.engine.scheduling.request import Phase, Request, RequestSpec
from asyncllm.engine.scheduling.roster import Roster
from asyncllm.engine.scheduling.row_table import RowMap, RowTable, SteadyRows
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.engine.scheduling.step_draft import LaunchedStep
from asyncllm.engine.scheduling.step_planner import StepPlanner
from asyncllm.engine.scheduling.told_scores import NO_SCORES, kept_logits, told_late_scores, told_scores
from asyncllm.errors import ContextLengthError
from asyncllm.results import FinishReason

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
        self._planner = StepPlanner(config, self.cache, self._rows, self._roster)
        self._next_step = 0
        self._last_steady: SteadyRows | None = None  # of the last plan; None where the runner may have missed it
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

    def bind(self, request: int, adjustment: Adjustment) -> None:
        """The host's word about the next token of a late request, all of whose tokens it knows.

        It may come before there are logits. Nothing happens where the request has ended, or is unknown.
        """
        live = self._roster.live(request)
        if live is not None:
            self._check_known(live)
            live.adjustment = adjustment
            self._rows.look_ready(live)

    def force(self, request: int, token_ids: Sequence[int]) -> Sequence[int]:
        """The host knows the next tokens of a late request, all of whose tokens before it knows.

        Returns those that the request takes: none of it after its end, which one of them may be.
        """
        live = self._roster.live(request)
        if live is None:
            return ()
        self._check_known(live)
        live.adjustment = None
        self._rows.lose_logits(live)
        self._planner.grown(live)
        for count, token_id in enumerate(token_ids, 1):
            if self._take_token(live, token_id):
                token_ids = token_ids[:count]
                break
        self._tokens_generated += len(token_ids)
        self._roster.drain()
        return token_ids

    def _check_known(self, request: Request) -> None:
        if not request.late or request.coming:
            raise ValueError(f"request {request.id} waits for no word of the host")

    def _take_token(self, request: Request, token_id: int) -> bool:
        """A token of a late request becomes known. True where it is the last one."""
        request.output.append(token_id)
        if token_id in request.spec.stop_token_ids and len(request.output) > request.spec.min_tokens:
            self._roster.end(request, FinishReason.STOP, token_id)
        elif request.known == request.limit:
            self._roster.end(request, FinishReason.LENGTH)
        return request.phase is Phase.ENDED

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

    @property
    def full(self) -> bool:
        """Whether so many steps are in flight that none is planned."""
        return len(self._in_flight) > self.config.run_ahead

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, to be launched at once. Requests end whose deadline is `now` or earlier.

        None where there is nothing to plan: no request, `run_ahead` + 1 steps in flight, or all await results or the
        host's word.
        """
        self._roster.expire(now)
        self._roster.drain()
        if self.full:
            return None
        draft = self._planner.draft(self._next_step, now)
        steady = self._rows.steady()
        if not steady.map.ids and draft.empty:
            return None
        self.cache.make_copies(draft)
        plan = draft.plan(steady, steady is not self._last_steady)
        launched = draft.launched(steady)
        self._rows.advance(steady, draft.step)
        self._in_flight.append(launched)
        self._next_step += 1
        self._last_steady = steady
        self._tokens_computed += plan.num_tokens
        return plan

    # --- results ---

    def apply_late(self, tokens: LateTokens) -> StepTokens:
        """Take in the late tokens of the oldest launched step. Requests end whose token was their last."""
        step = self._oldest(tokens.step)
        token_ids: list[int] = tokens.token_ids.tolist()
        if step.late_applied or len(token_ids) != len(step.late):
            raise ValueError(f"step {step.step} awaits {len(step.late)} late tokens, and {len(token_ids)} came")
        step.late_applied = True
        unsampled = self._end_unsampled([sample.request for sample in step.late], token_ids)
        scores = () if tokens.logprobs is None else told_late_scores(step, tokens.logprobs)
        requests: list[int] = []
        taken: list[int] = []
        for sample, token_id in zip(step.late, token_ids, strict=True):
            request = sample.request
            request.coming = False
            if request.phase is not Phase.ENDED:
                requests.append(request.id)
                taken.append(token_id)
                self._take_token(request, token_id)
        self._tokens_generated += len(taken)
        return StepTokens(step.step, requests, taken, scores, unsampled=unsampled)

    def _oldest(self, number: int) -> LaunchedStep:
        if not self._in_flight or self._in_flight[0].step != number:
            raise ValueError(f"step {number} is not the oldest launched step")
        return self._in_flight[0]

    def apply(self, result: StepResult) -> StepTokens:
        """Take in the result of the oldest launched step. Requests end whose token was their last."""
        step = self._oldest(result.step)
        row_map = step.row_map
        token_ids: list[int] = result.token_ids.tolist()
        if len(token_ids) != len(row_map.ids):
            raise ValueError(f"step {result.step} samples {len(row_map.ids)} tokens, its result has {len(token_ids)}")
        if not step.late_applied:
            raise ValueError(f"step {result.step} has late tokens, which come before its result")
        self._in_flight.popleft()
        unsampled: Sequence[int] = ()
        if NO_TOKEN in token_ids:
            unsampled = self._end_unsampled(row_map.requests, token_ids)
            step.has_ended = True
        told = NO_SCORES if result.logprobs is None else told_scores(step, result.logprobs)
        kept = () if result.logits is None else kept_logits(step, result.logits)
        if step.has_ended:
            live = [i for i, request in enumerate(row_map.requests) if request.phase is not Phase.ENDED]
            row_map = RowMap.of([row_map.requests[i] for i in live])
            token_ids = [token_ids[i] for i in live]
        deque(map(list.append, row_map.outputs, token_ids), maxlen=0)  # the fastest loop there is
        self._tokens_generated += len(token_ids)
        for chunk, request in zip(step.chunks, step.chunk_requests, strict=True):
            request.computed = chunk.start + len(chunk.token_ids)
            request.caught_up |= chunk.samples
        for request in step.forks:
            request.computed = request.forked_at
            request.caught_up = not request.late
        if not self._roster.stop_ids.isdisjoint(token_ids):
            self._end_stopped(row_map, token_ids)
        for request in step.finals:
            if request.phase is Phase.LAST:
                self._roster.end(request, FinishReason.LENGTH)
        for request in step.borders:
            if request.phase is not Phase.ENDED:
                self.cache.remember(request, request.applied)
        for sample in step.late[: step.late_decoding]:
            request, request.computed = sample.request, sample.end
            if request.phase is Phase.ENDED:
                request.computed = min(sample.end, request.known)  # not a token that came after its end
            elif sample.end % self.config.block_size == 0:
                self.cache.remember(request, sample.end)
        for block in step.sources:
            self.cache.pool.release(block)
        self._roster.drain()
        return StepTokens(step.step, row_map.ids, token_ids, told.sampled, told.prompts, kept, unsampled)

    def _end_unsampled(self, requests: Sequence[Request], token_ids: Sequence[int]) -> list[int]:
        """End the live requests for which there was no token to sample; returns their ids."""
        ended = [
            request
            for request, token_id in zip(requests, token_ids, strict=True)
            if token_id == NO_TOKEN and request.phase is not Phase.ENDED
        ]
        for request in ended:
            self._roster.end(request, None)
            self.cache.disown(request)
        return [request.id for request in ended]

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
            late = [sample.request for sample in launched.late]
            copied = [request for request in launched.copied if request.row is not None]  # else it begins anew
            for request in (*launched.row_map.requests, *launched.chunk_requests, *launched.forks, *copied, *late):
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
            prompt_tokens=self._planner.prompt_tokens,
            prompt_tokens_cached=self._planner.prompt_tokens_cached,
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
            coming[id(request)] += request.coming
            assert request.known + coming[id(request)] <= request.limit, f"request {request.id}: surplus is planned"
            if self._rows.is_steady(request):
                assert planned == request.known + coming[id(request)] - 1, f"request {request.id}: miscounted"
