"""Paged decode attention, split along the context (flash-decoding) with the combine in the same launch.

A program attends with all query heads of one kv head to one work item of triton_schedule.py's list; the heads are the
rows of the matrix product, so K and V are read once. The last item of a request to finish merges them. On the way it
can normalise and rotate queries and the newest token's key, and write that token to the cache.
Legend: B requests, H heads, K kv heads, G = H / K, E head dim, M blocks in a table row, N cache blocks, S block size,
W work items, P shared-prefix parts of all rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import QKNorm, Rope
from hookline.plugins.kernels.attention.triton_forms import (
    Scoring,
    load_rotation_and_weights,
    load_sinks,
    rotary_partner,
    rotated,
    scored,
)
from hookline.plugins.kernels.attention.triton_schedule import ITEM_WIDTH, MERGE_ROWS, DecodeScratch, DecodeTiling
from hookline.plugins.kernels.attention.triton_tiles import (
    as_multiplied,
    as_stored,
    in_order,
    merge_parts,
    nothing_seen,
    side_by_side,
    store_part,
    taken_in,
    tile_blocks,
    tile_places,
    without_padding,
)
from hookline.plugins.kernels.triton_activations import widened
from hookline.plugins.kernels.triton_launch import OF_STEP, WIDE_GROUP, launch_options, next_power_of_2, triggers_late


@dataclass
class SharedPartials:
    """Partial results of the shared-prefix kernel, for decode to combine: part r of row b is at r * B + b. Float32."""

    partial_PHE: Tensor
    stats_PH2: Tensor


@dataclass(frozen=True)
class Newest:
    """The work on the newest token of every row that decode fuses: norm, rotation and the cache write.

    Shapes: context_lens_B (B,) int32, this token included.
    """

    context_lens_B: Tensor
    rope: Rope | None
    norm: QKNorm | None


@triton.jit
def _attend_tile(q, k, v, inside, maximum, total, acc, factor, cap, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Take a tile of keys and values into the running softmax."""
    scores = scored(tl.dot(q, tl.trans(k), input_precision=PRECISION), factor, cap, CAP)
    scores = tl.where(inside[None, :], scores, -float("inf"))
    maximum, total, weights, rescale = taken_in(scores, maximum, total)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return maximum, total, acc


@triton.jit
def _take_newest(q, new_k, new_v, maximum, total, acc, factor, cap, CAP: tl.constexpr, SINKS: tl.constexpr):
    """Begin the running softmax from the newest token, or take it in behind the sinks."""
    score = scored(tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1), factor, cap, CAP)
    if SINKS:
        new_maximum = tl.maximum(maximum, score)
        weight = tl.exp2(score - new_maximum)
        total = total * tl.exp2(maximum - new_maximum) + weight
        acc += weight[:, None] * new_v.to(tl.float32)
        maximum = new_maximum
    else:
        maximum = score
        total += 1.0
        acc += new_v.to(tl.float32)
    return maximum, total, acc


