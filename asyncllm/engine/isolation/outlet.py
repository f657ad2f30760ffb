"""Outlet: in the child, tells the host what is new in the mailboxes, in one message a turn.

While the host does not keep up, nothing is sent, and what comes is merged: a mailbox holds all that its request has
produced, and only what the host was told of it is noted here. Engine thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import chain

from asyncllm.engine.core import Core
from asyncllm.engine.isolation.channel import Sender
from asyncllm.engine.isolation.messages import Died, NewOfChoice, NewOfRequest, News, Opened
from asyncllm.engine.isolation.travel import ErrorReport
from asyncllm.engine.logprob_reader import LogprobReader
from asyncllm.engine.mailbox import ChoiceBox, Mailbox, Stage
from asyncllm.engine.plan import TokenScores
from asyncllm.errors import EngineDead
from asyncllm.metrics import EngineState, EngineStatistics


class ChildMailbox(Mailbox):
    """A mailbox whose stream is in the host."""

    __slots__ = ("number", "told_ends", "told_ids", "told_opened", "told_prompt_scores")

    def __init__(self, number: int, request_id: str, choices: int) -> None:
        super().__init__(request_id, choices)
        self.number = number  # the host's
        self.told_opened = False
        self.told_ids = [0] * choices
        self.told_ends = [False] * choices
        self.told_prompt_scores = 0


class Outlet:
    """As `Consumers`: all streams are the host's."""

    def __init__(self, sender: Sender, released: Callable[[int], object]) -> None:
        """`released` is told the number of a request when the host hears the last of it."""
        self.batch: list[Mailbox] = []
        self._sender = sender
        self._released = released
        self._core: Core | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: asyncio.Future[None] | None = None  # the host always waits, for the start and the next token
        self._told: EngineStatistics | None = None
        self._told_bytes: set[int] = set()  # token ids
        self._hooks_over: deque[int] = deque()

    def attach(self, core: Core) -> None:
        """Whose turns these are. Before any request."""
        self._core = core

    def listen(self, request: int, mailbox: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        """As `Consumers.listen`."""
        if self._listening is None:
            self._loop = asyncio.get_running_loop()
            self._listening = self._loop.create_future()
        mailbox.consumer = self
        mailbox.waiter = self._listening
        mailbox.starters.append(self._listening)

    def forget(self, request: int, mailbox: Mailbox) -> None:
        """As `Consumers.forget`."""

    def send(self) -> list[int]:
        """As `Consumers.send`."""
        if not self._sender.busy:
            self.flush()
        return []

    def end_hooks(self, number: int) -> None:
        """Functions of this request are called no more. A finalizer calls it, so it takes no lock."""
        self._hooks_over.append(number)
        self.wake()

    def wake(self) -> None:
        """There is something to tell outside a turn: the host keeps up again, say. On any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed: all was told
                self._loop.call_soon_threadsafe(self.send)

    def flush(self) -> None:
        """Tell what is new, whether the host keeps up or not."""
        core = self._core
        if core is None:
            return
        self._tell_news(core)
        if core.state is EngineState.DEAD:
            self._sender.send(Died(ErrorReport.of(core.death())))

    def _tell_news(self, core: Core) -> None:
        statistics = core.statistics()
        batch, self.batch = self.batch, []
        if not batch and not self._hooks_over and statistics == self._told:
            return
        news = News(statistics=statistics)
        while self._hooks_over:
            news.hooks_over.append(self._hooks_over.popleft())
        self._told = statistics
        for mailbox in batch:
            assert isinstance(mailbox, ChildMailbox)
            mailbox.signalled = False
            self._collect(mailbox, news)
        self._sender.send(news)

    def _collect(self, mailbox: ChildMailbox, news: News) -> None:
        box, told = mailbox.choices[0], mailbox.told_ids
        if mailbox.told_opened and not mailbox.done and len(told) == 1 and box.scores is None and box.end is None:
            known = len(box.ids)
            if known == told[0] + 1:
                told[0] = known
                news.numbers.append(mailbox.number)
                news.token_ids.append(box.ids[-1])
                news.texts.append(box.texts[-1] if box.texts else None)
                return
        if self._is_lost(mailbox) and not mailbox.accepted:
            return
        news.requests.append(self._news_of(mailbox, news))
        if mailbox.released:
            self._released(mailbox.number)

    def _news_of(self, mailbox: ChildMailbox, news: News) -> NewOfRequest:
        opened = None
        if not mailbox.told_opened and mailbox.stage is not Stage.PREPARING:
            mailbox.told_opened = True
            scored = mailbox.choices[0].scores is not None
            opened = Opened(mailbox.prompt, scored, mailbox.prompt_scores is not None, mailbox.accepted)
        prompt_scores = (mailbox.prompt_scores or [])[mailbox.told_prompt_scores :]
        mailbox.told_prompt_scores += len(prompt_scores)
        choices = []
        for index, box in enumerate(mailbox.choices):
            ended = (mailbox.done or box.end is not None) and not mailbox.told_ends[index]
            if len(box.ids) > mailbox.told_ids[index] or ended:
                choices.append(_news_of_choice(mailbox, index, box))
        if mailbox.reader is not None:
            for scores in chain(prompt_scores, *(new.scores or () for new in choices)):
                self._tell_bytes(mailbox.reader, scores, news)
        lost = self._is_lost(mailbox)
        return NewOfRequest(
            number=mailbox.number,
            opened=opened,
            prompt_scores=prompt_scores,
            choices=choices,
            ending=mailbox.ending,
            failure=None if mailbox.failure is None or lost else ErrorReport.of(mailbox.failure),
            stage=Stage.RUNNING if lost else mailbox.stage,
            released=mailbox.released and not lost,
        )

    def _is_lost(self, mailbox: Mailbox) -> bool:
        """Whether the engine's death ends the request: the host is told what came before, and says the rest itself."""
        assert self._core is not None
        return isinstance(mailbox.failure, EngineDead) and self._core.state is EngineState.DEAD

    def _tell_bytes(self, reader: LogprobReader, scores: TokenScores, news: News) -> None:
        """What the tokens stand for, which only this process knows."""
        assert self._core is not None
        if len(self._told_bytes) == self._core.model.facts.vocab_size:
            return
        for token_id in scores.token_ids.tolist():
            if token_id not in self._told_bytes:
                self._told_bytes.add(token_id)
                news.token_bytes[token_id] = reader.token_bytes(token_id)


def _news_of_choice(mailbox: ChildMailbox, index: int, box: ChoiceBox) -> NewOfChoice:
    told, known = mailbox.told_ids[index], len(box.ids)
    mailbox.told_ids[index] = known
    mailbox.told_ends[index] = mailbox.done or box.end is not None
    scores = None if box.scores is None else box.scores[told:known]
    return NewOfChoice(index, box.ids[told:known], box.texts[told:known], scores, box.tail, box.end)
