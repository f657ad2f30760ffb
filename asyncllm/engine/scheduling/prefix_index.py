"""PrefixIndex: finds the blocks that already hold the beginning of a prompt.

A full block is known by a hash of its tokens chained to the hash of the block before it, so equal hashes mean
equal histories. The chain starts from the request's *extras* (a cache salt; an adapter's identity), tagged and
counted so that no extra can pass for another one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from asyncllm.engine.plan import NULL_BLOCK, CacheGroup
from asyncllm.engine.scheduling.request import Request

HASH_BYTES = 32


def root_hash(extras: Mapping[str, str]) -> bytes:
    """Where a chain starts: a hash of extras by tag, each tag and each value with its length before it."""
    digest = blake2b(digest_size=HASH_BYTES)
    for tag, value in sorted(extras.items()):
        for text in (tag.encode(), value.encode("utf-8", "surrogatepass")):
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
    return digest.digest()


_NO_EXTRAS = root_hash({})


def block_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """The hash of one full block: `token_bytes` are its int32 ids, `parent` the hash of the block before."""
    return blake2b(parent + token_bytes, digest_size=HASH_BYTES).digest()


def first_block_read(group: CacheGroup, position: int, block_size: int) -> int:
    """The index of the first block that a query at `position` reads (its own block at the latest)."""
    return 0 if group.window is None else max(0, position - group.window + 1) // block_size


def _leading(by_hash: Mapping[bytes, int], hashes: list[bytes], most: int) -> int:
    """How many of the first `most` blocks are there before the first that is not."""
    for count in range(most):
        if hashes[count] not in by_hash:
            return count
    return most


def _runs(by_hash: Mapping[bytes, int], hashes: list[bytes]) -> list[int]:
    """runs[i]: how many blocks in a row, ending with block i - 1, are there."""
    runs = [0]
    for digest in hashes:
        runs.append(runs[-1] + 1 if digest in by_hash else 0)
    return runs


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the index holds of a request's beginning."""

    positions: int  # these need not be computed again
    tables: tuple[list[int], ...]  # per group: the blocks of these positions, the null block where none is needed


class PrefixIndex:
    """Maps (cache group, block hash) to a block, and back. Knows nothing of reference counts."""

    def __init__(self, block_size: int, groups: tuple[CacheGroup, ...]) -> None:
        self._block_size = block_size
        self._groups = groups
        self._blocks: tuple[dict[bytes, int], ...] = tuple({} for _ in groups)
        self.entries: dict[int, tuple[int, bytes]] = {}  # block -> its group and hash; to be read only
        self._nothing = PrefixHit(0, tuple([] for _ in groups))

    def __contains__(self, block: int) -> bool:
        return block in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def hash_blocks(self, request: Request, blocks: int) -> None:
        """Extend `request.hashes` to its first `blocks` blocks, whose tokens are all known."""
        hashes, size = request.hashes, self._block_size
        if len(hashes) >= blocks:
            return
        salt = request.spec.cache_salt
        parent = hashes[-1] if hashes else _NO_EXTRAS if salt is None else root_hash({"salt": salt})
        start = len(hashes) * size
        tokens, step = request.tokens(start, blocks * size).tobytes(), 4 * size
        for at in range(0, len(tokens), step):
            parent = block_hash(parent, tokens[at : at + step])
            hashes.append(parent)

    def longest_hit(self, request: Request, unreadable: Container[int]) -> PrefixHit:
        """The longest cached beginning of the known tokens, the last of which is always computed again.

        Full groups hold every block of it, window groups those that the first computed position reads. Where
        the whole of the tokens is cached, the hit ends inside its last block, which must then be copied before
        the request writes there; so that block must not be one of `unreadable`, which this very step fills.
        """
        size, known = self._block_size, request.known
        self.hash_blocks(request, known // size)
        blocks = min(len(request.hashes), known // size) if request.reuses_prefix else 0
        for group, by_hash in zip(self._groups, self._blocks, strict=True):
            if group.window is None:
                blocks = _leading(by_hash, request.hashes, blocks)
        if not blocks:
            return self._nothing
        windows = [
            (group, _runs(by_hash, request.hashes[:blocks]))
            for group, by_hash in zip(self._groups, self._blocks, strict=True)
            if group.window is not None
        ]
        for end in range(blocks, 0, -1):
            positions = min(end * size, known - 1)
            if any(run[end] < end - self._first_needed(group, positions, end) for group, run in windows):
                continue
            hit = self._hit(request, positions, end)
            if positions == end * size or not any(table[-1] in unreadable for table in hit.tables):
                return hit
        return self._nothing

    def _hit(self, request: Request, positions: int, end: int) -> PrefixHit:
        tables = []
        for group, by_hash in zip(self._groups, self._blocks, strict=True):
            first = self._first_needed(group, positions, end)
            tables.append([NULL_BLOCK] * first + [by_hash[digest] for digest in request.hashes[first:end]])
        return PrefixHit(positions, tuple(tables))

    def _first_needed(self, group: CacheGroup, positions: int, end: int) -> int:
        """The first block that a hit of `end` blocks needs in this group: the last one at the latest."""
        return min(first_block_read(group, positions, self._block_size), end - 1)

    def enter(self, group: int, digest: bytes, block: int) -> bool:
        """Let later requests find `block`. False where the same content is there already, in another block."""
        return bool(self.enter_some(group, (digest,), (block,)))

    def enter_some(self, group: int, digests: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """The same for each of these, the null block apart. Returns the blocks that are new here."""
        by_hash, entered = self._blocks[group], []
        for digest, block in zip(digests, blocks, strict=True):
            if digest not in by_hash and block != NULL_BLOCK:
                by_hash[digest] = block
                self.entries[block] = (group, digest)
                entered.append(block)
        return entered

    def forget(self, block: int) -> None:
        """Take a block out; nothing happens where it is not in."""
        if block in self.entries:
            group, digest = self.entries.pop(block)
            del self._blocks[group][digest]

    def check_integrity(self) -> None:
        """Raise AssertionError where the two directions differ."""
        forward = {block: (g, digest) for g, by_hash in enumerate(self._blocks) for digest, block in by_hash.items()}
        assert forward == self.entries, "prefix index: the two directions differ"
        assert len(forward) == sum(map(len, self._blocks)), "prefix index: a block under two hashes"


class NoPrefixIndex(PrefixIndex):
    """Finds nothing and keeps nothing: `prefix_caching=False`."""

    def hash_blocks(self, request: Request, blocks: int) -> None:
        """Hash nothing, so that there is nothing to enter or to find."""
