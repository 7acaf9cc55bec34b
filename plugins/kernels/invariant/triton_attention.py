"""Paged attention cut by the context alone: a token gets the same bits as a decode and in any chunk of a prompt.

One kernel serves both, with tiles of the same number of positions, so that a decode is computed as a prompt of one
token; tiles of decodes may have fewer queries. A query goes through the tiles of its context in order, from position 0
on, and starts a new sum every SEGMENT positions; segments are merged in order, too. So a few decodes of long contexts
may have a program for each segment, and others one program for all: the same numbers are added in the same order. Tiles
that a query does not see do not change its bits. Programs of decodes can normalise, rotate and write the newest token
themselves: they call the same functions as the separate launch, and read the result from memory.
Legend: T tokens, B requests, H heads, K kv heads, G = H / K, E head dim, M blocks in a table row, N cache blocks,
S block size, W query tiles, P segments.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import Batch, QKNorm, Rope
from hookline.plugins.kernels.attention.triton_forms import LOWEST, Scoring, load_sinks, scored
from hookline.plugins.kernels.attention.triton_tiles import (
    fitting_tile,
    load_tile,
    nothing_seen,
    query_lens,
    query_members,
    store_part,
    tile_blocks,
    tile_places,
)
from hookline.plugins.kernels.norms.triton_rotary import load_halves, norm_rope_write
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, launch_options, launches_early, next_power_of_2

SEGMENT = 1024
"""Positions after which a query starts afresh."""
MEASURED_HEAD = 128
"""Head dim up to which a tile has 64 positions."""


@dataclass(frozen=True)
class AttentionTiling:
    """block_m queries (tokens times G) by tile positions: one choice for all decodes, and one for all prompts.

    keys_left: keys and values are the left operands, of which Hopper's matrix instruction takes 64 rows and more, in
    place of queries and weights; of the right one it takes few. by_products: sums of weights are matrix products too.
    On an H200 an element of a product has the same bits either way, and among any number of rows (docs/log); a sum
    over keys that threads share has the order of their layout.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    keys_left: bool = False
    by_products: bool = False

    @classmethod
    def of(cls, group: int, head_dim: int, dtype: torch.dtype, card: Card, *, decodes: bool = False) -> AttentionTiling:
        """By the model and the card; on Hopper few queries for decodes, of which 64 would be padding.

        Raises: ConfigError if not even the smallest tile fits the card.
        """
        prompts = fitting_tile(cls._fastest(group, head_dim, dtype, card), group, head_dim, dtype, card)
        if not decodes or not prompts.by_products:
            return prompts
        return replace(prompts, block_m=max(16, next_power_of_2(group)), keys_left=True)  # of as many positions

    @classmethod
    def _fastest(cls, group: int, head_dim: int, dtype: torch.dtype, card: Card) -> AttentionTiling:
        block_m = max(64, next_power_of_2(group))
        if dtype == torch.float32:
            return cls(block_m, 16 if head_dim > MEASURED_HEAD else 32, num_warps=8, num_stages=2)
        if head_dim > MEASURED_HEAD or not card.large_shared_memory:
            return cls(block_m, 32, num_warps=8 if head_dim > MEASURED_HEAD else 4, num_stages=3)
        return cls(block_m, 64, num_warps=4, num_stages=3, by_products=card.is_hopper and head_dim >= 64)


