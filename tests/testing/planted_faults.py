"""Schedulers with one fault each, to show that the state machine finds them. The faults are small, as real ones are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from asyncllm.engine.plan import NULL_BLOCK, LateTokens, StepResult
from asyncllm.engine.scheduling.prefix_index import first_block_read
from asyncllm.engine.scheduling.reports import StepTokens
from asyncllm.engine.scheduling.request import Phase, Request
from asyncllm.engine.scheduling.row_table import RowMap
from asyncllm.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from asyncllm.engine.scheduling.step_draft import StepDraft


def replace(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Put `function` in the place of a method of one object."""
    setattr(owner, name, function)


def without_launched_steps(scheduler: Scheduler, method: Callable[..., Any]) -> Callable[..., Any]:
    """This method of the roster, as if nothing were in flight."""

    def hasty(*args: Any) -> None:
        scheduler._roster._in_flight = deque()
        method(*args)
        scheduler._roster._in_flight = scheduler._in_flight

    return hasty


class LostReference(Scheduler):
    """A prefix hit on a held block is not counted."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        pool, share = self.cache.pool, self.cache.pool.share
        replace(pool, "share", lambda block: None if pool.holders(block) else share(block))


class SharedBlockWritten(Scheduler):
    """A hit that ends inside a block is continued in that block, whoever else has it."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        replace(self.cache, "_writable", lambda block, draft: block)


class FreedUnderLaunchedStep(Scheduler):
    """The blocks of an ended request are free at once."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        replace(self._roster, "drain", without_launched_steps(self, self._roster.drain))


class SurplusTokensRemembered(Scheduler):
    """Tokens sampled after a request's end become part of what its blocks are known by."""

    def apply(self, result: StepResult) -> StepTokens:
        step = self._in_flight[0]
        for request, token_id in zip(step.row_map.requests, result.token_ids.tolist(), strict=True):
            if request.phase is Phase.ENDED:
                request.output.append(token_id)
                self.cache.remember(request, min(request.known, self.cache.covered(request)))
        return super().apply(result)


class WindowFreedByPlan(Scheduler):
    """A window passes with planned instead of applied positions."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)

        def give_back(request: Request) -> None:
            for g, group in enumerate(config.groups):
                if group.window is None:
                    continue
                table, planned = request.tables[g], self._rows.position(request)
                first = min(first_block_read(group, planned, config.block_size), len(table))
                for index in range(request.given_back[g], first):
                    self.cache.pool.release(table[index])
                    table[index] = NULL_BLOCK
                request.given_back[g] = max(first, request.given_back[g])

        replace(self.cache, "give_back", give_back)


class StarvedRequest(Scheduler):
    """Who does not fit yet is passed over by those who do."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)

        def plan_waiting(draft: StepDraft) -> None:
            for request in list(self._roster._waiting):
                if self._rows.free and draft.budget:
                    self._planner._admit(request, 0, draft)

        replace(self._planner, "_plan_waiting", plan_waiting)


class BudgetOverrun(Scheduler):
    """Chunks get the whole budget, as if steady and late rows took nothing of it."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)

        class Forgetful(type(self._rows)):  # type: ignore[misc]
            num_steady = 0
            num_ready = 0

        self._rows.__class__ = Forgetful


class WrongRowMap(Scheduler):
    """A result is read with the rows as they are now."""

    def apply(self, result: StepResult) -> StepTokens:
        newest, oldest = self._in_flight[-1], self._in_flight[0]
        if len(newest.row_map.ids) == len(oldest.row_map.ids):
            oldest.row_map = newest.row_map
        return super().apply(result)


class FailedStepRemembered(Scheduler):
    """The prefix index keeps what a failed step was to fill."""

    def fail(self, step: int) -> list[int]:
        for launched in self._in_flight:
            launched.entered.clear()
        return super().fail(step)


class PreemptedTooSoon(Scheduler):
    """A preempted request queues again while a launched step still samples for it."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        replace(self._roster, "preempt", without_launched_steps(self, self._roster.preempt))


class StaleWord(Scheduler):
    """The host's word about one token is taken for the next one too."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        plan_late = self._planner._plan_late

        def forgetful(request: Request, draft: StepDraft) -> bool:
            adjustment = request.adjustment
            planned = plan_late(request, draft)
            request.adjustment = adjustment
            return planned

        replace(self._planner, "_plan_late", forgetful)


class LogitsOutliveRow(Scheduler):
    """A preempted late row is taken to have its logits still."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)

        def preempt(request: Request) -> None:
            kept = request.id in self._rows._kept
            original(request)
            if kept:
                self._rows._kept[request.id] = request

        original = self._roster.preempt
        replace(self._roster, "preempt", preempt)


class ForcedTokensComputed(Scheduler):
    """Forced tokens count as computed as soon as they are known."""

    def force(self, request: int, token_ids: Sequence[int]) -> Sequence[int]:
        taken = super().force(request, token_ids)
        live = self._roster.live(request)
        if live is not None and live.row is not None:
            self._rows.advance_to(live, live.known, live.last_step)
        return taken


class LateTokensInPlanOrder(Scheduler):
    """Late tokens go to the requests in the order in which these came."""

    def apply_late(self, tokens: LateTokens) -> StepTokens:
        self._in_flight[0].late.sort(key=lambda sample: sample.request.id)
        return super().apply_late(tokens)


class ForkWithoutCopy(Scheduler):
    """A fork goes on in its own block without what the prompt has in it."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)

        def make_copies(draft: StepDraft) -> None:
            original(draft)
            for source in [copy.source for copy in draft.copies]:
                self.cache.pool.release(source)
            draft.copies.clear()

        original = self.cache.make_copies
        replace(self.cache, "make_copies", make_copies)


class ForkSharesTooMuch(Scheduler):
    """A fork goes on in the block that the prompt does not fill, together with the others."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)

        def fork(request: Request, leader: Request, positions: int, draft: StepDraft) -> None:
            original(request, leader, positions, draft)
            for due in [due for due in self.cache._copies_due if due.request is request]:
                self.cache._copies_due.remove(due)
                self.cache.pool.release(due.destination)
                request.tables[due.group][due.index] = due.source
                draft.edit(due.group, request, due.index, (due.source,))

        original = self.cache.fork
        replace(self.cache, "fork", fork)


class ForkedTokensSwapped(Scheduler):
    """The tokens of forks are read before those of chunks."""

    def apply(self, result: StepResult) -> StepTokens:
        step = self._in_flight[0]
        forked = [request for request in step.row_map.requests if request in step.forks]
        others = [request for request in step.row_map.requests if request not in step.forks]
        if forked:
            step.row_map = RowMap.of([*forked, *others])
        return super().apply(result)