@triton.jit
def _store_out(out_row_ptr, total, acc, head, dim, rows, mask, HEAD_DIM: tl.constexpr):
    """Store what a running softmax comes to."""
    out = acc / tl.where(rows, total, 1.0)[:, None]
    to_out = out_row_ptr + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to_out, out.to(out_row_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=(*OF_STEP, "table_ptr"),
)
def _decode_kernel(
    q_ptr, cache_ptr, table_ptr, items_ptr, out_ptr, partial_ptr, stats_ptr, counters_ptr,
    shared_lens_ptr, shared_info_ptr, shared_partial_ptr, shared_stats_ptr, num_rows,
    q_stride, half_stride: tl.int64, block_stride, offset_stride, head_stride, table_stride, factor, cap, sinks_ptr,
    context_lens_ptr, rope_ptr, q_weight_ptr, k_weight_ptr, rope_stride, eps,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FUSED: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_GROUP: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr, ITEM_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    if PDL and not LATE:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)  # fastest: programs that run together read neighbouring heads of the same tokens
    item = tl.program_id(1)
    row = tl.load(items_ptr + item * ITEM_WIDTH)
    begin = tl.load(items_ptr + item * ITEM_WIDTH + 1)
    stop = tl.load(items_ptr + item * ITEM_WIDTH + 2)
    first = tl.load(items_ptr + item * ITEM_WIDTH + 3)
    parts = tl.load(items_ptr + item * ITEM_WIDTH + 4)
    if row < 0:
        return
    if WINDOW:
        seen = tl.load(items_ptr + item * ITEM_WIDTH + 5)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    member, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DIM)
    dims, head, mask_m = dim < HEAD_DIM, kv_head * GROUP + member, member < GROUP
    mask_md = mask_m[:, None] & dims[None, :]
    row64 = row.to(tl.int64)
    table_row_ptr = table_ptr + row64 * table_stride
    end = stop
    head_ptr = cache_ptr + kv_head * head_stride + dim[None, :]
    if FUSED:
        last = tl.load(context_lens_ptr + row) - 1
        newest_block = tl.load(table_row_ptr + last // BLOCK_SIZE).to(tl.int64)
        end, is_last = tl.minimum(stop, last), stop > last
        partner = rotary_partner(dim, ROTARY_DIM, HEAD_DIM)
        cos, sin, q_weight, k_weight, other_q_weight, other_k_weight = load_rotation_and_weights(
            rope_ptr + last * rope_stride, q_weight_ptr, k_weight_ptr, dim, partner, dims, HEAD_DIM, ROTARY_DIM,
            BLOCK_DIM, NORM, ROPE,
        )  # fmt: skip
    blocks = tile_blocks(table_row_ptr, begin, end, BLOCK_SIZE, TILE)
    if PDL:
        gdc_wait()
    if PDL and LATE:
        gdc_launch_dependents()
    shared_parts = 0
    if SHARED:  # loaded early, used late; the first item of a row merges the shared part
        shared_parts = tl.load(shared_info_ptr + 2)
        shared_parts = tl.where((item == first) & (tl.load(shared_lens_ptr + row) > 0), shared_parts, 0)

    maximum, total, acc = nothing_seen(-float("inf"), BLOCK_M, BLOCK_DIM)
    if SINKS:  # the first item of a row begins from them
        sink = load_sinks(sinks_ptr, head, mask_m)
        maximum = tl.where(item == first, sink, maximum)
        total += tl.where(item == first, 1.0, 0.0)
    if FUSED:
        one = tl.arange(0, 1)[:, None]
        q_head_ptr = q_ptr + row64 * q_stride + head[:, None] * HEAD_DIM
        k_ptr = q_ptr + row64 * q_stride + (NUM_HEADS + kv_head + one) * HEAD_DIM
        mask_1d = (one == 0) & dims[None, :]
        new_v = tl.load(k_ptr + NUM_KV_HEADS * HEAD_DIM + dim[None, :], mask=mask_1d, other=0.0)
        new_k = rotated(
            k_ptr, mask_1d, k_weight, other_k_weight, cos, sin, eps, dim, partner, HEAD_DIM, NORM, ROPE
        ).to(q_ptr.dtype.element_ty)  # fmt: skip
        q = rotated(
            q_head_ptr, mask_md, q_weight, other_q_weight, cos, sin, eps, dim, partner, HEAD_DIM, NORM, ROPE
        ).to(q_ptr.dtype.element_ty)  # fmt: skip
        if is_last:  # the row's newest token is not in the cache yet: this program starts from it, and writes it
            slot_ptr = head_ptr + newest_block * block_stride + last % BLOCK_SIZE * offset_stride
            stored_k, stored_v = as_stored(new_k, cache_ptr), as_stored(new_v, cache_ptr)
            tl.store(slot_ptr, stored_k, mask=mask_1d)
            tl.store(slot_ptr + half_stride, stored_v, mask=mask_1d)
            new_k, new_v = stored_k.to(q.dtype), side_by_side(stored_v.to(q.dtype), cache_ptr)  # as later steps read it
            maximum, total, acc = _take_newest(q, new_k, new_v, maximum, total, acc, factor, cap, CAP, SINKS)
    else:
        q = tl.load(q_ptr + row64 * q_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=mask_md, other=0.0)
    q = as_multiplied(q, cache_ptr)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < end
        if WINDOW:
            inside &= position >= seen
        place = tile_places(blocks, start, block_stride, offset_stride, BLOCK_SIZE, TILE)
        blocks = tile_blocks(table_row_ptr, start + TILE, end, BLOCK_SIZE, TILE)
        k = tl.load(head_ptr + place[:, None], mask=inside[:, None] & dims[None, :], other=0.0)
        v = tl.load(head_ptr + half_stride + place[:, None], mask=inside[:, None] & dims[None, :], other=0.0)
        k, v = widened(k, q.dtype), widened(side_by_side(v, cache_ptr), q.dtype)
        maximum, total, acc = _attend_tile(q, k, v, inside, maximum, total, acc, factor, cap, CAP, PRECISION)
    acc = in_order(acc, cache_ptr)
    group = tl.arange(0, BLOCK_GROUP)
    heads, group_head = group < GROUP, kv_head * GROUP + group
    group_mask = heads[:, None] & dims[None, :]
    if SHARED:
        maximum, total, acc = without_padding(maximum, total, acc, mask_m, BLOCK_M, BLOCK_GROUP, BLOCK_DIM)
        head, mask_m, mask_md = group_head, heads, group_mask
        maximum, total, acc = merge_parts(
            maximum, total, acc,
            shared_partial_ptr + row64 * NUM_HEADS * HEAD_DIM, shared_stats_ptr + row64 * NUM_HEADS * 2,
            0, shared_parts, num_rows * NUM_HEADS, head, heads, dim, dims, HEAD_DIM, SHARED_PARTS,
        )  # fmt: skip
    out_row_ptr = out_ptr + row64 * NUM_HEADS * HEAD_DIM
    if parts == 1:
        _store_out(out_row_ptr, total, acc, head, dim, mask_m, mask_md, HEAD_DIM)
    else:
        at = item.to(tl.int64) * NUM_HEADS + head
        store_part(partial_ptr, stats_ptr, at, maximum, total, acc, dim, mask_m, mask_md, HEAD_DIM)
        counter_ptr = counters_ptr + row * NUM_KV_HEADS + kv_head
        tl.debug_barrier()  # every thread's partials are written before one thread publishes them
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if arrived == parts - 1:
            tl.store(counter_ptr, 0)  # for the next launch
            merged_maximum, merged_total, merged = nothing_seen(-float("inf"), BLOCK_GROUP, BLOCK_DIM)
            _, merged_total, merged = merge_parts(
                merged_maximum, merged_total, merged, partial_ptr, stats_ptr, first, parts, NUM_HEADS, group_head,
                heads, dim, dims, HEAD_DIM, PARTS,
            )  # fmt: skip
            _store_out(out_row_ptr, merged_total, merged, group_head, dim, heads, group_mask, HEAD_DIM)


def decode_attention(
    q_BHE: Tensor,
    kv_2NSKE: Tensor,
    block_table_BM: Tensor,
    num_items: int,
    scratch: DecodeScratch,
    scoring: Scoring,
    out_BHE: Tensor,
    tiling: DecodeTiling,
    shared_lens_B: Tensor | None = None,
    shared: SharedPartials | None = None,
    newest: Newest | None = None,
    *,
    has_window: bool = False,
) -> None:
    """Attention of one query token per row over its cached context, by the work list that `schedule_decode` wrote.

    has_window: whether the list was written for a window.

    Shapes: q_BHE, out_BHE (B, H, E), heads contiguous; block_table_BM (B, M) int32. With `newest`, q_BHE is
    (B, H + 2K, E), heads of q, k and v as they are projected, and the newest key and value are written to the cache.
    Device: one launch, no host sync; safe in a CUDA graph. Contexts are at least 1 token (beyond the shared ones).
    Source: Dao et al. 2023, flash-decoding; Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).
    """
    num_rows, num_heads, head_dim = out_BHE.shape
    _, _, block_size, num_kv_heads, _ = kv_2NSKE.shape
    group = num_heads // num_kv_heads
    block_group = next_power_of_2(group)
    half_stride, block_stride, offset_stride, head_stride, _ = kv_2NSKE.stride()
    with_shared = shared_lens_B is not None and shared is not None
    rope, norm = (newest.rope, newest.norm) if newest is not None else (None, None)
    table = rope.table_PE if rope is not None else scratch.stats_WH2
    q_weight, k_weight = (norm.q_weight_E, norm.k_weight_E) if norm is not None else (q_BHE, q_BHE)
    _decode_kernel[(num_kv_heads, num_items)](
        q_BHE, kv_2NSKE, block_table_BM, scratch.items_W8, out_BHE, scratch.partial_WHE, scratch.stats_WH2,
        scratch.counters_BK, shared_lens_B if with_shared else block_table_BM, scratch.shared_info_4,
        shared.partial_PHE if shared is not None else scratch.partial_WHE,
        shared.stats_PH2 if shared is not None else scratch.stats_WH2, num_rows,
        q_BHE.stride(0), half_stride, block_stride, offset_stride, head_stride, block_table_BM.stride(0),
        scoring.factor, scoring.cap, q_BHE if scoring.sinks_H is None else scoring.sinks_H,
        newest.context_lens_B if newest is not None else block_table_BM, table, q_weight, k_weight, table.stride(0),
        norm.eps if norm is not None else 0.0,
        WINDOW=has_window, CAP=scoring.cap != 0, SINKS=scoring.sinks_H is not None,
        ROTARY_DIM=table.shape[1] if rope is not None else head_dim,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SHARED=with_shared,
        FUSED=newest is not None, NORM=norm is not None, ROPE=rope is not None,
        BLOCK_M=max(16, next_power_of_2(group)), BLOCK_DIM=max(16, next_power_of_2(head_dim)),
        BLOCK_GROUP=block_group, TILE=tiling.tile, PARTS=max(1, tiling.merge_rows // block_group),
        SHARED_PARTS=max(1, MERGE_ROWS // 2 // block_group), ITEM_WIDTH=ITEM_WIDTH,
        PRECISION="ieee", num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        LATE=triggers_late(num_rows, is_large=group >= WIDE_GROUP), **launch_options(q_BHE.device),
    )  # fmt: skip
