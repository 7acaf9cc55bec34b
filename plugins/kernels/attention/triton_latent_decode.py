"""Attention of decodes over keys whose last numbers are their values (see triton_latent.py), split along the context.

A program has some heads of one query and a part of its context; with several parts, a second kernel merges them. The
heads are few, so the positions are the rows of the products, and the heads their columns: matrix instructions then read
keys from shared memory alone, where a key lies once. On the way, queries and the newest token's key can be rotated and
that key be written to the cache. Of many parts, the last is that key alone, for else all would wait for its program;
and programs ask for their first keys before they wait for the launch before them (programmatic dependent launch).
Legend: B requests, H heads, E head dim of the keys, F of the values, R = E - F, N cache blocks, S block size,
M blocks in a table row, P parts of a context.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from hookline.core.contracts import Rope
from hookline.plugins.kernels.attention.triton_forms import (
    LOWEST,
    Scoring,
    first_seen,
    load_rotation,
    load_sinks,
    rotary_partner,
    rotated,
    scored,
)
from hookline.plugins.kernels.attention.triton_latent import wait_for_launch_before
from hookline.plugins.kernels.attention.triton_tiles import as_stored, tile_blocks, tile_places
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, launch_options, next_power_of_2, triggers_late

MOST_PARTS, PARTS_OF_NEWEST = 32, 8
"""Parts of a context, and from how many on the newest key is one of them where it is not in the cache yet."""
MERGED, FEW_MERGES = 128, 256
"""Numbers of a value that a program of the merge has, up to so many rows times heads; of more, it has all."""


@dataclass(frozen=True)
class LatentDecodeTiling:
    """heads: of a program. tile: positions at a time."""

    heads: int
    tile: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_heads: int, dtype: torch.dtype, card: Card) -> LatentDecodeTiling:
        """The tiling that fits a card's shared memory, for latents of 512 numbers; the fastest on an H200."""
        heads = min(next_power_of_2(num_heads), 16)
        is_large = card.large_shared_memory and dtype != torch.float32
        return cls(heads, 32, 4, 3) if is_large else cls(heads, 16, 4, 1)


