"""Ragged causal prefill over the paged cache: prompts, chunks and prefix hits, concatenated, on the tensor cores.

The host cuts the query tokens into tiles and lists the longest first (for a captured step, a small kernel lists them in
order); a program takes one tile with all query heads of one kv head. Whole tiles that all its queries see run without
masks, and tiles that none of them sees do not run.
Legend: T tokens, B requests, H heads, K kv heads, G = H / K, E head dim, M blocks in a table row, N cache blocks,
S block size, W query tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.plugins.kernels.attention.triton_forms import LOWEST, Scoring, load_sinks, scored
from hookline.plugins.kernels.attention.triton_tiles import (
    WIDE_HEAD,
    fitting_tile,
    load_tile,
    nothing_seen,
    query_lens,
    query_members,
    taken_in,
    tile_blocks,
    tile_places,
)
from hookline.plugins.kernels.triton_activations import widened
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import OF_STEP, WIDE_GROUP, cdiv, next_power_of_2

TILES_PER_PROGRAM = 16
"""For the kernel that lists the query tiles."""
WIDEST_HEAD = 128
"""Head dim up to which tilings were measured."""


@dataclass(frozen=True)
class PrefillTiling:
    """block_m query rows (tokens times G) by tile positions. most_registers: of a thread; None: as many as it takes."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    most_registers: int | None = None


def prefill_tiling(
    num_tokens: int, max_context_len: int, num_heads: int, group: int, head_dim: int, dtype: torch.dtype, card: Card
) -> PrefillTiling:
    """The measured choice, from sizes that the host knows: large query tiles once they fill the card and last.

    With a wide group a tile has few tokens, so that even small tiles soon fill the card. Wide heads leave room for
    tiles of half the size. A tile has the whole group of a token.
    """
    is_filled = num_tokens * num_heads >= 128 * card.num_sms
    tiling = _fastest(is_filled, max_context_len, group, head_dim, dtype, card)
    if group > tiling.block_m:
        tiling = replace(tiling, block_m=next_power_of_2(group))
    return fitting_tile(tiling, group, head_dim, dtype, card)


def _fastest(
    is_filled: bool, max_context_len: int, group: int, head_dim: int, dtype: torch.dtype, card: Card
) -> PrefillTiling:
    if head_dim > WIDE_HEAD:
        scarce = dtype == torch.float32 or not card.large_shared_memory
        return PrefillTiling(block_m=32 if scarce else 64, tile=16 if scarce else 32, num_warps=8, num_stages=2)
    if head_dim > WIDEST_HEAD:
        if dtype == torch.float32:
            return PrefillTiling(block_m=64 if card.large_shared_memory else 32, tile=16, num_warps=8, num_stages=2)
        if not card.large_shared_memory:
            return PrefillTiling(block_m=64, tile=32, num_warps=4, num_stages=2)
        if not is_filled or (group >= WIDE_GROUP and max_context_len < 2048):
            return PrefillTiling(block_m=64, tile=32, num_warps=4, num_stages=3)
        return PrefillTiling(block_m=128, tile=32, num_warps=8, num_stages=3)
    if dtype == torch.float32:
        return PrefillTiling(block_m=64, tile=32, num_warps=8, num_stages=2)
    if not card.large_shared_memory:
        return PrefillTiling(block_m=64, tile=32, num_warps=4, num_stages=3)
    is_long = max_context_len >= 2048
    if not is_filled or (group >= WIDE_GROUP and not is_long):
        return PrefillTiling(block_m=64, tile=64, num_warps=4, num_stages=3)
    if not is_long:  # two programs share a multiprocessor
        return PrefillTiling(block_m=128, tile=32, num_warps=8, num_stages=3, most_registers=128)
    return PrefillTiling(block_m=256, tile=64, num_warps=16, num_stages=3)


