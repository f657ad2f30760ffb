"""BlockPool: one pool of equal blocks, counted references, and the order in which cached blocks are given up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np

from asyncllm.engine.scheduling.prefix_index import PrefixIndex
from asyncllm.metrics import BlockState


class BlockPool:
    """Blocks 1 to `num_blocks`. Each is held (by one or more), *cached* (held by nobody, but in the prefix index)
    or free. Allocation takes free blocks first, then the cached one that was given back longest ago."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self._index = index
        self._holders = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))  # a stack
        # Oldest first. A plain dict would look for its first key through all places of those that have left.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds but a request with the same prefix can take over."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that are held."""
        return self.num_blocks - self.available

    def holders(self, block: int) -> int:
        """How many hold this block."""
        return self._holders[block]

    def states(self) -> bytes:
        """The `BlockState` of each block. From any thread: holders and cached blocks may be some operations apart."""
        holders, cached = np.array(self._holders[1:]), np.array(list(self._cached), dtype=np.int64)
        states = np.where(holders > 1, BlockState.SHARED, np.where(holders == 1, BlockState.USED, BlockState.FREE))
        states[cached - 1] = np.where(states[cached - 1] == BlockState.FREE, BlockState.CACHED, states[cached - 1])
        return states.astype(np.uint8).tobytes()

    def allocate(self) -> int:
        """A block for one holder, its old content forgotten. There must be one available."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._index.forget(block)
        self._holders[block] = 1
        return block

    def allocate_some(self, count: int) -> list[int]:
        """So many blocks, as `allocate` gives them one by one."""
        free = self._free
        if count > len(free):
            return [self.allocate() for _ in range(count)]
        blocks = free[: -count - 1 : -1]
        del free[len(free) - count :]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more holder, of a held or a cached block."""
        if self._holders[block] == 0:
            del self._cached[block]
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less. The last one leaves the block cached if the prefix index knows it, else free."""
        self.release_some((block,))

    def release_some(self, blocks: Iterable[int]) -> None:
        """The same for each of these, in their order."""
        holders, entries = self._holders, self._index.entries
        for block in blocks:
            left = holders[block] - 1
            assert left >= 0, f"block {block} released once too often"
            holders[block] = left
            if not left:
                if block in entries:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Raise AssertionError unless exactly `held` (block -> holders) is held, and every other block is in its
        place once."""
        for block, holders in enumerate(self._holders):
            assert holders == held.get(block, 0), f"block {block} counts {holders} holders, has {held.get(block, 0)}"
        idle = [*self._free, *self._cached]
        assert len(idle) == len(set(idle)), "a block is free twice"
        assert not any(map(self._holders.__getitem__, idle)), "a held block is free"
        assert len(idle) + sum(map(bool, self._holders)) == self.num_blocks, "a block is lost"
        assert all(block in self._index for block in self._cached), "a cached block is not in the index"
        assert not any(block in self._index for block in self._free), "a free block is in the index"
