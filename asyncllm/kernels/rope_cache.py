"""Rotary embedding of queries and keys, optional norm of their heads, and the write of keys and values to the cache.

The rotation is that of "rotate half" (Su et al., 2021, in the layout of Hugging Face): of the first R of a head's D
dimensions, i and i + R/2 turn together; the other D − R stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.kernels.language import (
    SHARED_FIRST,
    await_previous,
    ceil_div,
    jit,
    launch_next,
    next_power_of_2,
    overlap_options,
    tl,
)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head before the rotation (Qwen3)."""

    query: torch.Tensor  # [D]
    key: torch.Tensor  # [D]
    epsilon: float


@jit
def _rope_cache_kernel(
    query: tl.tensor,
    cache: tl.tensor,
    qkv: tl.tensor,
    positions: tl.tensor,
    angles: tl.tensor,
    rows: tl.tensor,
    num_tokens: tl.tensor,
    table: tl.tensor,
    block_table: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    epsilon: tl.float32,
    table_width: tl.int32,
    plane_stride: tl.int64,
    QKV_STRIDE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    NARROW: tl.constexpr,
    CARVE_OUT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # All but the heads is loaded while the kernel before still runs.
    token = tl.program_id(0)
    count = tl.load(num_tokens)
    position = tl.load(positions + token)
    row = tl.load(rows + token)
    angle = tl.load(angles + token)

    half: tl.constexpr = ROTARY // 2
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = heads < Q_HEADS
    is_key = (heads >= Q_HEADS) & (heads < Q_HEADS + KV_HEADS)
    is_value = (heads >= Q_HEADS + KV_HEADS) & (heads < Q_HEADS + 2 * KV_HEADS)
    rotates = (is_query | is_key)[:, None]
    pairs = tl.arange(0, HALF_PAD)
    if REST_PAD:
        others = ROTARY + tl.arange(0, REST_PAD)
    known = (heads < Q_HEADS + 2 * KV_HEADS)[:, None]
    entry = tl.where(token < count, row.to(tl.int64) * table_width + position // BLOCK_SIZE, 0)
    block = tl.load(block_table + entry).to(tl.int64)
    turn = table + tl.where(token < count, angle, 0).to(tl.int64) * ROTARY + pairs
    cosine = tl.load(turn, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(turn + half, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    if NORM:
        low_weights = _head_weights(query_norm, key_norm, is_query, rotates, pairs, half)
        high_weights = _head_weights(query_norm + half, key_norm + half, is_query, rotates, pairs, half)
        if REST_PAD:
            rest_weights = _head_weights(query_norm, key_norm, is_query, rotates, others, DIM)
    await_previous(OVERLAP)
    launch_next(OVERLAP)

    source = qkv + token.to(tl.int64) * QKV_STRIDE + heads[:, None] * DIM
    low = tl.load(source + pairs[None, :], mask=known & (pairs < half)[None, :], other=0.0).to(tl.float32)
    high = tl.load(source + half + pairs[None, :], mask=known & (pairs < half)[None, :], other=0.0).to(tl.float32)
    if REST_PAD:
        rest = tl.load(source + others[None, :], mask=known & (others < DIM)[None, :], other=0.0).to(tl.float32)
    if token >= count:
        return

    if NORM:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if REST_PAD:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.where(rotates, (1.0 / tl.sqrt_rn(squares / DIM + epsilon))[:, None], 1.0)
        low *= scale * low_weights
        high *= scale * high_weights
        if REST_PAD:
            rest *= scale * rest_weights

    turned_low = tl.where(rotates, low * cosine - high * sine, _finite(low, LIMIT))
    turned_high = tl.where(rotates, high * cosine + low * sine, _finite(high, LIMIT))
    if REST_PAD:
        rest = tl.where(rotates, rest, _finite(rest, LIMIT))

    # head h of the keys, or of the values, in slot position % BLOCK_SIZE of its block
    to_query = query + (token.to(tl.int64) * Q_HEADS + heads) * DIM
    kv_head = tl.where(is_value, heads - (Q_HEADS + KV_HEADS), heads - Q_HEADS)
    slot = (block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
    to_cache = cache + tl.where(is_value, plane_stride, 0) + slot * DIM
    if NARROW:
        cached = known & (is_key | is_value)[:, None]
        known &= is_query[:, None]
        pair = (pairs < half)[None, :]
        tl.store(to_cache[:, None] + pairs[None, :], _narrow(turned_low, cache, LIMIT), mask=cached & pair)
        tl.store(to_cache[:, None] + half + pairs[None, :], _narrow(turned_high, cache, LIMIT), mask=cached & pair)
        if REST_PAD:
            to_rest = to_cache[:, None] + others[None, :]
            tl.store(to_rest, _narrow(rest, cache, LIMIT), mask=cached & (others < DIM)[None, :])
        destination = to_query[:, None]
    else:
        destination = tl.where(is_query, to_query, to_cache)[:, None]
    element = query.dtype.element_ty
    tl.store(destination + pairs[None, :], turned_low.to(element), mask=known & (pairs < half)[None, :])
    tl.store(destination + half + pairs[None, :], turned_high.to(element), mask=known & (pairs < half)[None, :])
    if REST_PAD:
        tl.store(destination + others[None, :], rest.to(element), mask=known & (others < DIM)[None, :])


@jit
def _narrow(x: tl.tensor, cache: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """In the cache's 8 bits: what is too large is as large as they can say."""
    return _finite(x, LIMIT).to(cache.dtype.element_ty)


@jit
def _finite(x: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    number = tl.where(x == x, x, 0.0)  # noqa: PLR0124 # only not-a-number differs from itself
    return tl.minimum(tl.maximum(number, -LIMIT), LIMIT)


@jit
def _head_weights(
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    is_query: tl.tensor,
    rotates: tl.tensor,
    columns: tl.tensor,
    END: tl.constexpr,
) -> tl.tensor:
    of_query = tl.load(query_norm + columns, mask=columns < END, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + columns, mask=columns < END, other=0.0).to(tl.float32)
    return tl.where(rotates, tl.where(is_query[:, None], of_query[None, :], of_key[None, :]), 1.0)


def rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    table: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    angles: torch.Tensor | None = None,
    norm: HeadNorm | None = None,
    query: torch.Tensor | None = None,
    uniform: bool = False,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values to their slots; returns the queries [tokens, Hq, D].

    qkv [tokens, (Hq + 2 Hkv) · D], bias added, last dimension dense; positions and rows [tokens] int32: token i stands
    at positions[i] of the request in block_table[rows[i]]; num_tokens [1] int32, how many of the tokens exist (for the
    others nothing is written); table [any, R], cosines in the first R/2 columns, sines in the last; angles
    [tokens], of any integer type: each token's line of the table, positions unless given; cache
    [2, blocks, Hkv, block_size, D], dense, of qkv's type or float8_e4m3fn; block_table [rows, most blocks] int32,
    dense. `query` is written when given.

    Values are written finite (not-a-number as 0, infinity as the largest number): attention multiplies the values of
    keys that a row may not see by 0, so one request's overflow would reach the next owner of its block. In 8 bits, keys
    too are written so.

    `uniform=True`: a token gives the same bits whatever the number of tokens.

    On a GPU where kernels overlap, all but qkv was written by a launch that is not the last one before.
    """
    _, _, kv_heads, block_size, dim = cache.shape
    tokens = qkv.shape[0]
    heads = qkv.shape[1] // dim
    q_heads = heads - 2 * kv_heads
    rotary = table.shape[1]
    if query is None:
        query = torch.empty((tokens, q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    # one program takes a few heads while tokens are few, so that a decode step fills the GPU
    per_program = min(next_power_of_2(heads), 8 if uniform or tokens <= 256 else 16)
    if tokens:
        _rope_cache_kernel[(tokens, ceil_div(heads, per_program))](
            query,
            cache,
            qkv,
            positions,
            positions if angles is None else angles,
            rows,
            num_tokens,
            table,
            block_table,
            query if norm is None else norm.query,
            query if norm is None else norm.key,
            0.0 if norm is None else norm.epsilon,
            block_table.shape[1],
            cache.stride(0),
            QKV_STRIDE=qkv.stride(0),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            ROTARY=rotary,
            BLOCK_SIZE=block_size,
            HALF_PAD=next_power_of_2(rotary // 2),
            REST_PAD=next_power_of_2(dim - rotary) if dim > rotary else 0,
            HEADS=per_program,
            NORM=norm is not None,
            LIMIT=torch.finfo(cache.dtype).max,
            NARROW=cache.dtype != qkv.dtype,
            CARVE_OUT=SHARED_FIRST,
            num_warps=max(1, per_program // 4),
            **overlap_options(qkv.device),
        )
    return query


def rope_cache_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    table: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    angles: torch.Tensor | None = None,
    norm: HeadNorm | None = None,
) -> torch.Tensor:
    """`rope_cache` in plain torch, computed in float32."""
    _, _, kv_heads, block_size, dim = cache.shape
    count = int(num_tokens)
    position = positions[:count].long()
    heads = qkv[:count].float().reshape(count, -1, dim)  # [tokens, heads, D]
    query, key, value = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    if norm is not None:
        query = torch.nn.functional.rms_norm(query, (dim,), norm.query.float(), norm.epsilon)
        key = torch.nn.functional.rms_norm(key, (dim,), norm.key.float(), norm.epsilon)
    turns = position if angles is None else angles[:count].long()
    cosine, sine = table[turns].float().unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, R/2] each

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = table.shape[1] // 2
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((low * cosine - high * sine, high * cosine + low * sine, rest), dim=-1)

    block = block_table[rows[:count].long(), position // block_size].long()
    limit = min(torch.finfo(cache.dtype).max, torch.finfo(torch.float32).max)
    keys = rotate(key)
    if cache.dtype != qkv.dtype:
        keys = keys.nan_to_num(0.0, limit, -limit).clamp(-limit, limit)
    values = value.nan_to_num(0.0, limit, -limit).clamp(-limit, limit)
    # torch moves no 8-bit floats by index, but bytes
    whole = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    whole[0, block, :, position % block_size] = keys.to(cache.dtype).view(whole.dtype)
    whole[1, block, :, position % block_size] = values.to(cache.dtype).view(whole.dtype)
    result = torch.empty((qkv.shape[0], query.shape[1], dim), dtype=qkv.dtype, device=qkv.device)
    result[:count] = rotate(query).to(qkv.dtype)
    return result
