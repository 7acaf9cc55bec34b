"""Bulk attention of all decode rows against the leading blocks they share: the first half of cascade attention.

The rows' queries form one matrix, so K and V of the shared tokens are read once a tile of 64 or 128 queries instead of
once a row. It leaves unnormalised partials; the decode kernel, run over each row's own tokens, merges them.
Legend: B rows, H heads, K kv heads, G = H / K, E head dim, M blocks in a table row, N cache blocks, S block size,
R parts of the shared tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.plugins.kernels.attention.triton_decode import SharedPartials
from hookline.plugins.kernels.attention.triton_forms import Scoring, scored
from hookline.plugins.kernels.attention.triton_schedule import DecodeScratch
from hookline.plugins.kernels.attention.triton_tiles import (
    WIDE_HEAD,
    fitting_tile,
    nothing_seen,
    store_part,
    taken_in,
    tile_blocks,
    tile_places,
)
from hookline.plugins.kernels.triton_activations import widened
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import cdiv, next_power_of_2


@dataclass(frozen=True)
class SharedTiling:
    """How the shared part is cut: block_m queries by tile positions, in at most max_parts parts."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    max_parts: int = 1


def shared_tiling(num_queries: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, card: Card) -> SharedTiling:
    """The measured choice for `num_queries` queries a kv head, from static sizes alone: about one program an SM."""
    tiling = fitting_tile(_fastest(num_queries, head_dim, dtype, card), 1, head_dim, dtype, card)
    programs = cdiv(num_queries, tiling.block_m) * num_kv_heads
    max_parts = max(1, min(8, card.num_sms // programs))  # every row reads all parts: few, if that fills the card
    return replace(tiling, max_parts=max_parts)


def _fastest(num_queries: int, head_dim: int, dtype: torch.dtype, card: Card) -> SharedTiling:
    if head_dim > WIDE_HEAD:
        scarce = dtype == torch.float32 or not card.large_shared_memory
        return SharedTiling(block_m=32 if scarce else 64, tile=16 if scarce else 32, num_warps=8, num_stages=2)
    small = num_queries <= 128 or dtype == torch.float32 or not card.large_shared_memory
    is_scarce = head_dim > 128 and dtype == torch.float32 and not card.large_shared_memory
    block_m = 32 if is_scarce else 64 if small else 128
    if head_dim > 128:  # half the tile, for as much memory
        tile, num_stages = (16, 2) if dtype == torch.float32 else (32, 3 if card.large_shared_memory else 2)
        return SharedTiling(block_m, tile, num_warps=8, num_stages=num_stages)
    if dtype == torch.float32:
        return SharedTiling(block_m, tile=32, num_warps=8, num_stages=2)
    if not card.large_shared_memory:
        return SharedTiling(block_m, tile=32, num_warps=4, num_stages=3)
    return SharedTiling(block_m, tile=64, num_warps=block_m // 16, num_stages=3)


def make_shared_partials(
    max_num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, card: Card,
    device: torch.device,
) -> SharedPartials:  # fmt: skip
    """Allocate once for batches of up to `max_num_rows`; few rows have many parts and the other way round."""
    group = num_heads // num_kv_heads
    size = max(
        rows * shared_tiling(rows * group, num_kv_heads, head_dim, dtype, card).max_parts
        for rows in range(1, max_num_rows + 1)
    )
    return SharedPartials(
        partial_PHE=torch.empty((size, num_heads, head_dim), dtype=torch.float32, device=device),
        stats_PH2=torch.empty((size, num_heads, 2), dtype=torch.float32, device=device),
    )


@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def _shared_prefix_kernel(
    q_ptr, cache_ptr, table_ptr, shared_info_ptr, partial_ptr, stats_ptr, num_rows,
    q_stride, half_stride: tl.int64, block_stride, offset_stride, head_stride, table_stride, factor, cap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DIM: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if part >= tl.load(shared_info_ptr + 2):
        return
    leader = tl.load(shared_info_ptr).to(tl.int64)
    tokens = tl.load(shared_info_ptr + 1)
    part_tokens = tl.load(shared_info_ptr + 3)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (query // GROUP).to(tl.int64)
    head = kv_head * GROUP + query % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    dims = dim < HEAD_DIM
    mask_md = (row < num_rows)[:, None] & dims[None, :]
    q = tl.load(q_ptr + (row * q_stride + head * HEAD_DIM)[:, None] + dim[None, :], mask=mask_md, other=0.0)

    maximum, total, acc = nothing_seen(-float("inf"), BLOCK_M, BLOCK_DIM)
    table_row_ptr = table_ptr + leader * table_stride
    head_ptr = cache_ptr + kv_head * head_stride + dim[None, :]
    stop = tl.minimum((part + 1) * part_tokens, tokens)
    blocks = tile_blocks(table_row_ptr, part * part_tokens, stop, BLOCK_SIZE, TILE)
    for start in range(part * part_tokens, stop, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < stop
        place = tile_places(blocks, start, block_stride, offset_stride, BLOCK_SIZE, TILE)
        blocks = tile_blocks(table_row_ptr, start + TILE, stop, BLOCK_SIZE, TILE)
        if BLOCK_SIZE % TILE == 0:  # whole tiles only: the shared part is whole blocks
            load_mask = dims[None, :]
        else:
            load_mask = inside[:, None] & dims[None, :]
        k = widened(tl.load(head_ptr + place[:, None], mask=load_mask, other=0.0), q.dtype)
        scores = scored(tl.dot(q, tl.trans(k), input_precision=PRECISION), factor, cap, CAP)
        if BLOCK_SIZE % TILE != 0:
            scores = tl.where(inside[None, :], scores, -float("inf"))
        maximum, total, weights, rescale = taken_in(scores, maximum, total)
        v = widened(tl.load(head_ptr + half_stride + place[:, None], mask=load_mask, other=0.0), q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)

    at = (part.to(tl.int64) * num_rows + row) * NUM_HEADS + head
    store_part(partial_ptr, stats_ptr, at, maximum, total, acc, dim, row < num_rows, mask_md, HEAD_DIM)


def shared_prefix_attention(
    q_BHE: Tensor,
    kv_2NSKE: Tensor,
    block_table_BM: Tensor,
    scratch: DecodeScratch,
    shared: SharedPartials,
    scoring: Scoring,
    tiling: SharedTiling,
) -> None:
    """Leave in `shared` every row's partial attention over the shared tokens that `schedule_decode` found.

    Shapes: q_BHE (B, H, E), heads contiguous; block_table_BM (B, M) int32.
    Device: one launch, no host sync; safe in a CUDA graph. How many tokens are shared lives on the device; with none
    the programs exit at once. Rows that do not share get a partial too, which is never read.
    Source: Juravsky et al. 2024, Hydragen, arXiv:2402.05099.
    """
    num_rows, num_heads, head_dim = q_BHE.shape
    _, _, block_size, num_kv_heads, _ = kv_2NSKE.shape
    group = num_heads // num_kv_heads
    assert tiling.max_parts * num_rows <= len(shared.stats_PH2)
    half_stride, block_stride, offset_stride, head_stride, _ = kv_2NSKE.stride()
    grid = (cdiv(num_rows * group, tiling.block_m), num_kv_heads, tiling.max_parts)
    _shared_prefix_kernel[grid](
        q_BHE, kv_2NSKE, block_table_BM, scratch.shared_info_4, shared.partial_PHE, shared.stats_PH2, num_rows,
        q_BHE.stride(0), half_stride, block_stride, offset_stride, head_stride, block_table_BM.stride(0),
        scoring.factor, scoring.cap,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_M=tiling.block_m,
        BLOCK_DIM=max(16, next_power_of_2(head_dim)), TILE=tiling.tile, CAP=scoring.cap != 0, PRECISION="ieee",
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
