"""Tiles of the attention kernels: the sizes that fit a card, their places in the cache, and the running softmax.

A running softmax is a maximum, a sum and weighted values, to which tiles are added one after the other; it begins as
`nothing_seen`. A program stores its softmax in two arrays, for other programs to merge.
Legend: H heads, K kv heads, G = H / K, E head dim, N cache blocks, S block size.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from hookline.plugins.kernels.triton_activations import widened
from hookline.plugins.kernels.triton_card import Card, Room, fitting
from hookline.plugins.kernels.triton_launch import next_power_of_2

WIDE_HEAD = 256
"""Wider heads than this leave room for small tiles alone."""
LEAST_TILE = 16
"""Fewest positions, and fewest queries, of a matrix product."""
Tiling = TypeVar("Tiling")


def fitting_tile(tiling: Tiling, group: int, head_dim: int, dtype: torch.dtype, card: Card) -> Tiling:
    """This tiling with as many stages as the card has room for, else with fewer positions, then with fewer queries.

    tiling: has a tile of positions and num_stages, and block_m queries unless a program has the group of one token.
    Raises: ConfigError if not even the smallest tile fits.
    """
    found: Tiling = _fitting_tile(tiling, group, head_dim, dtype, card)
    return found


@cache
def _fitting_tile(tiling: Any, group: int, head_dim: int, dtype: torch.dtype, card: Card) -> Any:
    least_queries, block_dim = max(LEAST_TILE, next_power_of_2(group)), max(LEAST_TILE, next_power_of_2(head_dim))

    def room(one: Any) -> Room:
        queries = getattr(one, "block_m", least_queries)
        return Room(2 * one.tile * block_dim * dtype.itemsize, queries * (block_dim + one.tile) * dtype.itemsize)

    name = f"attention with heads of {head_dim} {str(dtype).removeprefix('torch.')} numbers"
    return fitting(_from_large_to_small(tiling, least_queries), room, card, name)


def _from_large_to_small(tiling: Any, least_queries: int) -> Iterator[Any]:
    yield tiling
    while tiling.tile > LEAST_TILE:
        tiling = replace(tiling, tile=tiling.tile // 2)
        yield tiling
    while getattr(tiling, "block_m", 0) > least_queries:
        tiling = replace(tiling, block_m=tiling.block_m // 2)
        yield tiling


@triton.jit
def tile_blocks(table_row_ptr, start, limit, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block of the TILE positions from `start`, or of each of them if blocks do not hold whole tiles.

    Loops ask for it a tile ahead: while a load waits for another load of its tile, fewer tiles are under way.
    """
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_row_ptr + start // BLOCK_SIZE, mask=start < limit, other=0)
    else:
        position = start + tl.arange(0, TILE)
        return tl.load(table_row_ptr + position // BLOCK_SIZE, mask=position < limit, other=0)


@triton.jit
def tile_places(blocks, start, block_stride, offset_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Offsets into one half of the cache of the TILE positions from `start`, which lie in these blocks."""
    if BLOCK_SIZE % TILE == 0:
        offset = start % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        offset = (start + tl.arange(0, TILE)) % BLOCK_SIZE
    return blocks.to(tl.int64) * block_stride + offset * offset_stride


@triton.jit
def as_stored(x, cache_ptr):
    """Keys or values in the dtype of the cache; for e4m3, clamped to its largest number."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def as_multiplied(q, cache_ptr):
    """Queries in the dtype of their products: float16 for bfloat16 and a cache in e4m3, which float16 holds exactly.

    A card widens e4m3 to float16 with one instruction for two numbers, to bfloat16 with four. For few queries alone: a
    larger tile of them would stay in registers once it is converted, where one that is loaded lies in shared memory.
    """
    if cache_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        most = tl.full([1, 1], 65504.0, tl.float16)
        q = tl.minimum(tl.maximum(q.to(tl.float16), -most), most)
    return q


@triton.jit
def load_tile(head_ptr, half_stride, place, mask, DTYPE: tl.constexpr):
    """Keys and values of a tile (TILE, BLOCK_DIM) at these places of one head, as numbers of this dtype.

    mask: positions within the context, for a slot past it may hold anything, and 0 * NaN is NaN.
    """
    k = tl.load(head_ptr + place[:, None], mask=mask, other=0.0)
    v = tl.load(head_ptr + half_stride + place[:, None], mask=mask, other=0.0)
    return widened(k, DTYPE), widened(v, DTYPE)


@triton.jit
def side_by_side(v, cache_ptr):
    """Values of a head for a product of few queries: those of a cache in e4m3 in an order of `in_order`'s.

    As the right operand of such matrix instructions, a thread holds the values of adjacent positions. In 8 bits it
    would read each alone, so that values that lie side by side go to four instructions, and it reads four at once.
    """
    ROWS: tl.constexpr = v.shape[0]
    DIM: tl.constexpr = v.shape[1]
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        v = tl.reshape(tl.permute(tl.reshape(v, [ROWS, DIM // 4, 4]), [0, 2, 1]), [ROWS, DIM])
    return v


@triton.jit
def in_order(acc, cache_ptr):
    """Sums of values that were given `side_by_side`, in the order of a head."""
    ROWS: tl.constexpr = acc.shape[0]
    DIM: tl.constexpr = acc.shape[1]
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        acc = tl.reshape(tl.permute(tl.reshape(acc, [ROWS, 4, DIM // 4]), [0, 2, 1]), [ROWS, DIM])
    return acc


@triton.jit
def query_lens(row, query_starts_ptr, context_lens_ptr):
    """Of a request: its first query in the step, how many it has, and its context with them."""
    query_start = tl.load(query_starts_ptr + row)
    query_len = tl.load(query_starts_ptr + row + 1) - query_start
    return query_start, query_len, tl.load(context_lens_ptr + row)


@triton.jit
def query_members(first, query_len, kv_head, GROUP: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of each row of a tile of queries from `first` on: its token, its head, and whether there is such a query."""
    member = tl.arange(0, BLOCK_M)
    token = first + member // GROUP
    head = kv_head * GROUP + member % GROUP
    return token, head, (token < query_len) & (member < TOKENS * GROUP)


@triton.jit
def nothing_seen(lowest, BLOCK_M: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """A running softmax of no position, whose maximum is `lowest`."""
    maximum = tl.full([BLOCK_M], lowest, tl.float32)
    return maximum, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)


@triton.jit
def taken_in(scores, maximum, total):
    """Add a tile's scores: new maximum, new sum, the tile's weights, and the factor of the weighted values so far."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_maximum[:, None])
    rescale = tl.exp2(maximum - new_maximum)
    return new_maximum, total * rescale + tl.sum(weights, axis=1), weights, rescale


@triton.jit
def store_part(partial_ptr, stats_ptr, at, maximum, total, acc, dim, rows, mask, HEAD_DIM: tl.constexpr):
    """Store a running softmax for another program to merge, row i at place at[i]."""
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)
    tl.store(stats_ptr + at * 2, maximum, mask=rows)
    tl.store(stats_ptr + at * 2 + 1, total, mask=rows)


@triton.jit
def merge_parts(
    maximum, total, acc, partial_ptr, stats_ptr, first, count, part_stride, head, heads, dim, dims,
    HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge partials first, first + 1, … into the running (maximum, sum, weighted values) of some heads.

    Loads bypass the L1 cache: other programs may have written the partials while this one ran.
    """
    for begin in range(0, count, PARTS):
        index = begin + tl.arange(0, PARTS)
        at = (first + index.to(tl.int64))[:, None] * part_stride + head[None, :]
        inside = (index < count)[:, None] & heads[None, :]
        part_maximum = tl.load(stats_ptr + at * 2, mask=inside, other=-float("inf"), cache_modifier=".cg")
        part_total = tl.load(stats_ptr + at * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial_ptr + at[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=inside[:, :, None] & dims[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, axis=0))
        new_maximum = tl.where(heads, new_maximum, 0.0)  # keeps padding heads free of inf - inf
        weight = tl.exp2(part_maximum - new_maximum[None, :])
        rescale = tl.exp2(maximum - new_maximum)
        acc = acc * rescale[:, None] + tl.sum(weight[:, :, None] * values, axis=0)
        total = total * rescale + tl.sum(weight * part_total, axis=0)
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def without_padding(
    maximum, total, acc, rows, BLOCK_M: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """The running softmax without rows that only fill up the matrix product, so that partials load in whole rows."""
    REPEAT: tl.constexpr = BLOCK_M // BLOCK_GROUP
    maximum = tl.sum(tl.reshape(tl.where(rows, maximum, 0.0), [REPEAT, BLOCK_GROUP]), axis=0)
    total = tl.sum(tl.reshape(tl.where(rows, total, 0.0), [REPEAT, BLOCK_GROUP]), axis=0)
    acc = tl.sum(tl.reshape(tl.where(rows[:, None], acc, 0.0), [REPEAT, BLOCK_GROUP, BLOCK_DIM]), axis=0)
    return maximum, total, acc
