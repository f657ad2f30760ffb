"""Consumers: who hears of what is left in mailboxes. Here the event loops of streams in this process.

Only the thread that writes the mailboxes may call any of it, unless it says otherwise.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from asyncllm.engine.mailbox import Mailbox

WOKEN_AT_ONCE = 512
"""Mailboxes a callback: who does work when it is told must not hold up the loop."""


class Consumers(Protocol):
    """All that listen to one engine."""

    def listen(self, request: int, mailbox: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, until `forget`, that loop is told of this mailbox."""
        ...

    def forget(self, request: int, mailbox: Mailbox) -> None:
        """This mailbox has had its last word; what was notified is still sent."""
        ...

    def send(self) -> list[int]:
        """A turn is over: tell everybody what there is to look at, each of them once. Returns the requests whose
        consumer is gone."""
        ...


class LoopConsumers:
    """Event loops of this process."""

    def __init__(self) -> None:
        self._loops: dict[asyncio.AbstractEventLoop, ConsumerLoop] = {}

    def listen(self, request: int, mailbox: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        """As `Consumers.listen`."""
        consumer = self._loops.get(loop)
        if consumer is None:
            consumer = self._loops[loop] = ConsumerLoop(loop)
        consumer.mailboxes[request] = mailbox
        mailbox.consumer = consumer

    def forget(self, request: int, mailbox: Mailbox) -> None:
        """As `Consumers.forget`."""
        if isinstance(mailbox.consumer, ConsumerLoop):
            mailbox.consumer.mailboxes.pop(request, None)

    def send(self) -> list[int]:
        """As `Consumers.send`: wakes each loop that has something to look at once."""
        orphans: list[int] = []
        for consumer in tuple(self._loops.values()):
            is_open = consumer.send()
            if not is_open:
                orphans += consumer.mailboxes
            if not is_open or not consumer.mailboxes:
                del self._loops[consumer.loop]
        return orphans

    def __len__(self) -> int:
        return len(self._loops)


class ConsumerLoop:
    """An event loop that reads streams."""

    __slots__ = ("batch", "loop", "mailboxes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.batch: list[Mailbox] = []  # to look at, once this turn is over
        self.mailboxes: dict[int, Mailbox] = {}  # by internal id, until released

    def send(self) -> bool:
        """Wake the loop once for the whole batch. False when it is closed."""
        if self.batch:
            batch, self.batch = self.batch, []
            try:
                self.loop.call_soon_threadsafe(_wake, batch)
            except RuntimeError:  # how event loops say that they are closed
                return False
        return not self.loop.is_closed()


def _wake(batch: list[Mailbox]) -> None:
    """On the consumers' loop: tell everyone who waits at one of these mailboxes."""
    if len(batch) > WOKEN_AT_ONCE:
        asyncio.get_running_loop().call_soon(_wake, batch[WOKEN_AT_ONCE:])
    for mailbox in batch[:WOKEN_AT_ONCE]:
        mailbox.signalled = False  # first, so that what comes from now on is signalled anew
        waiter = mailbox.waiter
        if waiter is not None and (waiter.done() or not waiter.set_result(None)):
            mailbox.waiter = None
        if mailbox.watchers:
            watchers, mailbox.watchers = mailbox.watchers, []
            _tell(watchers)
        if mailbox.starters:
            starters, mailbox.starters = mailbox.starters, []
            _tell(starters)


def _tell(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
