"""StepPlanner: fills the draft of one step, running requests first, then waiting ones.

What always holds of its plans is said in `scheduler`, whose other half this is: that one takes results in.
"""

from __future__ import annotations

from operator import attrgetter

from asyncllm.engine.plan import Chunk, Fork
from asyncllm.engine.scheduling.chunk_limit import ChunkLimit, tokens_worth_a_step
from asyncllm.engine.scheduling.kv_cache import KvCache
from asyncllm.engine.scheduling.request import Phase, Request
from asyncllm.engine.scheduling.roster import Roster
from asyncllm.engine.scheduling.row_table import RowTable
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.engine.scheduling.step_draft import LateSample, StepDraft

_by_order = attrgetter("order")  # most important first


class StepPlanner:
    """Decides who computes what in a step, and in which blocks."""

    def __init__(self, config: SchedulerConfig, cache: KvCache, rows: RowTable, roster: Roster) -> None:
        self._config = config
        self._cache = cache
        self._rows = rows
        self._roster = roster
        self._sampled: list[Request] = []  # by a chunk of the last plan: steady from the next one on
        self._finals: list[Request] = []  # of the last plan: they leave their rows before the next one
        self._blocked: tuple[Request, int] | None = None  # the first in the queue, and the blocks it demands
        self._limit = ChunkLimit(config.mixed_chunk_tokens, config.full_step_tokens)
        self._fresh = 1.0  # the share of prompts that no cache has, of the last ones
        self.prompt_tokens = 0  # of requests that were scheduled, cached ones included
        self.prompt_tokens_cached = 0

    def draft(self, step: int, now: float) -> StepDraft:
        """What the step will do beside the next position of each steady row."""
        self._turn_rows()
        draft = StepDraft(step, now, self._budget())
        if self._plan_running(draft):
            self._plan_waiting(draft)
        self._limit.took(draft.computed)
        self._finals = draft.finals
        return draft

    def _budget(self) -> int:
        """How many known tokens the step may compute."""
        rows, room = self._rows, self._config.max_batched_tokens - self._rows.num_steady - self._rows.num_ready
        first = self._roster.first_waiting
        if first is None and not rows.lagging():
            self._limit.rest()
            return room
        lagging = [tokens for request in rows.lagging() if (tokens := request.known - rows.position(request)) > 0]
        waiting, requests, behind = sum(lagging), len(lagging), 0
        if first is not None and (self._blocked is None or self._blocked[0] is not first):
            tokens, queued = self._admissible()
            waiting, requests = waiting + tokens, requests + queued
            behind = max(0, self._roster.num_queued - rows.free)
        decoding = rows.num_steady + rows.num_kept
        most = self._limit.tokens(waiting, requests, decoding, behind / rows.num_rows)
        return self._worth_a_step(room if most is None else min(room, most), waiting, requests)

    def _admissible(self) -> tuple[int, int]:
        """About how many tokens that no cache has, and of how many requests, wait for the rows that are free."""
        queued = min(self._rows.free, self._roster.num_queued)
        return int(self._fresh * self._roster.waiting_tokens(queued)), queued

    def _worth_a_step(self, budget: int, waiting: int, requests: int, computed: int = 0) -> int:
        """The budget, or less where the device would fill up a step that computes all that is `waiting` of so many
        requests beside what it computes already; see `tokens_worth_a_step`."""
        if not self._config.filled_steps or not 0 < waiting < budget:
            return budget
        decoding = self._rows.num_steady + self._rows.num_kept
        planned, small = decoding + computed, self._config.mixed_chunk_tokens
        size = tokens_worth_a_step(planned + waiting, decoding + requests, small)  # who gets through decodes then
        return size - planned if planned < size < planned + waiting else budget

    def grown(self, request: Request) -> None:
        """A request knows more tokens than before, without a step."""
        if self._blocked is not None and self._blocked[0] is request:
            self._blocked = None

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
        self._rows.watch(request, min(self._cache.covered(request), request.limit - 2))

    def _plan_running(self, draft: StepDraft) -> bool:
        """Plan what is more than a steady row's next position; False where a request lacks blocks."""
        satisfied = True
        for request in sorted([*self._rows.due(), *self._rows.lagging()], key=_by_order):
            if request.row is None:
                continue  # preempted for a more important one
            if self._rows.is_steady(request):
                satisfied &= self._plan_due(request, draft)
            elif self._rows.is_ready(request):
                satisfied &= self._plan_late(request, draft)
            else:
                satisfied &= self._plan_chunk(request, draft)
        return satisfied

    def _plan_due(self, request: Request, draft: StepDraft) -> bool:
        """A steady row needs a block, or samples its last token."""
        position = self._rows.position(request)
        if not self._make_place(request, position + 1):
            self._rows.leave_steady(request)
            return False
        self._cache.grow(request, position + 1, draft)
        if position % self._config.block_size == 0:
            draft.borders.append(request)
        if position == request.limit - 2:
            self._finalize(request, draft)
        else:
            self._watch(request)
        return True

    def _plan_late(self, request: Request, draft: StepDraft) -> bool:
        """A late row is sampled, and computes its new token unless that is the last one."""
        position, adjustment = self._rows.position(request), request.adjustment
        assert adjustment is not None
        assert request.row is not None
        sample = LateSample(request, request.row, adjustment, position + 1)
        if sample.end == request.limit:
            draft.late_finals.append(sample._replace(end=position))
            self._rows.lose_logits(request)
            self._rows.advance_to(request, position, draft.step)
            self._finalize(request, draft)
        else:
            if self._cache.covered(request) <= position:
                if not self._make_place(request, position + 1):
                    return False
                self._cache.grow(request, position + 1, draft)
            draft.late.append(sample)
            self._rows.use_logits(request)
            self._rows.advance_to(request, position + 1, draft.step)
        request.adjustment, request.coming = None, True
        return True

    def _plan_chunk(self, request: Request, draft: StepDraft) -> bool:
        """A lagging row gets as many of its known tokens as budget and blocks allow."""
        start, known = self._rows.position(request), request.known
        if start >= known or draft.budget == 0:
            return True  # its tokens are on their way; or others took the step's positions
        if not self._make_place(request, start + 1):
            return False
        self._cache.give_back(request)
        wanted = min(known, start + draft.budget)
        end = min(wanted, self._cache.reach(request))
        self._cache.grow(request, end, draft)
        assert request.row is not None
        caught_up = end == known
        samples = caught_up and not request.late
        keeps = caught_up and request.late
        draft.chunks.append(Chunk(request.row, start, request.tokens(start, end), samples, keeps))
        draft.chunk_requests.append(request)
        draft.budget -= end - start
        draft.computed += end - start
        draft.entered.update(self._cache.remember(request, end))
        self._rows.advance_to(request, end, draft.step)
        if caught_up:
            self._go_on(request, draft)
            if request.followers:
                self._fork_followers(request, draft)
        return end == wanted

    def _go_on(self, request: Request, draft: StepDraft) -> None:
        """All that the request knows is planned, and this step samples its next token, or keeps the logits for it."""
        if request.late:
            self._rows.keep_logits(request)
        elif request.known + 1 == request.limit:
            self._finalize(request, draft)
        else:
            self._sampled.append(request)

    def _fork_followers(self, leader: Request, draft: StepDraft) -> None:
        """The last chunk is that of a prompt which further choices wait for: they take rows, as long as there are some
        and blocks to spare, and sample from the same logits. The others queue. (A late one may know forced tokens
        already, and then it must be the same ones.)
        """
        for request in self._roster.take_followers(leader):
            spare = self._cache.pool.available - sum(map(self._cache.owed, self._rows.lagging()))
            spare -= len(self._config.groups) * (self._rows.used + 1)
            if request.output != leader.output or not self._rows.free or spare < self._cache.fork_blocks(leader.known):
                self._roster.queue(request)
                continue
            row = self._roster.fork(request, leader, leader.known)
            draft.joins.append(request.join(row))
            self._cache.fork(request, leader, leader.known, draft)
            draft.forks.append(Fork(len(draft.chunks) - 1, row))
            draft.fork_requests.append(request)
            request.first_scheduled = draft.now
            self._rows.advance_to(request, leader.known, draft.step)
            self._go_on(request, draft)

    def _finalize(self, request: Request, draft: StepDraft) -> None:
        """This step samples the request's last token."""
        request.phase = Phase.LAST
        draft.finals.append(request)

    def _plan_waiting(self, draft: StepDraft) -> None:
        """Admit requests in their order as long as rows, blocks and budget last."""
        owed = sum(map(self._cache.owed, self._rows.lagging())) if self._roster.first_waiting else 0
        while self._rows.free and draft.budget:
            request = self._roster.first_waiting
            waiting, queued = self._admissible()
            # by now more may be known of what caches have
            draft.budget = self._worth_a_step(draft.budget, waiting, queued + len(draft.chunks), draft.computed)
            if request is None or not self._admit(request, owed, draft):
                break
            if self._rows.position(request) < request.known:
                owed += self._cache.owed(request)

    def _admit(self, request: Request, owed: int, draft: StepDraft) -> bool:
        """Give the first in the queue a row, if there are blocks for all that it knows, and to spare: `owed` for what
        running requests know, and one in each group for every running row."""
        spare = self._cache.pool.available - owed - len(self._config.groups) * self._rows.used
        if self._blocked is not None and self._blocked[0] is request and spare < self._blocked[1]:
            return False  # as at the last try, without looking for its prefix again
        hit = self._cache.index.longest_hit(request, draft.entered)
        demand = self._cache.demand(request, hit)
        if spare < demand:
            self._blocked = (request, demand)
            return False
        row = self._roster.admit(request, hit.positions)
        self._fresh += (1 - hit.positions / request.known - self._fresh) / 4
        draft.joins.append(request.join(row))
        self._cache.open(request, hit, draft)
        if request.first_scheduled is None:
            request.first_scheduled = draft.now
            request.cached_tokens = hit.positions
            self.prompt_tokens += len(request.spec.token_ids)
            self.prompt_tokens_cached += hit.positions
        self._plan_chunk(request, draft)
        return True

    def _make_place(self, request: Request, positions: int) -> bool:
        """Whether blocks for the first `positions` positions can be had now.

        Preempts less important requests where that is what it takes, but nobody while enough blocks come back by
        themselves.
        """
        short, pool = self._cache.shortfall(request, positions), self._cache.pool
        if short == 0:
            return True
        self._cache.give_back(request)
        if short > pool.available:
            for other in self._rows.holders():
                self._cache.give_back(other)
        while short > pool.available:
            if short <= pool.available + self._roster.coming_blocks():
                return False
            victim = max(self._rows.holders(), key=_by_order)
            if victim is request:
                return False
            self._roster.preempt(victim)
        return True
