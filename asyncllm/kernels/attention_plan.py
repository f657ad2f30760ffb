"""How the attention of a step is cut into programs, on the device: once a step, for all layers with the same window.

The queries of one sequence that share a KV head are packed: packed row r is token r // G, head r % G of that KV head's
G query heads. A *tile* is a run of packed rows, a *unit* a tile and a part of its keys. `paged_attention` has a program
per possible unit and KV head, and the surplus ones leave at once. So a CUDA graph captured for a number of tokens
replays any mix.

A sequence of few packed rows (a decoding one) is one small tile, read at the speed of memory; any other is cut into
large tiles for the matrix units: two lists of units. Where whole tiles are too few to fill the GPU, or their lengths
too uneven, their keys are split, and the last program of a tile to finish merges the parts.

Where decoding sequences begin with the same blocks, those are attended once for all of them ("cascade attention", Ye et
al., 2024): the sequences' packed rows make *shared* tiles, whose units are further parts of each of the sequences.
Which blocks are the same is found on the device, by comparing the block tables as they are in this step. So whatever
changes them (joins, preemption, copy on write) is seen at once, and nobody has to tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from asyncllm.kernels.language import (
    GLUON_AVAILABLE,
    await_previous,
    constexpr,
    jit,
    jit_unspecialized,
    launch_next,
    next_power_of_2,
    overlap_options,
    tl,
)

FIELDS = 16
"""int32 words of a unit: a cache line of 64 bytes."""

MEMBER_FIELDS = 4
"""int32 words of a member of a shared tile."""

LEAST_SHARED = 256
"""Tokens: a shorter common prefix is not worth the merge."""

_NEVER_SPLIT = 1 << 24
"""Blocks of a part: more than any context has."""

_WAVES = 16
"""Units that every multiprocessor gets in turn, where tiles are long: the last ones are then of a size."""

_MANY_TOKENS = 64
"""Steps of so many tokens have small tiles by the hundred."""

_LEAST_MATES = 2
"""Sequences that a shared tile has room for, at least."""

_TILE_MATES = 8
"""Shared tiles of groups of so many sequences, or of as many as a tile has room for, find room in any step."""

# the lines of `AttentionPlan.prefixes`
_LEADERS, _COMMON, _SAVINGS, _SHARED, _RANKS, _SIZES, _PLACES = (constexpr(i) for i in range(7))


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut of one list: rows and keys of a tile, and how its program runs."""

    rows: int  # 0, of the small tiling: every sequence is cut into large tiles
    keys: int
    warps: int
    stages: int
    share: int  # multiprocessors, a KV head
    least_blocks: int  # where tiles are many, a part has at least this many blocks of `keys` keys
    descriptors: bool  # read whole blocks of keys through tensor descriptors; then block_size % keys == 0
    whole_blocks: int = 0  # a tile of no more blocks than this is not split; where tiles are few, of three fifths
    shared_rows: int = 0  # of the small tiling: packed rows of a shared tile, at least
    shared_least: int | None = None  # in place of `least_blocks`, of a shared tile's parts
    shared_stages: int = 2
    uniform: bool = False  # one loop for all keys, so that a row's numbers do not depend on its tile
    many: Tiling | None = None  # of the small tiling: in its place in steps of many tokens; it has as many rows
    programs: int = 0  # of a large tiling: so many attend the units in turn (`specialized_attention`); 0: one a unit

    def most_parts(self, *, small: bool) -> int:
        """By how much the units, a KV head, can exceed the tiles; parts of split tiles are under twice as many."""
        return (_WAVES if small else 3) * self.share

    def room(self, tiles: int, *, small: bool) -> int:
        """The units, a KV head, that so many tiles are cut into at most.

        Small tiles that are fewer than multiprocessors have two parts on each. More are cut finer, so that none is idle
        at the end, but not where they are many enough as they are: a program that finds no unit costs some time.
        """
        if not small:
            return tiles + self.most_parts(small=False)
        fine = min(_WAVES * self.share, _WAVES * tiles // 4) if tiles >= self.share else 0
        return max(fine, tiles + 2 * self.share)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all attention layers of one cache group have in common."""

    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None  # as in `CacheGroup`

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Device memory for the units of a step, made once by `make_attention_plan`, filled by `plan_attention`.

    Plans of the same head count and size may share `partial`, `statistics` and `arrivals`, if all run on one stream.
    """

    shape: AttentionShape
    max_tokens: int
    max_sequences: int
    small: Tiling
    large: Tiling
    shared_rows: int  # packed rows of a shared tile; 0: no prefix is shared
    probe: int  # sequences that share a prefix have the same block in this place
    small_units: torch.Tensor  # [units, FIELDS] int32
    large_units: torch.Tensor  # [units, FIELDS] int32
    totals: torch.Tensor  # [2] int32: how many of either are in use
    partial: torch.Tensor  # float32, outputs of the parts of split tiles
    statistics: torch.Tensor  # float32, their maxima and sums
    arrivals: torch.Tensor  # int32, parts done of each split tile; zero between launches
    progress: torch.Tensor  # [2] int32: large units handed out, and programs done; zero between launches
    prefixes: torch.Tensor  # [7, sequences] int32: what is known of each one's common prefix
    members: torch.Tensor  # [sequences, MEMBER_FIELDS] int32: those of the shared tiles, tile by tile
    compared: torch.Tensor  # [1] int32, sequences compared; zero between launches

    def small_of(self, tokens: int) -> Tiling:
        """The small tiling of a step of up to `tokens` tokens."""
        return self.small.many if self.small.many is not None and tokens >= _MANY_TOKENS else self.small

    @property
    def mates(self) -> int:
        """Sequences that a shared tile has room for."""
        return self.shared_rows // self.shape.group

    def units(self, tiling: Tiling, tokens: int) -> int:
        """The most units of one list that a step of `tokens` tokens can have."""
        most = min(tokens, self.max_sequences)
        if tiling is not self.large:
            if not tiling.rows:
                return 0
            if most == 1:
                return 2 * tiling.share  # the parts of one tile
            if self.shared_rows:  # groups that would need more tiles than these are read as if nothing were shared
                most += min(most // 2, most // min(self.mates, _TILE_MATES) + 4)
            return tiling.room(most, small=True)
        least_tokens = self.small.rows // self.shape.group + 1  # of a sequence that is cut into large tiles
        tiles = tokens * self.shape.group // tiling.rows + min(tokens // least_tokens, most)
        return tiling.room(tiles, small=False)


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a step, on the device. Sequence i computes its last positions."""

    query_starts: torch.Tensor  # [max_sequences + 1] int32: its tokens are query_starts[i] to query_starts[i + 1]
    context_lens: torch.Tensor  # [max_sequences] int32: its positions, those computed in this step included
    rows: torch.Tensor  # [max_sequences] int32: its row of the block table
    num_sequences: torch.Tensor  # [1] int32


def default_tilings(
    shape: AttentionShape,
    dtype: torch.dtype,
    *,
    multiprocessors: int,
    descriptors: bool,
    specialized: bool = False,
    deterministic: bool = False,
) -> tuple[Tiling, Tiling]:
    """The small and the large tiling that suit an H200, for a device with so many multiprocessors.

    `dtype` is the cache's. `descriptors` says whether the device has a tensor memory accelerator (compute capability
    9.0 and later), `specialized` whether `specialized_attention` runs on it (9.0 alone). `deterministic`: what a query
    row gives depends on its own keys alone. So all rows have tiles of one size, and no tile is split.
    """
    dim = next_power_of_2(shape.head_dim)
    wide = dim * dtype.itemsize > 256  # bytes of a key
    share = max(1, multiprocessors // shape.kv_heads)
    exact = dtype == torch.float32
    rows = max(8, next_power_of_2(shape.group))
    keys = 32 if wide else 64
    small = Tiling(
        rows=rows,
        keys=keys,
        warps=4,
        stages=3,
        share=share,
        least_blocks=640 // keys,
        whole_blocks=320 // keys,
        descriptors=descriptors and shape.block_size % keys == 0,
        shared_rows=32,
        shared_stages=1 if exact else 2,
    )
    if small.descriptors and rows <= 16 and dim == 128 and not exact:
        # Four programs of two warps on each multiprocessor, or of 8-bit caches, whose keys take longer to convert than
        # to come, eight of one. They end one after the other, not in step, and others begin: so that rows of different
        # lengths keep all of them busy. As all go at one pace, shared parts are short, to end first: then each row
        # merges its own.
        keys, warps, stages = (64, 2, 2) if dtype.itemsize == 2 else (32, 1, 3)
        many = replace(
            small,
            keys=keys,
            warps=warps,
            stages=stages,
            least_blocks=640 // keys,
            whole_blocks=320 // keys,
            shared_least=320 // keys,
        )
        small = replace(small, many=many)
    keys = 32 if exact else 64
    large = Tiling(
        rows=32 if exact else 64,
        keys=keys,
        warps=4,
        stages=1 if exact else 2 if wide else 3,
        share=share,
        least_blocks=8,
        descriptors=descriptors and shape.block_size % keys == 0,
    )
    if deterministic:
        none = replace(small, rows=0, shared_rows=0, many=None)
        return none, replace(large, uniform=True, share=1, least_blocks=_NEVER_SPLIT)
    two_bytes = dtype in (torch.bfloat16, torch.float16)
    if specialized and two_bytes and shape.window is None and shape.block_size == 64 and shape.head_dim in (64, 128):
        large = replace(large, rows=128, keys=128, least_blocks=4, programs=multiprocessors)
    return small, large


def make_attention_plan(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_tokens: int,
    max_sequences: int,
    tilings: tuple[Tiling, Tiling] | None = None,
    least_shared: int | None = LEAST_SHARED,
    deterministic: bool = False,
) -> AttentionPlan:
    """Allocate a plan for steps of up to `max_tokens` tokens of `max_sequences` sequences, over a cache of `dtype`.

    Decoding sequences share the reading of common prefixes of at least `least_shared` tokens (None: of none), in layers
    without a window: the others read no more than a window of them.
    """
    if tilings is None:
        multiprocessors, descriptors, specialized = 1, True, False
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            multiprocessors, descriptors = properties.multi_processor_count, properties.major >= 9
            specialized = GLUON_AVAILABLE and properties.major == 9
        tilings = default_tilings(
            shape,
            dtype,
            multiprocessors=multiprocessors,
            descriptors=descriptors,
            specialized=specialized,
            deterministic=deterministic,
        )
    small, large = tilings
    shares = least_shared is not None and shape.window is None and max_sequences > 1
    if shares and small.shared_rows and shape.group <= 16:
        shared_rows = max(small.shared_rows, _LEAST_MATES * next_power_of_2(shape.group))
    else:
        shared_rows = 0
    # lines of either launch: parts of split tiles; of members of shared tiles, each one's own parts and its shared ones
    lines = 2 * max(each.most_parts(small=each is small) * each.rows for each in tilings)
    if shared_rows:
        lines += 2 * shape.group * max_sequences + small.most_parts(small=True) * (shape.group + shared_rows)
    sequences = next_power_of_2(max_sequences)

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    empty = zeros(0, FIELDS)
    plan = AttentionPlan(
        shape=shape,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        small=small,
        large=large,
        shared_rows=shared_rows,
        probe=max(1, (least_shared or 0) // shape.block_size) - 1,
        small_units=empty,
        large_units=empty,
        totals=zeros(2),
        partial=torch.empty(
            lines * shape.kv_heads * next_power_of_2(shape.head_dim), dtype=torch.float32, device=device
        ),
        statistics=torch.empty(2 * lines * shape.kv_heads, dtype=torch.float32, device=device),
        # a specialised program counts the parts of either half of a tile
        arrivals=zeros(max(max_sequences, 4 * large.most_parts(small=False)) * shape.kv_heads),
        progress=zeros(2),
        prefixes=zeros(7, sequences),
        members=zeros(sequences, MEMBER_FIELDS),
        compared=zeros(1),
    )
    return replace(
        plan,
        small_units=zeros(max(plan.units(small, n) for n in (1, max_tokens)), FIELDS),
        large_units=zeros(plan.units(large, max_tokens), FIELDS),
    )


@jit
def _prefix_kernel(
    prefixes: tl.tensor,
    compared: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    rows: tl.tensor,
    num_sequences: tl.tensor,
    block_table: tl.tensor,
    table_width: tl.int32,
    BLOCK_SIZE: tl.constexpr,
    PROBE: tl.constexpr,
    MATES: tl.constexpr,
    TILE_MATES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # Each program compares one sequence's blocks with those of the first that has the same block in place PROBE.
    me = tl.program_id(0)
    others = tl.arange(0, SEQUENCES)
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    count = tl.load(num_sequences)
    inside = others < count
    starts = tl.load(query_starts + others, mask=inside, other=0)
    queries = tl.load(query_starts + others + 1, mask=inside, other=0) - starts
    contexts = tl.load(context_lens + others, mask=inside, other=0)
    lines = tl.load(rows + others, mask=inside, other=0).to(tl.int64) * table_width
    if me >= count:
        return
    whole = (contexts - 1) // BLOCK_SIZE  # blocks that its token sees whole, and that are not the last
    decoding = inside & (queries == 1) & (whole > PROBE)
    probed = tl.load(block_table + lines + PROBE, mask=decoding, other=-1)
    mine = tl.max(tl.where(others == me, probed, -1), axis=0)
    my_whole = tl.sum(tl.where(decoding & (others == me), whole, 0), axis=0)
    leader = tl.min(tl.where(decoding & (probed == mine), others, SEQUENCES), axis=0)
    leader = tl.where(my_whole > 0, leader, me)
    common = tl.minimum(my_whole, tl.sum(tl.where(decoding & (others == leader), whole, 0), axis=0))
    my_line = tl.sum(tl.where(others == me, lines, 0), axis=0)
    leader_line = tl.sum(tl.where(others == leader, lines, 0), axis=0)
    for first in range(0, tl.where(leader == me, 0, common), 128):
        i = first + tl.arange(0, 128)
        ours = tl.load(block_table + my_line + i, mask=i < common, other=0)
        theirs = tl.load(block_table + leader_line + i, mask=i < common, other=0)
        common = tl.minimum(common, tl.min(tl.where(ours == theirs, common, i), axis=0))
    alone = common <= PROBE
    tl.store(prefixes + _LEADERS * SEQUENCES + me, tl.where(alone, me, leader))
    tl.store(prefixes + _COMMON * SEQUENCES + me, tl.where(alone, 0, common))
    tl.debug_barrier()
    if tl.atomic_add(compared, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.store(compared, 0)
        _group_prefixes(prefixes, count, BLOCK_SIZE, MATES, TILE_MATES, SEQUENCES, CHUNK)


@jit
def _group_prefixes(
    prefixes: tl.tensor,
    count: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    MATES: tl.constexpr,
    TILE_MATES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Decide which sequences share how much: those with one leader that have the prefix which saves most."""
    lanes = tl.arange(0, SEQUENCES)
    inside = lanes < count
    leaders = tl.load(prefixes + _LEADERS * SEQUENCES + lanes, mask=inside, other=-1, cache_modifier=".cg")
    common = tl.load(prefixes + _COMMON * SEQUENCES + lanes, mask=inside, other=0, cache_modifier=".cg")
    shared = tl.zeros([SEQUENCES], tl.int32)
    if tl.sum(tl.where(inside & (leaders != lanes), 1, 0), axis=0) > 0:
        followers = tl.zeros([SEQUENCES], tl.int32)
        for first in range(0, count, CHUNK):
            i = first + tl.arange(0, CHUNK)
            leader = tl.load(prefixes + _LEADERS * SEQUENCES + i, mask=i < count, other=-2, cache_modifier=".cg")
            length = tl.load(prefixes + _COMMON * SEQUENCES + i, mask=i < count, other=0, cache_modifier=".cg")
            too = (leader[:, None] == leaders[None, :]) & (length[:, None] >= common[None, :])
            followers += tl.sum(too.to(tl.int32), axis=0)
        tl.store(prefixes + _SAVINGS * SEQUENCES + lanes, common * (followers - 1))
        tl.debug_barrier()
        best = tl.zeros([SEQUENCES], tl.int64)  # blocks not read, then the prefix's length
        for first in range(0, count, CHUNK):
            i = first + tl.arange(0, CHUNK)
            leader = tl.load(prefixes + _LEADERS * SEQUENCES + i, mask=i < count, other=-2, cache_modifier=".cg")
            length = tl.load(prefixes + _COMMON * SEQUENCES + i, mask=i < count, other=0, cache_modifier=".cg")
            saving = tl.load(prefixes + _SAVINGS * SEQUENCES + i, mask=i < count, other=0, cache_modifier=".cg")
            rank = (saving.to(tl.int64) << 32) | length
            best = tl.maximum(best, tl.max(tl.where(leader[:, None] == leaders[None, :], rank[:, None], 0), axis=0))
        length = (best & 0xFFFFFFFF).to(tl.int32)
        shared = tl.where(inside & (best >> 32 > 0) & (common >= length), length, 0)
        tl.store(prefixes + _SHARED * SEQUENCES + lanes, shared)
        tl.debug_barrier()
        ranks = tl.zeros([SEQUENCES], tl.int32)
        sizes = tl.zeros([SEQUENCES], tl.int32)
        for first in range(0, count, CHUNK):
            i = first + tl.arange(0, CHUNK)
            leader = tl.load(prefixes + _LEADERS * SEQUENCES + i, mask=i < count, other=-2, cache_modifier=".cg")
            shares = tl.load(prefixes + _SHARED * SEQUENCES + i, mask=i < count, other=0, cache_modifier=".cg") > 0
            mates = (leader[:, None] == leaders[None, :]) & shares[:, None]
            sizes += tl.sum(mates.to(tl.int32), axis=0)
            ranks += tl.sum((mates & (i[:, None] < lanes[None, :])).to(tl.int32), axis=0)
        tl.store(prefixes + _RANKS * SEQUENCES + lanes, ranks)
        tl.store(prefixes + _SIZES * SEQUENCES + lanes, sizes)
        tl.debug_barrier()
        tiles = tl.zeros([SEQUENCES], tl.int32)  # of the groups up to this sequence's
        for first in range(0, count, CHUNK):
            i = first + tl.arange(0, CHUNK)
            leader = tl.load(prefixes + _LEADERS * SEQUENCES + i, mask=i < count, other=SEQUENCES, cache_modifier=".cg")
            shares = tl.load(prefixes + _SHARED * SEQUENCES + i, mask=i < count, other=0, cache_modifier=".cg") > 0
            rank = tl.load(prefixes + _RANKS * SEQUENCES + i, mask=i < count, other=0, cache_modifier=".cg")
            begins = shares & (rank % MATES == 0)
            tiles += tl.sum((begins[:, None] & (leader[:, None] <= leaders[None, :])).to(tl.int32), axis=0)
        shared = tl.where(tiles > tl.minimum(count // 2, count // TILE_MATES + 4), 0, shared)
        tl.debug_barrier()  # all have read what is written now
        tl.store(prefixes + _SHARED * SEQUENCES + lanes, shared)
        tl.debug_barrier()
        places = tl.zeros([SEQUENCES], tl.int32)
        for first in range(0, count, CHUNK):
            i = first + tl.arange(0, CHUNK)
            leader = tl.load(prefixes + _LEADERS * SEQUENCES + i, mask=i < count, other=SEQUENCES, cache_modifier=".cg")
            shares = tl.load(prefixes + _SHARED * SEQUENCES + i, mask=i < count, other=0, cache_modifier=".cg") > 0
            before = (leader[:, None] < leaders[None, :]) | (
                (leader[:, None] == leaders[None, :]) & (i[:, None] < lanes[None, :])
            )
            places += tl.sum((before & shares[:, None]).to(tl.int32), axis=0)
        tl.store(prefixes + _PLACES * SEQUENCES + lanes, places)
        tl.debug_barrier()
    tl.store(prefixes + _SHARED * SEQUENCES + lanes, shared * BLOCK_SIZE)


@jit_unspecialized("small_room", "large_room")
def _plan_kernel(
    small_units: tl.tensor,
    large_units: tl.tensor,
    totals: tl.tensor,
    prefixes: tl.tensor,
    members: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    rows: tl.tensor,
    num_sequences: tl.tensor,
    small_room: tl.int32,
    large_room: tl.int32,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SMALL_ROWS: tl.constexpr,
    SMALL_KEYS: tl.constexpr,
    SMALL_SHARE: tl.constexpr,
    SMALL_LEAST: tl.constexpr,
    SHARED_LEAST: tl.constexpr,
    SMALL_WHOLE: tl.constexpr,
    SMALL_WAVES: tl.constexpr,
    LARGE_ROWS: tl.constexpr,
    LARGE_KEYS: tl.constexpr,
    LARGE_SHARE: tl.constexpr,
    LARGE_LEAST: tl.constexpr,
    MATES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    FIELDS: tl.constexpr,
    MEMBER_FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # Each program writes the units of one sequence; to know where, it looks at all of them.
    me = tl.program_id(0)
    others = tl.arange(0, SEQUENCES)
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    inside = others < tl.load(num_sequences)
    starts = tl.load(query_starts + others, mask=inside, other=0)
    packed = (tl.load(query_starts + others + 1, mask=inside, other=0) - starts) * GROUP
    contexts = tl.load(context_lens + others, mask=inside, other=0)
    is_small = packed <= SMALL_ROWS
    if SMALL_ROWS:
        _plan_list(
            small_units, totals, prefixes, members, rows, me, others, starts, tl.where(is_small, packed, 0), contexts,
            small_room, GROUP, WINDOW, SMALL_ROWS, SMALL_KEYS, SMALL_SHARE, SMALL_LEAST, SHARED_LEAST, SMALL_WHOLE,
            SMALL_WAVES, MATES, True, SEQUENCES, FIELDS, MEMBER_FIELDS,
        )  # fmt: skip
    _plan_list(
        large_units, totals + 1, prefixes, members, rows, me, others, starts, tl.where(is_small, 0, packed), contexts,
        large_room, GROUP, WINDOW, LARGE_ROWS, LARGE_KEYS, LARGE_SHARE, LARGE_LEAST, LARGE_LEAST, 0, 0, 0, False,
        SEQUENCES, FIELDS, MEMBER_FIELDS,
    )  # fmt: skip


@jit
def _plan_list(
    units: tl.tensor,
    total: tl.tensor,
    prefixes: tl.tensor,
    members: tl.tensor,
    rows: tl.tensor,
    me: tl.tensor,
    others: tl.tensor,
    starts: tl.tensor,
    packed: tl.tensor,
    contexts: tl.tensor,
    room: tl.tensor,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARE: tl.constexpr,
    LEAST: tl.constexpr,
    SHARED_LEAST: tl.constexpr,
    WHOLE: tl.constexpr,
    WAVES: tl.constexpr,
    MATES: tl.constexpr,
    SMALL: tl.constexpr,
    SEQUENCES: tl.constexpr,
    FIELDS: tl.constexpr,
    MEMBER_FIELDS: tl.constexpr,
) -> None:
    """SMALL: a sequence is one tile. MATES: how many a shared tile has room for, or 0."""
    tiles = tl.cdiv(packed, ROWS)
    blocks = tl.cdiv(contexts, KEYS)  # at most, of any tile of the sequence
    if WINDOW:
        reach: tl.constexpr = (WINDOW + ROWS // GROUP + KEYS) // KEYS + 1
        blocks = tl.minimum(blocks, reach)
    shared = tl.zeros_like(blocks)  # of its first blocks, those attended in a shared tile
    shared_tiles = tl.zeros_like(blocks)  # 1 for the first sequence of each
    if MATES:
        shared = tl.load(prefixes + _SHARED * SEQUENCES + others, mask=packed > 0, other=0) // KEYS
        ranks = tl.load(prefixes + _RANKS * SEQUENCES + others, mask=shared > 0, other=0)
        places = tl.load(prefixes + _PLACES * SEQUENCES + others, mask=shared > 0, other=0)
        shared_tiles = ((shared > 0) & (ranks % MATES == 0)).to(tl.int32)
        blocks -= shared
    # A part has about `most` blocks. Few large tiles are cut into as many parts as there are multiprocessors, more of
    # them finer: a long part would still run when the others are done. Small ones: see `Tiling.room`.
    num_tiles = tl.sum(tiles + shared_tiles, axis=0)
    least, shared_least = LEAST, SHARED_LEAST
    whole = 0
    if SMALL:
        few = num_tiles < SHARE
        # as `Tiling.room`, of the tiles that there are instead of those that there could be
        target = tl.maximum(tl.minimum(WAVES * SHARE, WAVES * num_tiles // 4), num_tiles + 2 * SHARE)
        share = tl.where(few, 2 * SHARE, tl.maximum(tl.minimum(target, room) - num_tiles, 1))
        least = tl.where(few, 1, LEAST)
        shared_least = tl.where(few, 1, SHARED_LEAST)
        whole = tl.where(few, WHOLE * 3 // 5, WHOLE)
        up = tl.where(few, 0, 3)  # quarters: one part more of few tiles would run after all others
    else:
        share = tl.where(num_tiles > SHARE, 3 * SHARE, SHARE)
        up = 2
    even = tl.cdiv(tl.sum(tiles * blocks + shared_tiles * shared, axis=0), share)
    most = tl.maximum(even, least)
    shared_most = tl.maximum(even, shared_least)
    # With W = sum of tiles · blocks, both >= W / share: so the parts are at most `share` more than the tiles, and those
    # of split tiles (blocks / most >= 1.25, rounded) fewer than 2 · share.
    splits = tl.where(blocks > whole, tl.maximum((4 * blocks + up * most) // (4 * most), 1), 1)
    splits = tl.where(packed > 0, splits, 0)
    counts = tiles * splits
    shared_splits = tl.maximum((4 * shared + up * shared_most) // (4 * shared_most), 1)
    shared_splits = tl.where(shared > 0, shared_splits, 0)
    shared_counts = shared_tiles * shared_splits
    num_shared = tl.sum(shared_counts, axis=0)
    if me == 0:
        tl.store(total, tl.sum(counts, axis=0) + num_shared)

    my_count = tl.sum(tl.where(others == me, counts, 0), axis=0)
    if my_count > 0:
        # The parts of a tile have a line for each of its packed rows.
        merged = (splits > 1) | (shared > 0)
        lines = tl.where(merged, counts * (packed if SMALL else ROWS), 0)
        sizes = tl.cdiv(blocks, tl.maximum(splits, 1))
        my_size = tl.sum(tl.where(others == me, sizes, 0), axis=0)
        longer = (sizes > my_size) | ((sizes == my_size) & (others < me))  # these come first
        my_first = num_shared + tl.sum(tl.where(longer, counts, 0), axis=0)
        my_line = tl.sum(tl.where(others < me, lines, 0), axis=0)
        my_splits = tl.sum(tl.where(others == me, splits, 0), axis=0)
        my_tiles = tl.sum(tl.where(others == me, tiles, 0), axis=0)
        my_packed = tl.sum(tl.where(others == me, packed, 0), axis=0)
        my_start = tl.sum(tl.where(others == me, starts, 0), axis=0)
        my_context = tl.sum(tl.where(others == me, contexts, 0), axis=0)
        my_shared = tl.sum(tl.where(others == me, shared, 0), axis=0)
        my_row = tl.load(rows + me)
        stride = my_packed if SMALL else ROWS
        shared_parts = 0
        shared_line = 0
        shared_stride = 0
        if MATES:
            my_rank = tl.sum(tl.where(others == me, ranks, 0), axis=0)
            my_place = tl.sum(tl.where(others == me, places, 0), axis=0)
            mate = my_rank % MATES
            mates = tl.minimum(tl.load(prefixes + _SIZES * SEQUENCES + me) - my_rank + mate, MATES)
            tile_place = my_place - mate
            before_tile = (shared > 0) & (places < tile_place)
            tile_line = tl.sum(lines, axis=0) + GROUP * tl.sum(tl.where(before_tile, shared_splits, 0), axis=0)
            shared_parts = tl.sum(tl.where(others == me, shared_splits, 0), axis=0)
            shared_line = tile_line + mate * GROUP
            shared_stride = mates * GROUP
            if my_shared > 0:
                member = members + my_place * MEMBER_FIELDS
                tl.store(member, my_start)
                tl.store(member + 1, my_line)
                tl.store(member + 2, my_splits)
                tl.store(member + 3, me)
                if mate == 0:
                    first_unit = tl.sum(tl.where(before_tile, shared_counts, 0), axis=0)
                    length = tl.cdiv(my_shared, shared_parts)
                    for step in range(0, shared_parts, 16):
                        part = step + tl.arange(0, 16)
                        unit = units + (first_unit + part) * FIELDS
                        known = part < shared_parts
                        part_start = tl.minimum(part * length, my_shared)
                        tl.store(unit, my_row, mask=known)
                        tl.store(unit + 1, tile_place, mask=known)
                        tl.store(unit + 2, shared_stride, mask=known)
                        tl.store(unit + 5, part_start, mask=known)
                        tl.store(unit + 6, tl.minimum(part_start + length, my_shared), mask=known)
                        tl.store(unit + 9, part, mask=known)
                        tl.store(unit + 11, shared_parts, mask=known)
                        tl.store(unit + 12, tile_line, mask=known)
                        tl.store(unit + 15, 1, mask=known)
        before = my_context - my_packed // GROUP  # the position of the first query
        for step in range(0, my_count, 64):
            index = step + tl.arange(0, 64)
            tile = my_tiles - 1 - index // my_splits  # the longest first
            part = index % my_splits
            first_row = tile * ROWS
            last_row = tl.minimum(first_row + ROWS, my_packed) - 1
            block_end = tl.cdiv(before + last_row // GROUP + 1, KEYS)
            block_start = tl.zeros_like(block_end) + my_shared
            if WINDOW:
                block_start = tl.maximum(before + first_row // GROUP - WINDOW + 1, 0) // KEYS
            size = tl.cdiv(block_end - block_start, my_splits)
            part_start = tl.minimum(block_start + part * size, block_end)
            unit = units + (my_first + index) * FIELDS
            known = index < my_count
            tl.store(unit, my_row, mask=known)
            tl.store(unit + 1, my_start, mask=known)
            tl.store(unit + 2, my_packed, mask=known)
            tl.store(unit + 3, before, mask=known)
            tl.store(unit + 4, first_row, mask=known)
            tl.store(unit + 5, part_start, mask=known)
            tl.store(unit + 6, tl.minimum(part_start + size, block_end), mask=known)
            tl.store(unit + 7, my_splits, mask=known)
            tl.store(unit + 8, my_line + (index - part) * stride, mask=known)
            tl.store(unit + 9, part, mask=known)
            tl.store(unit + 10, stride, mask=known)
            tl.store(unit + 11, shared_parts, mask=known)
            tl.store(unit + 12, shared_line, mask=known)
            tl.store(unit + 13, shared_stride, mask=known)
            tl.store(unit + 14, me if SMALL else my_line // ROWS + index - part, mask=known)
            tl.store(unit + 15, 0, mask=known)


def plan_attention(
    plan: AttentionPlan,
    sequences: Sequences,
    *,
    tokens: int,
    block_table: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Cut a step's sequences into units, on the device. `tokens` bounds the step's tokens (a graph's bucket): the query
    that is attended by the plan has as many rows, since these choose the small tiling (`AttentionPlan.small_of`).

    Common prefixes are looked for in `block_table` [rows, most blocks] int32, dense, where given: that of all layers
    which use the plan.
    """
    shape, small, large = plan.shape, plan.small_of(tokens), plan.large
    programs = min(tokens, plan.max_sequences)
    device = sequences.rows.device
    lanes = plan.prefixes.shape[1]
    mates = plan.mates if block_table is not None and programs > 1 else 0
    if mates:
        assert block_table is not None
        _prefix_kernel[(programs,)](
            plan.prefixes,
            plan.compared,
            sequences.query_starts,
            sequences.context_lens,
            sequences.rows,
            sequences.num_sequences,
            block_table,
            block_table.shape[1],
            BLOCK_SIZE=shape.block_size,
            PROBE=plan.probe,
            MATES=mates,
            TILE_MATES=min(mates, _TILE_MATES),
            SEQUENCES=lanes,
            CHUNK=max(1, 4096 // lanes),
            num_warps=4,
            **overlap_options(device, overlap),
        )
    _plan_kernel[(programs,)](
        plan.small_units,
        plan.large_units,
        plan.totals,
        plan.prefixes,
        plan.members,
        sequences.query_starts,
        sequences.context_lens,
        sequences.rows,
        sequences.num_sequences,
        plan.units(small, tokens),
        plan.units(large, tokens),
        GROUP=shape.group,
        WINDOW=shape.window or 0,
        SMALL_ROWS=small.rows,
        SMALL_KEYS=small.keys,
        SMALL_SHARE=small.share,
        SMALL_LEAST=small.least_blocks,
        SHARED_LEAST=small.least_blocks if small.shared_least is None else small.shared_least,
        SMALL_WHOLE=small.whole_blocks,
        SMALL_WAVES=_WAVES,
        LARGE_ROWS=large.rows,
        LARGE_KEYS=large.keys,
        LARGE_SHARE=large.share,
        LARGE_LEAST=large.least_blocks,
        MATES=mates,
        SEQUENCES=lanes,
        FIELDS=FIELDS,
        MEMBER_FIELDS=MEMBER_FIELDS,
        num_warps=4,
        **overlap_options(device, overlap),
    )