@triton.jit
def _parts(context_len, window, WINDOW: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """First position that a decode sees, where its first part begins, and how long its parts are."""
    seen = 0
    if WINDOW:
        seen = first_seen(context_len, window)
    first = seen // TILE * TILE
    return seen, first, tl.cdiv(tl.cdiv(context_len - first, PARTS), TILE) * TILE


@triton.jit
def _prefetch(from_cache, LINES: tl.constexpr, LINE: tl.constexpr, LAST: tl.constexpr):
    """Ask for keys (TILE, 1) to be read into the L2 cache, a line of 128 bytes at a time."""
    at = tl.minimum(tl.arange(0, LINES) * LINE, LAST)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [from_cache + at[None, :]], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def _write_newest(
    key_ptr, slot_ptr, q_rotary, q_latent, cos, sin, rotary, latent, maximum, total, factor, cap, CAP: tl.constexpr,
    ROTARY: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Rotate a token's key and write it. Returns the running softmax of sinks and it, and the weight of its value."""
    one, partner = tl.arange(0, 1)[:, None], rotary_partner(rotary, ROTARY, ROTARY)
    of_rotary, of_latent = (one == 0) & (rotary < ROTARY)[None, :], (one == 0) & (latent < LATENT)[None, :]
    k_rotary = rotated(key_ptr + one, of_rotary, cos, cos, cos, sin, 0.0, rotary, partner, ROTARY, False, True)
    k_rotary = as_stored(k_rotary, slot_ptr)
    k_latent = tl.load(key_ptr + ROTARY + one + latent[None, :], mask=of_latent, other=0.0)
    tl.store(slot_ptr + one + rotary[None, :], k_rotary, mask=of_rotary)
    tl.store(slot_ptr + ROTARY + one + latent[None, :], k_latent, mask=of_latent)
    product = tl.sum(q_rotary.to(tl.float32) * k_rotary.to(tl.float32), axis=1)
    product += tl.sum(q_latent.to(tl.float32) * k_latent.to(tl.float32), axis=1)
    score = scored(product, factor, cap, CAP)
    new_maximum = tl.maximum(maximum, score)
    weight = tl.exp2(score - new_maximum)
    return new_maximum, total * tl.exp2(maximum - new_maximum) + weight, weight


@triton.jit(
    do_not_specialize=["table_stride", "window", "num_rows"],
    do_not_specialize_on_alignment=(*OF_STEP, "table_ptr"),
)
def _latent_decode_kernel(
    q_ptr, cache_ptr, table_ptr, context_lens_ptr, rope_ptr, out_ptr, partial_ptr, stats_ptr,
    q_stride, block_stride, offset_stride, table_stride, rope_stride, factor, cap, sinks_ptr, window, num_rows,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, FUSED: tl.constexpr, PARTS: tl.constexpr,
    ALONE: tl.constexpr, NUM_HEADS: tl.constexpr, ROTARY: tl.constexpr, LATENT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, TILE: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    if PDL and not LATE:
        gdc_launch_dependents()
    HEAD_DIM: tl.constexpr = ROTARY + LATENT
    row, part = tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens_ptr + row)
    seen, first, length = _parts(context_len, window, WINDOW, PARTS - ALONE, TILE)
    begin, last = first + part * length, context_len - 1
    if ALONE:
        is_last = part == PARTS - 1
        is_idle = (begin >= last) & (part < PARTS - 1)
    else:
        is_last = begin + length > last
        is_idle = begin > last
    if is_idle:  # the merge leaves such parts out
        return
    table_row_ptr = table_ptr + row.to(tl.int64) * table_stride
    end = tl.minimum(begin + length, context_len)
    if FUSED:  # the newest key is not in the cache yet
        end = tl.minimum(end, last)
        newest_block = tl.load(table_row_ptr + last // BLOCK_SIZE).to(tl.int64)
    blocks = tile_blocks(table_row_ptr, begin, end, BLOCK_SIZE, TILE)
    member = tl.arange(0, BLOCK_H)
    head = tl.program_id(0) * HEADS + member
    is_head = (member < HEADS) & (head < NUM_HEADS)
    rotary, latent = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_L)
    are_rotary, are_latent = rotary < ROTARY, latent < LATENT
    if FUSED:
        cos, sin = load_rotation(rope_ptr + last * rope_stride, rotary, are_rotary, ROTARY, ROTARY)
    if PDL and ALONE:
        place = tile_places(blocks, begin, block_stride, offset_stride, BLOCK_SIZE, TILE)
        _prefetch(cache_ptr + place[:, None], LINES, LINE, HEAD_DIM - 1)
    wait_for_launch_before(PDL, LATE)

    token_ptr = q_ptr + row.to(tl.int64) * q_stride
    from_q = token_ptr + head[:, None] * HEAD_DIM
    of_rotary, of_latent = is_head[:, None] & are_rotary[None, :], is_head[:, None] & are_latent[None, :]
    if FUSED:
        partner = rotary_partner(rotary, ROTARY, ROTARY)
        q_rotary = rotated(from_q, of_rotary, cos, cos, cos, sin, 0.0, rotary, partner, ROTARY, False, True)
        q_rotary = q_rotary.to(q_ptr.dtype.element_ty)
    else:
        q_rotary = tl.load(from_q + rotary[None, :], mask=of_rotary, other=0.0)
    q_latent = tl.load(from_q + ROTARY + latent[None, :], mask=of_latent, other=0.0)
    maximum, begun = tl.full([BLOCK_H], LOWEST, tl.float32), tl.zeros([BLOCK_H], tl.float32)
    if SINKS:
        if part == (PARTS - 1) * ALONE:
            maximum = load_sinks(sinks_ptr, head, is_head)
            begun += 1.0
    at = row.to(tl.int64) * NUM_HEADS + head
    if PARTS > 1:
        at += part.to(tl.int64) * num_rows * NUM_HEADS
    acc = tl.zeros([BLOCK_L, BLOCK_H], tl.float32)
    if FUSED:
        key_ptr = token_ptr + NUM_HEADS * HEAD_DIM
        slot_ptr = cache_ptr + newest_block * block_stride + last % BLOCK_SIZE * offset_stride
    if ALONE:
        if is_last:
            maximum, begun, weight = _write_newest(
                key_ptr, slot_ptr, q_rotary, q_latent, cos, sin, rotary, latent, maximum, begun, factor, cap, CAP,
                ROTARY, LATENT,
            )  # fmt: skip
            value = tl.load(key_ptr + ROTARY + latent, mask=are_latent, other=0.0).to(tl.float32)
            to_partial = partial_ptr + at[:, None] * LATENT + latent[None, :]
            tl.store(to_partial, weight[:, None] * value[None, :], mask=of_latent)
            tl.store(stats_ptr + at * 2, maximum, mask=is_head)
            tl.store(stats_ptr + at * 2 + 1, begun, mask=is_head)
            return
    elif FUSED:
        if is_last:
            maximum, begun, weight = _write_newest(
                key_ptr, slot_ptr, q_rotary, q_latent, cos, sin, rotary, latent, maximum, begun, factor, cap, CAP,
                ROTARY, LATENT,
            )  # fmt: skip
            value = tl.load(key_ptr + ROTARY + latent, mask=are_latent, other=0.0).to(tl.float32)
            acc += value[:, None] * weight[None, :]
    # The sum of weights is added up over positions once, behind the loop.
    total = tl.where(tl.arange(0, TILE)[:, None] == 0, begun[None, :], 0.0)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < end
        if WINDOW:
            inside &= position >= seen
        place = tile_places(blocks, start, block_stride, offset_stride, BLOCK_SIZE, TILE)
        blocks = tile_blocks(table_row_ptr, start + TILE, end, BLOCK_SIZE, TILE)
        from_cache = cache_ptr + place[:, None]
        k_rotary = tl.load(from_cache + rotary[None, :], mask=inside[:, None] & are_rotary[None, :], other=0.0)
        k_latent = tl.load(from_cache + ROTARY + latent[None, :], mask=inside[:, None] & are_latent[None, :], other=0.0)
        products = tl.dot(k_latent, tl.trans(q_latent), input_precision="ieee")
        products = tl.dot(k_rotary, tl.trans(q_rotary), products, input_precision="ieee")
        scores = tl.where(inside[:, None], scored(products, factor, cap, CAP), -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        weights = tl.exp2(scores - new_maximum[None, :])
        rescale = tl.exp2(maximum - new_maximum)
        maximum = new_maximum
        total = total * rescale[None, :] + weights
        acc = tl.dot(tl.trans(k_latent), weights.to(k_latent.dtype), acc * rescale[None, :], input_precision="ieee")
    sums = tl.sum(total, axis=0)
    mask = is_head[None, :] & are_latent[:, None]
    if PARTS == 1:
        sums = tl.where(is_head, sums, 1.0)
        to_out = out_ptr + at[None, :] * LATENT + latent[:, None]
        tl.store(to_out, (acc / sums[None, :]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_ptr + at[None, :] * LATENT + latent[:, None], acc, mask=mask)
        tl.store(stats_ptr + at * 2, maximum, mask=is_head)
        tl.store(stats_ptr + at * 2 + 1, sums, mask=is_head)


@triton.jit(do_not_specialize=["num_rows", "window"], do_not_specialize_on_alignment=OF_STEP)
def _merge_kernel(
    partial_ptr, stats_ptr, context_lens_ptr, out_ptr, window, num_rows, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    ALONE: tl.constexpr, TILE: tl.constexpr, NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr,
    PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of the context of one head of one query into the softmax over all of it; some of its numbers."""
    if PDL and not LATE:
        gdc_launch_dependents()
    row, head = tl.program_id(2), tl.program_id(1)
    context_len = tl.load(context_lens_ptr + row)
    _, first, length = _parts(context_len, window, WINDOW, PARTS - ALONE, TILE)
    part, latent = tl.arange(0, PARTS), tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    is_part = (first + part * length < context_len - ALONE) | (part >= PARTS - ALONE)
    wait_for_launch_before(PDL, LATE)
    at_out = row.to(tl.int64) * NUM_HEADS + head
    at = part.to(tl.int64) * num_rows * NUM_HEADS + at_out
    maxima = tl.load(stats_ptr + at * 2, mask=is_part, other=-float("inf"))
    totals = tl.load(stats_ptr + at * 2 + 1, mask=is_part, other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima, axis=0))
    inside = is_part[:, None] & (latent < LATENT)[None, :]
    partial = tl.load(partial_ptr + at[:, None] * LATENT + latent[None, :], mask=inside, other=0.0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.sum(totals * weights, axis=0)
    tl.store(out_ptr + at_out * LATENT + latent, out.to(out_ptr.dtype.element_ty), mask=latent < LATENT)


def num_parts(num_rows: int, tiling: LatentDecodeTiling, num_heads: int, max_model_len: int, card: Card) -> int:
    """Into how many parts contexts of so many decodes are cut, a power of two; two programs fit a multiprocessor."""
    programs = num_rows * cdiv(num_heads, tiling.heads)
    wanted = min(MOST_PARTS, 2 * card.num_sms // programs, cdiv(max_model_len, tiling.tile))
    return max(1, next_power_of_2(wanted + 1) // 2)


def merge_block(num_rows: int, num_heads: int, value_dim: int) -> int:
    """Numbers of a value that a program of the merge has."""
    block_l = max(16, next_power_of_2(value_dim))
    return min(block_l, MERGED) if num_rows * num_heads <= FEW_MERGES else block_l


@dataclass(frozen=True)
class LatentScratch:
    """Where parts of contexts are left for merging: (P * B * H, F) and (P * B * H, 2), float32."""

    partial_XF: Tensor
    stats_X2: Tensor


def latent_decode_attention(
    q_BHE: Tensor,
    kv_1NSKE: Tensor,
    block_table_BM: Tensor,
    context_lens_B: Tensor,
    num_rows: int,
    scoring: Scoring,
    out_BHF: Tensor,
    tiling: LatentDecodeTiling,
    parts: int,
    scratch: LatentScratch,
    window: int | None,
    rope: Rope | None = None,
) -> None:
    """Attention of the first num_rows rows, a query each.

    rope: given, q_BHE has a token's key behind its queries; all are rotated on the way, and the key is written.
    Shapes: q_BHE (B, H, E) or (B, H + 1, E), the heads of a token adjacent; kv_1NSKE (1, N, S, 1, E); out_BHF
    (B, H, F), contiguous.
    Device: one launch, two with several parts; no host sync.
    """
    num_heads, value_dim = out_BHF.shape[1:]
    _, block_stride, offset_stride, _, _ = kv_1NSKE.stride()
    rotary, block_l = q_BHE.shape[2] - value_dim, max(16, next_power_of_2(value_dim))
    table = scratch.stats_X2 if rope is None else rope.table_PE
    line = 128 // kv_1NSKE.element_size()
    of_both = {
        "WINDOW": window is not None, "PARTS": parts, "TILE": tiling.tile, "NUM_HEADS": num_heads, "LATENT": value_dim,
        "ALONE": int(rope is not None and parts >= PARTS_OF_NEWEST), "LATE": triggers_late(num_rows),
        **launch_options(q_BHE.device),
    }  # fmt: skip
    _latent_decode_kernel[(cdiv(num_heads, tiling.heads), num_rows, parts)](
        q_BHE, kv_1NSKE, block_table_BM, context_lens_B, table, out_BHF, scratch.partial_XF, scratch.stats_X2,
        q_BHE.stride(0), block_stride, offset_stride, block_table_BM.stride(0), table.stride(0), scoring.factor,
        scoring.cap, q_BHE if scoring.sinks_H is None else scoring.sinks_H, 0 if window is None else window, num_rows,
        CAP=scoring.cap != 0, SINKS=scoring.sinks_H is not None, FUSED=rope is not None, ROTARY=rotary,
        BLOCK_SIZE=kv_1NSKE.shape[2], BLOCK_H=max(16, tiling.heads), HEADS=tiling.heads,
        BLOCK_R=max(16, next_power_of_2(rotary)), BLOCK_L=block_l, LINE=line,
        LINES=next_power_of_2(cdiv(q_BHE.shape[2], line) + 1),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **of_both,
    )  # fmt: skip
    if parts > 1:
        merged = merge_block(num_rows, num_heads, value_dim)
        _merge_kernel[(cdiv(value_dim, merged), num_heads, num_rows)](
            scratch.partial_XF, scratch.stats_X2, context_lens_B, out_BHF, 0 if window is None else window, num_rows,
            BLOCK_L=merged, num_warps=4, **of_both,
        )  # fmt: skip
