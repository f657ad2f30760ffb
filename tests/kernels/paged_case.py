"""Steps to attend: sequences of given lengths in a cache whose other slots hold what must never be seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from asyncllm.kernels import attention_plan, paged_attention
from asyncllm.kernels.attention_plan import Tiling
from tests.kernels.precision import assert_as_good


@dataclass(frozen=True)
class Modules:
    """Either one, or a copy with a fault."""

    plan: ModuleType = attention_plan
    attention: ModuleType = paged_attention


@dataclass(frozen=True)
class Prefix:
    """What some of the sequences, by their numbers, have in common."""

    sequences: tuple[int, ...]
    blocks: int


@dataclass(frozen=True)
class Case:
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    sequences: tuple[tuple[int, int], ...] = ((1, 1), (5, 5), (50, 1), (70, 33), (64, 1), (90, 30))  # length, queries
    tilings: tuple[Tiling, Tiling] | None = None
    prefixes: tuple[Prefix, ...] = ()
    least_shared: int | None = None
    narrow: bool = False  # the cache is of 8-bit numbers
    backwards: bool = False  # the units of the small list, so that those of shared tiles come last


def tilings(
    keys: int, *, rows: int = 32, share: int = 6, least_blocks: int = 2, descriptors: bool = False
) -> tuple[Tiling, Tiling]:
    """Small ones, so that short sequences have several tiles, split ones too."""
    small = Tiling(16, keys, 4, 2, share, least_blocks, descriptors, shared_rows=16)
    return small, Tiling(rows, keys, 4, 2, share, least_blocks, descriptors)


@dataclass(frozen=True)
class Step:
    """What a launch takes."""

    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    rows: torch.Tensor
    num_sequences: torch.Tensor
    tokens: int  # of sequences; the query has more


SPARE_TOKENS = 3
SPARE_SEQUENCES = 2


def make_step(case: Case, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> Step:
    """Blocks and rows in random order. Slots of no sequence hold keys that are not numbers, and large values."""
    generator = torch.Generator().manual_seed(seed)
    size, count = case.block_size, len(case.sequences)
    needed = [-(-length // size) for length, _ in case.sequences]
    free = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
    rows = torch.randperm(count + SPARE_SEQUENCES, generator=generator)[:count]
    table = torch.zeros((count + SPARE_SEQUENCES, max(needed) + 1), dtype=torch.int32)
    cache = torch.full((2, sum(needed) + 1, case.kv_heads, size, case.dim), torch.nan)
    cache[1] = 400.0 if case.narrow else 1e4
    for (length, computed), row, blocks in zip(case.sequences, rows.tolist(), needed, strict=True):
        oldest = 0 if case.window is None else max(0, length - computed - case.window + 1)
        for block in range(oldest // size, blocks):  # older ones were given back: they are the null block
            table[row, block] = free.pop()
            filled = min(size, length - block * size)
            cache[:, table[row, block], :, :filled] = torch.randn(
                (2, case.kv_heads, filled, case.dim), generator=generator
            )
    for prefix in case.prefixes:  # the first one's blocks are everyone's
        first, *others = (rows[i] for i in prefix.sequences)
        for row in others:
            table[row, : prefix.blocks] = table[first, : prefix.blocks]
    queries = [each for _, each in case.sequences]
    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    query = torch.randn((starts[-1] + SPARE_TOKENS, case.q_heads, case.dim), generator=generator)

    def padded(values: Sequence[int], spare: int) -> torch.Tensor:
        return torch.tensor([*values, *[10**6] * spare], dtype=torch.int32, device=device)  # what is not read is odd

    return Step(
        query=query.to(device, dtype),
        cache=cache.to(device, torch.float8_e4m3fn if case.narrow else dtype),
        block_table=table.to(device),
        query_starts=padded(starts, SPARE_SEQUENCES),
        context_lens=padded([length for length, _ in case.sequences], SPARE_SEQUENCES),
        rows=padded(rows.tolist(), SPARE_SEQUENCES),
        num_sequences=padded([count], 0),
        tokens=starts[-1],
    )


def check(
    case: Case, device: torch.device, dtype: torch.dtype, *, seed: int = 0, modules: Modules = Modules()
) -> torch.Tensor:
    """Compare the kernel with its reference; returns what it gave."""
    module = modules.attention
    step = make_step(case, device, dtype, seed=seed)
    shape = attention_plan.AttentionShape(case.q_heads, case.kv_heads, case.dim, case.block_size, case.window)
    sequences = attention_plan.Sequences(step.query_starts, step.context_lens, step.rows, step.num_sequences)
    sinks = torch.linspace(-1.0, 2.0, case.q_heads, device=device) if case.sinks else None
    options = {"scale": case.dim**-0.5, "soft_cap": case.soft_cap, "sinks": sinks}
    plan = modules.plan.make_attention_plan(
        shape,
        dtype,
        device,
        max_tokens=len(step.query),
        max_sequences=len(case.sequences) + SPARE_SEQUENCES,
        tilings=case.tilings,
        least_shared=case.least_shared,
    )
    plan.partial.fill_(torch.nan)  # what is read before it is written must show
    plan.statistics.fill_(torch.nan)
    modules.plan.plan_attention(plan, sequences, tokens=len(step.query), block_table=step.block_table)
    if case.backwards:
        used = plan.small_units[: int(plan.totals[0])]
        used.copy_(used.flip(0))
    output = torch.full_like(step.query, 7.0)
    chunks = any(queries > 1 for _, queries in case.sequences)
    module.paged_attention(step.query, step.cache, step.block_table, plan, output=output, chunks=chunks, **options)
    assert bool((output[step.tokens :] == 7.0).all())  # tokens of no sequence
    assert not bool(plan.arrivals.any())  # ready for the next launch
    assert not bool(plan.progress.any())
    assert not bool(plan.compared.any())

    arguments = (step.block_table, shape, sequences)
    exact = module.paged_attention_reference(step.query.float(), step.cache.float(), *arguments, **options)
    plain = plain_attention(case, step, sinks)
    assert_as_good(output[: step.tokens], exact[: step.tokens], plain[: step.tokens])
    return output


def plain_attention(case: Case, step: Step, sinks: torch.Tensor | None) -> torch.Tensor:
    """With torch operators in the query's own type."""
    output = torch.zeros_like(step.query)
    group = case.q_heads // case.kv_heads
    start = 0
    for i, (length, queries) in enumerate(case.sequences):
        blocks = step.block_table[step.rows[i].long(), : -(-length // case.block_size)].long()
        keys, values = step.cache.to(step.query.dtype)[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, :length]
        query = step.query[start : start + queries].transpose(0, 1)
        logits = query @ keys.repeat_interleave(group, 0).transpose(1, 2) * case.dim**-0.5
        if case.soft_cap is not None:
            logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
        distance = torch.arange(length - queries, length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (case.window or math.inf))
        logits = logits.masked_fill(hidden.to(logits.device), -torch.inf)
        if sinks is not None:
            logits = torch.cat((logits, sinks.to(logits)[:, None, None].expand(-1, queries, 1)), dim=-1)
        probabilities = logits.softmax(-1)[..., :length]
        attended = probabilities @ values.repeat_interleave(group, 0)
        output[start : start + queries] = attended.transpose(0, 1)
        start += queries
    return output