def query_tiles(
    query_starts_host: np.ndarray[Any, Any],
    context_lens_host: np.ndarray[Any, Any],
    first_row: int,
    tokens_a_tile: int,
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Query tiles of rows first_row, first_row + 1, …: (row, first query token of the row), longest context first.

    Shapes: query_starts_host (B + 1,), context_lens_host (B,); returns tiles_W2 int32.
    """
    query_lens = np.diff(query_starts_host)[first_row:]
    num_tiles = -(-query_lens // tokens_a_tile)
    row = np.repeat(np.arange(first_row, first_row + len(query_lens)), num_tiles)
    tile_of_row = np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first = tile_of_row * tokens_a_tile
    past = np.repeat(np.asarray(context_lens_host)[first_row:] - query_lens, num_tiles) + first
    return np.stack([row, first], axis=1)[np.argsort(-past, kind="stable")].astype(np.int32)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tiles"], do_not_specialize_on_alignment=OF_STEP)
def _query_tiles_kernel(
    query_starts_ptr, tiles_ptr, first_row, num_rows, num_tiles,
    TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Every program derives the whole list and writes its few tiles."""
    row = tl.arange(0, BLOCK_ROWS)
    is_row = (row >= first_row) & (row < num_rows)
    start = tl.load(query_starts_ptr + row, mask=is_row, other=0)
    stop = tl.load(query_starts_ptr + row + 1, mask=is_row, other=0)
    count = tl.cdiv(stop - start, TOKENS)
    end = tl.cumsum(count, axis=0)
    tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    mine = (tile[:, None] >= (end - count)[None, :]) & (tile[:, None] < end[None, :])
    tile_row = tl.sum(tl.where(mine, row[None, :] + 1, 0), axis=1) - 1
    first = (tile - tl.sum(tl.where(mine, (end - count)[None, :], 0), axis=1)) * TOKENS
    tl.store(tiles_ptr + tile * 2, tile_row, mask=tile < num_tiles)
    tl.store(tiles_ptr + tile * 2 + 1, first, mask=tile < num_tiles)


def query_tiles_on_device(
    query_starts_B1: Tensor, num_tokens: int, first_row: int, tokens_a_tile: int, block_rows: int | None = None
) -> Tensor:
    """As `query_tiles`, from lengths on the device, row after row; tiles that no row needs have row -1.

    block_rows: a power of two that the rows do not exceed; the least one if none is given, which compiles a kernel for
    each.
    Shapes: query_starts_B1 (B + 1,) int32, whose rows from first_row on have num_tokens tokens at most; returns
    tiles_W2 int32 with W from sizes alone.
    Device: one launch, no host sync; safe in a CUDA graph.
    """
    num_rows = len(query_starts_B1) - 1
    num_tiles = num_tokens // tokens_a_tile + num_rows - first_row  # each row has at most one partial tile
    tiles_W2 = torch.empty((num_tiles, 2), dtype=torch.int32, device=query_starts_B1.device)
    _query_tiles_kernel[(cdiv(num_tiles, TILES_PER_PROGRAM),)](
        query_starts_B1, tiles_W2, first_row, num_rows, num_tiles,
        TOKENS=tokens_a_tile, BLOCK_ROWS=block_rows or next_power_of_2(num_rows), BLOCK_TILES=TILES_PER_PROGRAM,
    )  # fmt: skip
    return tiles_W2


@triton.jit
def _attend_tile(
    q, maximum, total, acc, start, limit, last_position, seen, window, blocks, head_ptr, dims,
    half_stride, block_stride, offset_stride, factor, cap,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr, MASK_DIM: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys and values, which lies in these blocks, to the running softmax."""
    position = start + tl.arange(0, TILE)
    inside = position < limit
    if WINDOW:
        inside &= position >= seen
    place = tile_places(blocks, start, block_stride, offset_stride, BLOCK_SIZE, TILE)
    if MASK:
        k, v = load_tile(head_ptr, half_stride, place, inside[:, None] & dims[None, :], q.dtype)
    elif MASK_DIM:
        k, v = load_tile(head_ptr, half_stride, place, dims[None, :], q.dtype)
    else:
        k = widened(tl.load(head_ptr + place[:, None]), q.dtype)
        v = widened(tl.load(head_ptr + half_stride + place[:, None]), q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAP:
        scores = scored(scores, factor, cap, CAP)
    if MASK:
        visible = position[None, :] <= last_position[:, None]
        if WINDOW:
            visible &= position[None, :] > last_position[:, None] - window
        scores = tl.where(visible, scores, -float("inf"))
    if CAP:
        maximum, total, weights, rescale = taken_in(scores, maximum, total)
    else:
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * factor)
        weights = tl.exp2(scores * factor - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, axis=1)
        maximum = new_maximum
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return maximum, total, acc


@triton.jit
def _attend_tiles(
    q, maximum, total, acc, blocks, begin, end, stop, last_position, seen, window, table_row_ptr, head_ptr, dims,
    half_stride, block_stride, offset_stride, factor, cap,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr, MASK_DIM: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles from `begin` to `end`, the first of which lies in these blocks; also the blocks of the tile behind."""
    for start in range(begin, end, TILE):
        maximum, total, acc = _attend_tile(
            q, maximum, total, acc, start, stop, last_position, seen, window, blocks, head_ptr, dims,
            half_stride, block_stride, offset_stride, factor, cap,
            BLOCK_SIZE, TILE, MASK, MASK_DIM, WINDOW, CAP, PRECISION,
        )  # fmt: skip
        blocks = tile_blocks(table_row_ptr, start + TILE, stop, BLOCK_SIZE, TILE)
    return maximum, total, acc, blocks


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=(*OF_STEP, "table_ptr"))
def _prefill_kernel(
    q_ptr, cache_ptr, table_ptr, tiles_ptr, query_starts_ptr, context_lens_ptr, out_ptr,
    q_stride, half_stride: tl.int64, block_stride, offset_stride, head_stride, table_stride, factor, cap, sinks_ptr,
    window, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DIM: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    MASK_DIM: tl.constexpr = BLOCK_DIM != HEAD_DIM
    row = tl.load(tiles_ptr + tl.program_id(1) * 2)
    first = tl.load(tiles_ptr + tl.program_id(1) * 2 + 1)
    if row < 0:
        return
    query_start, query_len, context_len = query_lens(row, query_starts_ptr, context_lens_ptr)
    past = context_len - query_len

    token, head, is_query = query_members(first, query_len, kv_head, GROUP, TOKENS, BLOCK_M)
    dim = tl.arange(0, BLOCK_DIM)
    dims = dim < HEAD_DIM
    mask_md = is_query[:, None] & dims[None, :]
    at_token = (query_start + token).to(tl.int64)
    q = tl.load(q_ptr + (at_token * q_stride + head * HEAD_DIM)[:, None] + dim[None, :], mask=mask_md, other=0.0)

    maximum, total, acc = nothing_seen(LOWEST if WINDOW else -float("inf"), BLOCK_M, BLOCK_DIM)
    if SINKS:
        maximum = load_sinks(sinks_ptr, head, is_query)
        total += 1.0
    table_row_ptr = table_ptr + row.to(tl.int64) * table_stride
    head_ptr = cache_ptr + kv_head * head_stride + dim[None, :]
    last_position = past + token
    unmasked_stop = (past + first + 1) // TILE * TILE
    stop = tl.minimum(past + first + TOKENS, context_len)
    seen, unmasked_start = 0, 0
    if WINDOW:
        seen = tl.maximum(past + first - window + 1, 0)
        unmasked_start = tl.cdiv(tl.maximum(stop - window, 0), TILE) * TILE
        unmasked_stop = tl.maximum(unmasked_stop, unmasked_start)
        blocks = tile_blocks(table_row_ptr, seen // TILE * TILE, stop, BLOCK_SIZE, TILE)
        maximum, total, acc, blocks = _attend_tiles(
            q, maximum, total, acc, blocks, seen // TILE * TILE, unmasked_start, stop, last_position, seen, window,
            table_row_ptr, head_ptr, dims, half_stride, block_stride, offset_stride, factor, cap,
            BLOCK_SIZE, TILE, True, MASK_DIM, WINDOW, CAP, PRECISION,
        )  # fmt: skip
    else:
        blocks = tile_blocks(table_row_ptr, 0, stop, BLOCK_SIZE, TILE)
    maximum, total, acc, blocks = _attend_tiles(
        q, maximum, total, acc, blocks, unmasked_start, unmasked_stop, stop, last_position, seen, window,
        table_row_ptr, head_ptr, dims, half_stride, block_stride, offset_stride, factor, cap,
        BLOCK_SIZE, TILE, False, MASK_DIM, WINDOW, CAP, PRECISION,
    )  # fmt: skip
    maximum, total, acc, _ = _attend_tiles(
        q, maximum, total, acc, blocks, unmasked_stop, stop, stop, last_position, seen, window,
        table_row_ptr, head_ptr, dims, half_stride, block_stride, offset_stride, factor, cap,
        BLOCK_SIZE, TILE, True, MASK_DIM, WINDOW, CAP, PRECISION,
    )  # fmt: skip
    to_out = out_ptr + (at_token * NUM_KV_HEADS * GROUP * HEAD_DIM + head * HEAD_DIM)[:, None] + dim[None, :]
    if WINDOW:
        total = tl.where(is_query, total, 1.0)
    tl.store(to_out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask_md)


def prefill_attention(
    q_THE: Tensor,
    kv_2NSKE: Tensor,
    block_table_BM: Tensor,
    query_starts_B1: Tensor,
    context_lens_B: Tensor,
    tiles_W2: Tensor,
    scoring: Scoring,
    out_THE: Tensor,
    tiling: PrefillTiling,
    window: int | None = None,
) -> None:
    """Causal attention of the listed query tiles; other rows of out are left alone.

    window: tokens that a query sees, itself included; None for all before it.

    Shapes: q_THE, out_THE (T, H, E), heads contiguous; block_table_BM (B, M) int32; query_starts_B1 (B + 1,),
    context_lens_B (B,) int32; tiles_W2 (W, 2) int32 from `query_tiles` with tiling.block_m // G tokens a tile
    (tiles of row -1 are none).
    Device: one launch, no host sync.
    Source: Dao 2023, FlashAttention-2, arXiv:2307.08691.
    """
    _, num_heads, head_dim = q_THE.shape
    _, _, block_size, num_kv_heads, _ = kv_2NSKE.shape
    half_stride, block_stride, offset_stride, head_stride, _ = kv_2NSKE.stride()
    if not len(tiles_W2):
        return
    _prefill_kernel[(num_kv_heads, len(tiles_W2))](
        q_THE, kv_2NSKE, block_table_BM, tiles_W2, query_starts_B1, context_lens_B, out_THE,
        q_THE.stride(0), half_stride, block_stride, offset_stride, head_stride, block_table_BM.stride(0),
        scoring.factor, scoring.cap, q_THE if scoring.sinks_H is None else scoring.sinks_H,
        0 if window is None else window,
        WINDOW=window is not None, CAP=scoring.cap != 0, SINKS=scoring.sinks_H is not None,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_M=tiling.block_m, BLOCK_DIM=max(16, next_power_of_2(head_dim)), TILE=tiling.tile,
        PRECISION="ieee", num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=tiling.most_registers,
    )  # fmt: skip