@dataclass(frozen=True)
class Segments:
    """Where programs leave their segments of decodes; made once, so that graphs see fixed addresses.

    Shapes: partial_BPHE, stats_BPH2 float32 (maximum and sum).
    """

    partial_BPHE: Tensor
    stats_BPH2: Tensor

    @classmethod
    def make(cls, num_rows: int, max_context_len: int, num_heads: int, head_dim: int, device: torch.device) -> Segments:
        """Allocate for `num_rows` decodes of contexts of up to `max_context_len` tokens."""
        shape = num_rows, cdiv(max_context_len, SEGMENT), num_heads
        sizes = ((*shape, head_dim), (*shape, 2))
        return cls(*(torch.empty(size, dtype=torch.float32, device=device) for size in sizes))

    def number(self, num_rows: int, max_context_len: int) -> int:
        """Segments that have a program of their own; 1 if each program has all of them."""
        if num_rows > len(self.partial_BPHE) or max_context_len <= SEGMENT:
            return 1
        return min(-(-max_context_len // SEGMENT), self.partial_BPHE.shape[1])


@dataclass(frozen=True)
class Newest:
    """Decodes' newest tokens as they are projected: norm, rotation and the cache write are left to do.

    Shapes: qkv_TC (T, (H + 2K) * E). A rotary table is as wide as a head.
    """

    qkv_TC: Tensor
    rope: Rope | None
    norm: QKNorm | None


@triton.jit
def _along(per_query, KEYS_LEFT: tl.constexpr):
    """A number of each query, as a row if queries are the columns of a tile (KEYS_LEFT), else as a column."""
    if KEYS_LEFT:
        return per_query[None, :]
    else:
        return per_query[:, None]


@triton.jit
def _taken_in(maximum, total, acc, other_maximum, other_total, other_acc, KEYS_LEFT: tl.constexpr):
    """Two (maximum, sum, weighted values) as one. Rounded as written: the compiler has nothing left to fuse."""
    new_maximum = tl.maximum(maximum, other_maximum)
    scale, other_scale = tl.exp2(maximum - new_maximum), tl.exp2(other_maximum - new_maximum)
    total = tl.fma(total, scale, other_total * other_scale)
    wide_scale = tl.broadcast_to(_along(scale, KEYS_LEFT), acc.shape)
    acc = tl.fma(acc, wide_scale, other_acc * _along(other_scale, KEYS_LEFT))
    return new_maximum, total, acc


@triton.jit
def _no_weights(
    lowest, BLOCK_M: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS_LEFT: tl.constexpr, BY_PRODUCTS: tl.constexpr
):  # fmt: skip
    """A running softmax of no position, as `_attend_tile` goes on with it.

    A sum of weights by products stands there 64 or 8 times, since a product has no fewer rows or columns.
    """
    maximum, total, acc = nothing_seen(lowest, BLOCK_M, BLOCK_DIM)
    if BY_PRODUCTS:
        total = tl.zeros([64, BLOCK_M] if KEYS_LEFT else [BLOCK_M, 8], tl.float32)
    if KEYS_LEFT:
        acc = tl.zeros([BLOCK_DIM, BLOCK_M], tl.float32)
    return maximum, total, acc


@triton.jit
def _attend_tile(
    q, maximum, total, acc, start, stop, seen, last_position, window, blocks, head_ptr, dims,
    half_stride, block_stride, offset_stride, factor, cap,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
    KEYS_LEFT: tl.constexpr, BY_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys and values, which lies in these blocks, to the running softmax."""
    KEYS: tl.constexpr = 0 if KEYS_LEFT else 1
    position = start + tl.arange(0, TILE)
    inside = position < stop
    at, last = _along(position, not KEYS_LEFT), _along(last_position, KEYS_LEFT)
    visible = at <= last
    if WINDOW:
        inside &= position >= seen
        visible &= at > last - window
    place = tile_places(blocks, start, block_stride, offset_stride, BLOCK_SIZE, TILE)
    k, v = load_tile(head_ptr, half_stride, place, inside[:, None] & dims[None, :], q.dtype)
    if KEYS_LEFT:
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    else:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = scored(scores, factor, cap, CAP)
    scores = tl.where(visible, scores, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=KEYS))
    weights = tl.exp2(scores - _along(new_maximum, KEYS_LEFT))
    rescale = tl.exp2(maximum - new_maximum)
    given = weights.to(v.dtype)
    if BY_PRODUCTS:
        if KEYS_LEFT:
            total = tl.dot(tl.full([total.shape[0], TILE], 1.0, v.dtype), given, total * rescale[None, :])
        else:
            total = tl.dot(given, tl.full([TILE, total.shape[1]], 1.0, v.dtype), total * rescale[:, None])
    else:
        total = tl.fma(total, rescale, tl.sum(weights, axis=KEYS))
    if KEYS_LEFT:
        acc = tl.dot(tl.trans(v), given, acc * rescale[None, :], input_precision=PRECISION)
    else:
        acc = tl.dot(given, v, acc * rescale[:, None], input_precision=PRECISION)
    return new_maximum, total, acc


@triton.jit
def _own_heads(
    kv_head, has_newest, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_OWN: tl.constexpr
):  # fmt: skip
    """Indices, over the heads of q, k and v, of a kv head's queries and, with has_newest, of its key and value."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    member = tl.arange(0, BLOCK_OWN)
    newest = NUM_HEADS + (member - GROUP) * NUM_KV_HEADS + kv_head
    is_newest = (member < GROUP + 2) & has_newest
    return tl.where(member < GROUP, kv_head * GROUP + member, tl.where(is_newest, newest, NUM_HEADS + 2 * NUM_KV_HEADS))


@triton.jit
def _ask_for_tile(
    head_ptr, block, start, stop, half_stride, block_stride, offset_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fetch a tile's keys and values into the L2 cache, a row by each thread; later writes update it there."""
    one = tl.arange(0, 2 * TILE)
    offset = (start % BLOCK_SIZE + one // 2) * offset_stride
    address = head_ptr + (block.to(tl.int64) * block_stride + offset) + one % 2 * half_stride
    num_bytes = tl.zeros([2 * TILE], tl.int32) + HEAD_DIM * head_ptr.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r", [address.to(tl.int64, bitcast=True), (start + one // 2 < stop).to(tl.int32), num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride", "window", "most_segments"],
    do_not_specialize_on_alignment=(*OF_STEP, "table_ptr"),
)
def _attend_kernel(
    q_ptr, cache_ptr, table_ptr, tiles_ptr, query_starts_ptr, context_lens_ptr, out_ptr, partial_ptr, stats_ptr,
    q_stride, half_stride: tl.int64, block_stride, offset_stride, head_stride, table_stride, factor, cap, sinks_ptr,
    window, most_segments, qkv_ptr, slots_ptr, rope_ptr, q_weight_ptr, k_weight_ptr, token_stride, rope_stride, eps,
    FUSED: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, BLOCK_OWN: tl.constexpr, BLOCK_HALF: tl.constexpr,
    ASK: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DIM: tl.constexpr, TILE: tl.constexpr, SEGMENT: tl.constexpr,
    PRECISION: tl.constexpr, KEYS_LEFT: tl.constexpr, BY_PRODUCTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries over all its segments; with SPLIT of a decode over one, for `_merge_kernel`.

    FUSED: each tile is one decode, whose queries, key and value come from qkv; its queries are stored to q.
    """
    kv_head = tl.program_id(0)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    row = tl.load(tiles_ptr + tl.program_id(1) * 2)
    first = tl.load(tiles_ptr + tl.program_id(1) * 2 + 1)
    if row < 0:
        return
    query_start, query_len, context_len = query_lens(row, query_starts_ptr, context_lens_ptr)
    past = context_len - query_len
    stop = tl.minimum(past + first + TOKENS, context_len)
    seen = 0
    if WINDOW:
        seen = tl.maximum(past + first - window + 1, 0)
    first_segment, num_segments = seen // SEGMENT, tl.cdiv(stop, SEGMENT)
    has_newest = True
    if SPLIT:
        first_segment = tl.program_id(2)
        if first_segment >= num_segments:
            return
        has_newest = first_segment == num_segments - 1
        num_segments = first_segment + 1

    token, head, is_query = query_members(first, query_len, kv_head, GROUP, TOKENS, BLOCK_M)
    dim = tl.arange(0, BLOCK_DIM)
    dims = dim < HEAD_DIM
    mask_md = is_query[:, None] & dims[None, :]
    at_token = (query_start + token).to(tl.int64)
    last_position = past + token
    table_row_ptr = table_ptr + row.to(tl.int64) * table_stride
    head_ptr = cache_ptr + kv_head * head_stride + dim[None, :]
    first_start = first_segment * SEGMENT
    if WINDOW:
        first_start = tl.maximum(first_start, seen // TILE * TILE)
    blocks = tile_blocks(table_row_ptr, first_start, stop, BLOCK_SIZE, TILE)
    if FUSED:
        slot = tl.load(slots_ptr + query_start)
        half = tl.arange(0, BLOCK_HALF)
        halves = half < HEAD_DIM // 2
        cos, sin, q_low, q_high, k_low, k_high = load_halves(
            q_weight_ptr, k_weight_ptr, rope_ptr + past.to(tl.int64) * rope_stride, half, halves, HEAD_DIM, BLOCK_HALF,
            NORM, ROPE,
        )  # fmt: skip
    if ASK:  # what comes before the newest token was there before this step
        _ask_for_tile(
            cache_ptr + kv_head * head_stride, blocks, first_start, past, half_stride, block_stride, offset_stride,
            HEAD_DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if FUSED:
        norm_rope_write(
            qkv_ptr, q_ptr, cache_ptr, query_start.to(tl.int64), slot,
            _own_heads(kv_head, has_newest, GROUP, NUM_KV_HEADS, BLOCK_OWN), half, halves,
            cos, sin, q_low, q_high, k_low, k_high,
            token_stride, half_stride, block_stride, offset_stride, head_stride, eps,
            NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NORM, ROPE, True,
        )  # fmt: skip
        tl.debug_barrier()  # what one thread has written, others read below
    q = tl.load(q_ptr + (at_token * q_stride + head * HEAD_DIM)[:, None] + dim[None, :], mask=mask_md, other=0.0)

    all_maximum, all_total, all_acc = _no_weights(LOWEST, BLOCK_M, BLOCK_DIM, KEYS_LEFT, False)
    if SINKS:
        if not SPLIT:
            all_maximum = load_sinks(sinks_ptr, head, is_query)
            all_total += 1.0
    for segment in range(first_segment, num_segments):
        begin = segment * SEGMENT
        end = tl.minimum(begin + SEGMENT, stop)
        if WINDOW:
            begin = tl.maximum(begin, seen // TILE * TILE)
        maximum, total, acc = _no_weights(LOWEST, BLOCK_M, BLOCK_DIM, KEYS_LEFT, BY_PRODUCTS)
        for start in range(begin, end, TILE):
            maximum, total, acc = _attend_tile(
                q, maximum, total, acc, start, end, seen, last_position, window, blocks, head_ptr, dims,
                half_stride, block_stride, offset_stride, factor, cap, BLOCK_SIZE, TILE, WINDOW, CAP, PRECISION,
                KEYS_LEFT, BY_PRODUCTS,
            )  # fmt: skip
            blocks = tile_blocks(table_row_ptr, start + TILE, stop, BLOCK_SIZE, TILE)
        if BY_PRODUCTS:
            total = tl.max(total, axis=0 if KEYS_LEFT else 1)
        if SPLIT:
            at = (row.to(tl.int64) * most_segments + segment) * NUM_HEADS + head
            acc = tl.trans(acc) if KEYS_LEFT else acc
            store_part(partial_ptr, stats_ptr, at, maximum, total, acc, dim, is_query, mask_md, HEAD_DIM)
        else:
            all_maximum, all_total, all_acc = _taken_in(
                all_maximum, all_total, all_acc, maximum, total, acc, KEYS_LEFT
            )  # fmt: skip
    if not SPLIT:
        all_total = tl.where(is_query, all_total, 1.0)
        to_out = out_ptr + (at_token * NUM_HEADS * HEAD_DIM + head * HEAD_DIM)[:, None] + dim[None, :]
        out = (all_acc / _along(all_total, KEYS_LEFT)).to(out_ptr.dtype.element_ty)
        tl.store(to_out, tl.trans(out) if KEYS_LEFT else out, mask=mask_md)


@triton.jit(do_not_specialize=["most_segments"], do_not_specialize_on_alignment=OF_STEP)
def _merge_kernel(
    context_lens_ptr, out_ptr, partial_ptr, stats_ptr, sinks_ptr, most_segments, SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """The segments of some heads of a decode, merged as one program would."""
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    heads = head < NUM_HEADS
    dim = tl.arange(0, BLOCK_DIM)
    mask = heads[:, None] & (dim < HEAD_DIM)[None, :]
    all_maximum, all_total, all_acc = nothing_seen(LOWEST, BLOCK_HEADS, BLOCK_DIM)
    if SINKS:
        all_maximum = load_sinks(sinks_ptr, head, heads)
        all_total += 1.0
    for segment in range(0, tl.cdiv(tl.load(context_lens_ptr + row), SEGMENT)):
        at = (row.to(tl.int64) * most_segments + segment) * NUM_HEADS + head
        maximum = tl.load(stats_ptr + at * 2, mask=heads, other=0.0)
        total = tl.load(stats_ptr + at * 2 + 1, mask=heads, other=0.0)
        acc = tl.load(partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        all_maximum, all_total, all_acc = _taken_in(all_maximum, all_total, all_acc, maximum, total, acc, False)
    all_total = tl.where(heads, all_total, 1.0)
    to_out = out_ptr + (row.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to_out, (all_acc / all_total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=OF_STEP)
def _longest_first_kernel(
    context_lens_ptr, tiles_ptr, num_rows, BLOCK_ROWS: tl.constexpr, BLOCK_OTHERS: tl.constexpr
):  # fmt: skip
    """Each program finds the places of a few rows, by counting the rows that come before each."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rows = row < num_rows
    length = tl.load(context_lens_ptr + row, mask=rows, other=0)
    place = tl.zeros([BLOCK_ROWS], tl.int32)
    for begin in range(0, num_rows, BLOCK_OTHERS):
        other = begin + tl.arange(0, BLOCK_OTHERS)
        others = other < num_rows
        other_length = tl.load(context_lens_ptr + other, mask=others, other=0)
        is_earlier = (other_length[None, :] == length[:, None]) & (other[None, :] < row[:, None])
        is_before = ((other_length[None, :] > length[:, None]) | is_earlier) & others[None, :]
        place += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(tiles_ptr + place * 2, row, mask=rows)
    tl.store(tiles_ptr + place * 2 + 1, tl.zeros([BLOCK_ROWS], tl.int32), mask=rows)


def longest_first(context_lens_B: Tensor) -> Tensor:
    """The tiles of decodes with these contexts, the longest first, so that short ones fill up the end: (B, 2) int32.

    Device: one launch, no host sync; safe in a CUDA graph.
    """
    num_rows = len(context_lens_B)
    tiles_B2 = torch.empty((num_rows, 2), dtype=torch.int32, device=context_lens_B.device)
    _longest_first_kernel[(cdiv(num_rows, 16),)](
        context_lens_B, tiles_B2, num_rows, BLOCK_ROWS=16, BLOCK_OTHERS=128, num_warps=4
    )
    return tiles_B2


def attend_tiles(
    q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, tiles_W2: Tensor, scoring: Scoring, out_THE: Tensor,
    tiling: AttentionTiling, segments: Segments, num_segments: int = 1, newest: Newest | None = None,
) -> None:  # fmt: skip
    """Causal attention of the listed query tiles; other rows of out do not change.

    newest: for tiles that are decodes; q_THE, contiguous, and the cache are then written. It changes no bit.

    num_segments: more than one for tiles that are the first decodes of the batch, without a window: each segment then
    has its own program. It changes no bit.
    Shapes: q_THE, out_THE (T, H, E), heads contiguous; tiles_W2 (W, 2) int32: row (-1: none) and first query token of
    the row, with tiling.block_m // G tokens a tile.
    Device: one launch, two with more than one segment; no host sync.
    Source: Dao 2023, FlashAttention-2, arXiv:2307.08691.
    """
    _, num_heads, head_dim = q_THE.shape
    _, _, block_size, num_kv_heads, _ = kv_2NSKE.shape
    half_stride, block_stride, offset_stride, head_stride, _ = kv_2NSKE.stride()
    is_split, window = num_segments > 1, batch.window
    assert not is_split or window is None
    if not len(tiles_W2):
        return
    block_dim = max(16, next_power_of_2(head_dim))
    most_segments = segments.partial_BPHE.shape[1]
    sinks = q_THE if scoring.sinks_H is None else scoring.sinks_H
    group = num_heads // num_kv_heads
    qkv_TC, rope, norm = (newest.qkv_TC, newest.rope, newest.norm) if newest is not None else (q_THE, None, None)
    table = rope.table_PE if rope is not None else qkv_TC
    q_weight, k_weight = (norm.q_weight_E, norm.k_weight_E) if norm is not None else (qkv_TC, qkv_TC)
    _attend_kernel[(num_kv_heads, len(tiles_W2), num_segments)](
        q_THE, kv_2NSKE, batch.block_table_BM, tiles_W2, batch.query_starts_B1, batch.context_lens_B, out_THE,
        segments.partial_BPHE, segments.stats_BPH2,
        q_THE.stride(0), half_stride, block_stride, offset_stride, head_stride, batch.block_table_BM.stride(0),
        scoring.factor, scoring.cap, sinks, 0 if window is None else window, most_segments,
        qkv_TC, batch.slot_mapping_T, table, q_weight, k_weight, qkv_TC.stride(0), table.stride(0),
        norm.eps if norm is not None else 0.0, FUSED=newest is not None, NORM=norm is not None, ROPE=rope is not None,
        BLOCK_OWN=next_power_of_2(group + 2), BLOCK_HALF=next_power_of_2(head_dim // 2),
        ASK=newest is not None and _asks_early(kv_2NSKE, tiling),
        WINDOW=window is not None, CAP=scoring.cap != 0, SINKS=scoring.sinks_H is not None, SPLIT=is_split,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_M=tiling.block_m, BLOCK_DIM=block_dim, TILE=tiling.tile, SEGMENT=SEGMENT,
        PRECISION="ieee", KEYS_LEFT=tiling.keys_left, BY_PRODUCTS=tiling.by_products,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(q_THE.device),
    )  # fmt: skip
    if is_split:
        block_heads = min(4, next_power_of_2(num_heads))
        _merge_kernel[(len(tiles_W2), cdiv(num_heads, block_heads))](
            batch.context_lens_B, out_THE, segments.partial_BPHE, segments.stats_BPH2, sinks, most_segments,
            SINKS=scoring.sinks_H is not None, NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_HEADS=block_heads,
            BLOCK_DIM=block_dim, SEGMENT=SEGMENT, num_warps=1,
        )  # fmt: skip


def _asks_early(kv_2NSKE: Tensor, tiling: AttentionTiling) -> bool:
    """Whether programs ask for their first keys and values before they wait.

    They lie in one block, a row for each thread, and as the copy engine wants them.
    """
    if (
        not launches_early(kv_2NSKE.device)
        or kv_2NSKE.shape[2] % tiling.tile
        or 2 * tiling.tile < 32 * tiling.num_warps
    ):
        return False
    sizes = (*kv_2NSKE.stride()[:-1], kv_2NSKE.shape[-1], kv_2NSKE.storage_offset())
    return all(size * kv_2NSKE.element_size() % 16 == 0 for size in sizes)
