"""Delivery: each token, and the text that it adds, goes into its request's mailbox. Engine thread only.

What is done for every token is done here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncllm.engine.live_requests import Branch, LiveRequests, Request, clock
from asyncllm.engine.scheduling.reports import Ended, StepTokens
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.errors import RequestFailed, SamplingFailed
from asyncllm.results import FinishReason


class Delivery:
    """Ends the requests whose stop string has come. `fail` ends one whose tokens cannot be turned into text, or that no
    token could be sampled for, once all is delivered that came before."""

    def __init__(
        self, scheduler: Scheduler, live: LiveRequests, fail: Callable[[Request, RequestFailed], object]
    ) -> None:
        self._scheduler = scheduler
        self._live = live
        self._fail = fail
        self._routes: list[Branch] = []  # the branches of `_routed`, in its order
        self._routed: Sequence[int] | None = None
        self._ended: list[Ended] = []
        self.found: list[int] = []  # branches whose stop string was found: their texts write here
        self.tokens = 0

    def note_ended(self) -> list[Ended]:
        """Who has ended, by the scheduler, since the last call: no text is shown of the stop id that comes next."""
        ended = self._scheduler.take_ended()
        self._ended += ended
        for end in ended:
            branch = self._live.branch(end.request)
            if branch is None or end.stop_token_id is None:
                continue
            if not branch.request.params.include_stop_str_in_output:
                branch.mute()
        return ended

    def take_ended(self) -> list[Ended]:
        """Who has ended since the last call."""
        ended, self._ended = self._ended + self._scheduler.take_ended(), []
        return ended

    def deliver(self, tokens: StepTokens) -> None:
        """The tokens of a step."""
        if tokens.requests is not self._routed:
            self._routed = tokens.requests
            self._routes = self._route(tokens.requests)
        self._live.take_scores(tokens)
        self._hand_out(self._routes, tokens.token_ids)
        self._tell_unsampled(tokens)

    def deliver_late(self, tokens: StepTokens) -> None:
        """The late tokens of a step, in their turn."""
        self._live.take_scores(tokens)
        self._hand_out(self._route(tokens.requests), tokens.token_ids)
        self._tell_unsampled(tokens)

    def deliver_forced(self, branch: Branch, token_ids: Sequence[int]) -> None:
        """Tokens of one branch that no step has sampled."""
        for token_id in token_ids:
            if branch.stop_reason is not None:
                break
            self._hand_out(self._route((branch.id,)), (token_id,))

    def _tell_unsampled(self, tokens: StepTokens) -> None:
        for branch in tokens.unsampled:
            self._fail(self._live[branch].request, SamplingFailed())

    def rest(self) -> None:
        """No step is in flight: keep nothing of the last one."""
        self._routed, self._routes = None, []

    def _route(self, requests: Sequence[int]) -> list[Branch]:
        routes = [self._live[branch] for branch in requests]
        now = clock()
        for branch in routes:
            if branch.request.first_token is None:
                branch.request.first_token = now
        return [branch.addressee for branch in routes]

    def _hand_out(self, routes: Sequence[Branch], token_ids: Sequence[int]) -> None:
        self.tokens += len(token_ids)
        for branch, token_id in zip(routes, token_ids, strict=True):
            mailbox, box = branch.mailbox, branch.box
            if branch.push is not None:
                try:
                    text = branch.push((token_id,))
                except Exception as error:
                    branch.spoil(error)
                    failure = RequestFailed.caused("the tokens could not be turned into text", error)
                    self._fail(branch.request, failure)
                    continue
                box.texts.append(text)
            box.ids.append(token_id)
            if mailbox.waiter is not None and not mailbox.signalled:
                mailbox.notify()
        for stopped in self.found:
            self._scheduler.finish(stopped, FinishReason.STOP)
        self.found.clear()
