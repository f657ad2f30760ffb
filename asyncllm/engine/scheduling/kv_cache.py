"""KvCache: the blocks of requests, one table per cache group, all of equal length.

A table entry holds a block, or the null block where nothing is read any more: below a prefix hit's window, or
where the window has passed. A block that a request may write has one holder; blocks of a prefix hit may have many.
Every change of a table that has a row is written down in the step's draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from asyncllm.engine.plan import NULL_BLOCK, CacheGroup
from asyncllm.engine.scheduling.block_pool import BlockPool
from asyncllm.engine.scheduling.prefix_index import NoPrefixIndex, PrefixHit, PrefixIndex, first_block_read
from asyncllm.engine.scheduling.request import Request
from asyncllm.engine.scheduling.step_draft import BlockCopy, StepDraft


def most_blocks(groups: tuple[CacheGroup, ...], block_size: int, positions: int) -> int:
    """The most blocks that a request needs at once to compute its first `positions` positions, one by one.

    A span of w positions touches at most (w + block_size - 2) // block_size + 1 blocks.
    """
    full, needed = -(-positions // block_size), 0
    for group in groups:
        needed += full if group.window is None else min(full, (group.window + block_size - 2) // block_size + 1)
    return needed


def most_positions(groups: tuple[CacheGroup, ...], block_size: int, num_blocks: int, limit: int) -> int:
    """How many positions of one request fit a pool of `num_blocks`, in whole blocks; no more than `limit`."""
    low, high = 0, -(-limit // block_size)
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks(groups, block_size, middle * block_size) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return min(low * block_size, limit)


@dataclass(frozen=True, slots=True)
class CopyDue:
    """A block of a forked request, to be filled before any later step writes."""

    step: int  # the one that forks, and writes the source
    request: Request
    group: int
    index: int
    source: int
    destination: int


class KvCache:
    """Gives blocks to requests and takes them back. Decides nothing about who comes first."""

    def __init__(self, groups: tuple[CacheGroup, ...], block_size: int, num_blocks: int, prefix_caching: bool) -> None:
        self._groups = groups
        self._block_size = block_size
        self._windowed = [g for g, group in enumerate(groups) if group.window is not None]
        self.index = (PrefixIndex if prefix_caching else NoPrefixIndex)(block_size, groups)
        self.pool = BlockPool(num_blocks, self.index)
        self._copies_due: list[CopyDue] = []  # their sources are held

    def shortfall(self, request: Request, positions: int) -> int:
        """Blocks to allocate before the request's first `positions` positions have a place."""
        indices = -(-positions // self._block_size) - len(request.tables[0])
        return max(0, indices) * len(self._groups)

    def covered(self, request: Request) -> int:
        """Positions that have a place in the request's tables."""
        return len(request.tables[0]) * self._block_size

    def reach(self, request: Request) -> int:
        """Positions that would have a place if the request took every available block."""
        return self.covered(request) + self.pool.available // len(self._groups) * self._block_size

    def owed(self, request: Request) -> int:
        """Blocks that a running request still needs to compute the tokens it already knows."""
        if not self._windowed:
            return self.shortfall(request, request.known)  # the same without any window
        held = sum(len(table) - first for table, first in zip(request.tables, request.given_back, strict=True))
        return max(0, most_blocks(self._groups, self._block_size, request.known) - held)

    def demand(self, request: Request, hit: PrefixHit) -> int:
        """Available blocks that admitting the request takes up until its known tokens are computed.

        Blocks of the hit that others hold cost nothing, if they stay (in full groups) and are only read.
        """
        whole = hit.positions // self._block_size
        if not whole and not self._windowed:
            return self.shortfall(request, request.known)
        needed = most_blocks(self._groups, self._block_size, request.known)
        if not whole:
            return needed
        shared = sum(
            self.pool.holders(block) > 0
            for group, table in zip(self._groups, hit.tables, strict=True)
            if group.window is None
            for block in table[:whole]
        )
        return needed - shared

    def open(self, request: Request, hit: PrefixHit, draft: StepDraft) -> None:
        """Start the tables of a request that takes a row with the blocks of its prefix hit."""
        if not hit.positions:
            return  # they are empty
        inside = hit.positions % self._block_size != 0  # the request writes into the hit's last block
        for block in chain.from_iterable(hit.tables):
            if block != NULL_BLOCK:
                self.pool.share(block)
        for g, blocks in enumerate(hit.tables):
            table = list(blocks)
            if inside:
                table[-1] = self._writable(table[-1], draft)
            request.tables[g] = table
            request.given_back[g] = next((i for i, block in enumerate(table) if block != NULL_BLOCK), len(table))
            first = request.given_back[g]
            if first < len(table):
                draft.edit(g, request, first, table[first:])
        request.remembered = hit.positions // self._block_size

    def fork(self, request: Request, leader: Request, positions: int, draft: StepDraft) -> None:
        """Start the tables of a request that has a row with the first `positions` positions of another, computed or
        planned in this step. A block that these do not fill is copied in the next one: `fork_blocks` must be available.
        """
        whole = positions // self._block_size
        request.hashes, request.remembered = [*leader.hashes], leader.remembered
        for g, blocks in enumerate(leader.tables):
            first = request.given_back[g] = leader.given_back[g]
            table = request.tables[g] = blocks[:whole]
            for block in table[first:]:
                self.pool.share(block)
            draft.edit(g, request, first, table[first:])
            if positions % self._block_size:
                self.pool.share(blocks[whole])
                table.append(self.pool.allocate())
                self._copies_due.append(CopyDue(draft.step, request, g, whole, blocks[whole], table[whole]))

    def fork_blocks(self, positions: int) -> int:
        """Blocks that a fork at this position takes."""
        return len(self._groups) if positions % self._block_size else 0

    def make_copies(self, draft: StepDraft) -> None:
        """The step makes the copies that steps before it have left to be made."""
        for due in self._copies_due:
            if due.step == draft.step:
                continue
            if due.request.row is None:
                self.pool.release(due.source)
            else:
                draft.edit(due.group, due.request, due.index, (due.destination,))
                draft.copies.append(BlockCopy(due.source, due.destination))
                draft.copied.append(due.request)
        self._copies_due = [due for due in self._copies_due if due.step == draft.step]

    def _writable(self, block: int, draft: StepDraft) -> int:
        """This block for its last holder; for others a copy, made before the step writes.

        The source stays held until the step is applied, so that nothing overwrites it before the copy.
        """
        if self.pool.holders(block) == 1:
            self.index.forget(block)
            return block
        copy = self.pool.allocate()
        draft.copies.append(BlockCopy(block, copy))
        return copy

    def grow(self, request: Request, positions: int, draft: StepDraft) -> None:
        """Allocate what is missing for the first `positions` positions. It must be available."""
        first = len(request.tables[0])
        missing = -(-positions // self._block_size) - first
        if missing > 0:
            for g, table in enumerate(request.tables):
                blocks = self.pool.allocate_some(missing)
                table.extend(blocks)
                draft.edit(g, request, first, blocks)

    def remember(self, request: Request, positions: int) -> list[int]:
        """Enter the full blocks among the first `positions` positions, whose tokens are known and which are
        computed or planned, into the prefix index. Returns the blocks that were new to it."""
        blocks = positions // self._block_size
        entered: list[int] = []
        if blocks <= request.remembered:
            return entered
        self.index.hash_blocks(request, blocks)
        new = request.hashes[request.remembered : blocks]
        for g, table in enumerate(request.tables):
            entered += self.index.enter_some(g, new, table[request.remembered : request.remembered + len(new)])
        request.remembered = blocks
        return entered

    def give_back(self, request: Request) -> None:
        """Release the blocks that fell out of their group's window.

        Counted from the applied positions: a launched step still reads, and might be repeated, from there on.
        """
        if not self._windowed:
            return
        self.remember(request, request.applied)
        for g in self._windowed:
            table = request.tables[g]
            first = min(first_block_read(self._groups[g], request.applied, self._block_size), len(table))
            for index in range(request.given_back[g], first):
                self.pool.release(table[index])
                table[index] = NULL_BLOCK
            request.given_back[g] = max(first, request.given_back[g])

    def close(self, request: Request) -> None:
        """Release all blocks of a request, what it computed remembered. The end of a prefix goes first, so that it
        is also given up first: without its beginning it would be useless."""
        self.remember(request, request.applied)
        if self._copies_due:
            for due in [due for due in self._copies_due if due.request is request]:
                self.pool.release(due.source)
                self._copies_due.remove(due)
        for g, table in enumerate(request.tables):
            self.pool.release_some(reversed(table[request.given_back[g] :]))
            request.tables[g] = []
            request.given_back[g] = 0
        request.remembered = 0

    def disown(self, request: Request) -> None:
        """What an ended request has computed may be no numbers: nobody is to find it from now on."""
        for block in chain.from_iterable(request.tables):
            self.index.forget(block)
        request.remembered = len(request.tables[0])  # nor is it remembered when the request is closed

    def sole_blocks(self, requests: Iterable[Request]) -> int:
        """Blocks that nobody but these requests, each for itself, holds: available once they are closed."""
        return sum(
            self.pool.holders(block) == 1
            for request in requests
            for table, first in zip(request.tables, request.given_back, strict=True)
            for block in table[first:]
        )

    def check_integrity(self, requests: Iterable[Request], sources: Iterable[int]) -> None:
        """Raise AssertionError unless these requests and copy sources hold exactly what the pool says is held."""
        held = Counter([*sources, *(due.source for due in self._copies_due)])
        for request in requests:
            length = len(request.tables[0])
            for table, first in zip(request.tables, request.given_back, strict=True):
                assert len(table) == length, f"request {request.id}: tables differ in length"
                assert not any(table[:first]), f"request {request.id}: a block before its window"
                assert all(table[first:]), f"request {request.id}: a hole in a table"  # the null block is 0
                for block in table[first:]:
                    held[block] += 1
        self.pool.check_integrity(held)
        self.index.check_integrity()
