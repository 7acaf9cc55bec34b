"""Attention of prompts over keys whose last numbers are their values: all heads of a token attend over one latent for
each token. Decodes are in triton_latent_decode.py.

Rotated and latent numbers of a key are loaded apart, so that each is a product of sizes that are powers of two.
Legend: T tokens, B requests, H heads, E head dim of the keys, F of the values, R = E - F, N cache blocks, S block size,
M blocks in a table row, W query tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import Rope
from hookline.plugins.kernels.attention.triton_forms import LOWEST, Scoring, load_sinks, scored
from hookline.plugins.kernels.attention.triton_tiles import nothing_seen, query_lens, taken_in
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, launch_options, next_power_of_2, triggers_late


@dataclass(frozen=True)
class LatentTiling:
    """heads: of a program. tokens: of a program, which has both for each of its rows. tile: positions at a time."""

    heads: int
    tokens: int
    tile: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, num_heads: int, dtype: torch.dtype, card: Card) -> LatentTiling:
        """The tiling that fits a card's shared memory, for latents of 512 numbers."""
        is_large = card.large_shared_memory and dtype != torch.float32
        most_rows = 64 if is_large else 16
        heads = min(next_power_of_2(num_heads), most_rows)
        tile, num_warps, num_stages = (32, 8, 2) if is_large else (16, 4, 1)
        return cls(heads, most_rows // heads, tile, num_warps, num_stages)

    @property
    def rows(self) -> int:
        """Queries times heads of a program, at least as many as a product takes."""
        return max(16, self.heads * self.tokens)


@triton.jit
def wait_for_launch_before(PDL: tl.constexpr, LATE: tl.constexpr):
    """Behind this, results of all launches before are complete; the next launch may start, unless it already may."""
    if PDL:
        gdc_wait()
    if PDL and LATE:
        gdc_launch_dependents()


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=(*OF_STEP, "table_ptr"),
)
def _latent_kernel(
    q_ptr, cache_ptr, table_ptr, tiles_ptr, query_starts_ptr, context_lens_ptr, out_ptr,
    q_stride, block_stride, offset_stride, table_stride, factor, cap, sinks_ptr, window,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr, ROTARY: tl.constexpr, LATENT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """A program has some heads of a tile of queries, and their whole context."""
    if PDL and not LATE:
        gdc_launch_dependents()
    wait_for_launch_before(PDL, LATE)
    HEAD_DIM: tl.constexpr = ROTARY + LATENT
    row = tl.load(tiles_ptr + tl.program_id(1) * 2)
    if row < 0:
        return
    first = tl.load(tiles_ptr + tl.program_id(1) * 2 + 1)
    query_start, query_len, context_len = query_lens(row, query_starts_ptr, context_lens_ptr)
    past = context_len - query_len
    member = tl.arange(0, BLOCK_M)
    token = first + member // HEADS
    head = tl.program_id(0) * HEADS + member % HEADS
    is_query = (token < query_len) & (member < HEADS * TOKENS) & (head < NUM_HEADS)
    last_position = past + token
    rotated, latent = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_L)
    are_rotated, are_latent = (rotated < ROTARY)[None, :], (latent < LATENT)[None, :]
    at_query = (query_start + token).to(tl.int64)
    from_q = q_ptr + (at_query * q_stride + head * HEAD_DIM)[:, None]
    q_rotated = tl.load(from_q + rotated[None, :], mask=is_query[:, None] & are_rotated, other=0.0)
    q_latent = tl.load(from_q + ROTARY + latent[None, :], mask=is_query[:, None] & are_latent, other=0.0)

    maximum, total, acc = nothing_seen(LOWEST, BLOCK_M, BLOCK_L)
    if SINKS:
        maximum = load_sinks(sinks_ptr, head, is_query)
        total += 1.0
    stop = tl.minimum(past + first + TOKENS, context_len)
    seen = 0
    if WINDOW:
        seen = tl.maximum(past + first - window + 1, 0)
    table_row_ptr = table_ptr + row.to(tl.int64) * table_stride
    for start in range(seen // TILE * TILE, stop, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < stop
        if WINDOW:
            inside &= position >= seen
        block = tl.load(table_row_ptr + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        from_cache = cache_ptr + (block * block_stride + position % BLOCK_SIZE * offset_stride)[:, None]
        k_rotated = tl.load(from_cache + rotated[None, :], mask=inside[:, None] & are_rotated, other=0.0)
        k_latent = tl.load(from_cache + ROTARY + latent[None, :], mask=inside[:, None] & are_latent, other=0.0)
        products = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        products = tl.dot(q_rotated, tl.trans(k_rotated), products, input_precision="ieee")
        visible = inside[None, :] & (position[None, :] <= last_position[:, None])
        if WINDOW:
            visible &= position[None, :] > last_position[:, None] - window
        scores = tl.where(visible, scored(products, factor, cap, CAP), -float("inf"))
        maximum, total, weights, rescale = taken_in(scores, maximum, total)
        acc = tl.dot(weights.to(k_latent.dtype), k_latent, acc * rescale[:, None], input_precision="ieee")
    total = tl.where(is_query, total, 1.0)
    to_out = out_ptr + (at_query * NUM_HEADS + head)[:, None] * LATENT + latent[None, :]
    tl.store(to_out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query[:, None] & are_latent)


def latent_attention(
    q_THE: Tensor,
    kv_1NSKE: Tensor,
    block_table_BM: Tensor,
    query_starts_B1: Tensor,
    context_lens_B: Tensor,
    tiles_W2: Tensor,
    scoring: Scoring,
    out_THF: Tensor,
    tiling: LatentTiling,
    window: int | None,
) -> None:
    """Causal attention of the listed query tiles.

    Shapes: q_THE (T, H, E), the heads of a token adjacent; kv_1NSKE (1, N, S, 1, E); tiles_W2 as of `query_tiles` with
    tiling.tokens; out_THF (T, H, F), contiguous.
    Device: one launch, no host sync.
    """
    num_heads, value_dim = out_THF.shape[1:]
    _, block_stride, offset_stride, _, _ = kv_1NSKE.stride()
    rotary = q_THE.shape[2] - value_dim
    _latent_kernel[(cdiv(num_heads, tiling.heads), len(tiles_W2))](
        q_THE, kv_1NSKE, block_table_BM, tiles_W2, query_starts_B1, context_lens_B, out_THF,
        q_THE.stride(0), block_stride, offset_stride, block_table_BM.stride(0), scoring.factor, scoring.cap,
        q_THE if scoring.sinks_H is None else scoring.sinks_H, 0 if window is None else window,
        WINDOW=window is not None, CAP=scoring.cap != 0, SINKS=scoring.sinks_H is not None,
        NUM_HEADS=num_heads, ROTARY=rotary, LATENT=value_dim, BLOCK_SIZE=kv_1NSKE.shape[2],
        HEADS=tiling.heads, TOKENS=tiling.tokens, BLOCK_M=tiling.rows,
        BLOCK_R=max(16, next_power_of_2(rotary)), BLOCK_L=max(16, next_power_of_2(value_dim)), TILE=tiling.tile,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, LATE=False, **launch_options(q_THE.device),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _rope_write_kernel(
    qk_ptr, cache_ptr, positions_ptr, slots_ptr, table_ptr, token_stride, block_stride, offset_stride, table_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_DIM: tl.constexpr, PDL: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token rotates its queries where they are; program 1 writes its key, rotated, to the cache."""
    if PDL and not LATE:
        gdc_launch_dependents()
    wait_for_launch_before(PDL, LATE)
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    from_table = table_ptr + tl.load(positions_ptr + token) * table_stride + half
    cos = tl.load(from_table, mask=half < HALF, other=1.0)[None, :]
    sin = tl.load(from_table + HALF, mask=half < HALF, other=0.0)[None, :]
    is_key = tl.program_id(1) == 1
    head = tl.arange(0, BLOCK_HEADS) + tl.where(is_key, NUM_HEADS, 0)
    mask = ((head < tl.where(is_key, NUM_HEADS + 1, NUM_HEADS))[:, None]) & (half < HALF)[None, :]
    from_qk = qk_ptr + token * token_stride + head[:, None] * HEAD_DIM + half[None, :]
    low = tl.load(from_qk, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(from_qk + HALF, mask=mask, other=0.0).to(tl.float32)
    new_low, new_high = low * cos - high * sin, high * cos + low * sin
    if is_key:
        slot = tl.load(slots_ptr + token)
        to_cache = cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride
        zeros = head[:, None] * 0 + half[None, :]
        tl.store(to_cache + zeros, new_low.to(cache_ptr.dtype.element_ty), mask=mask)
        tl.store(to_cache + HALF + zeros, new_high.to(cache_ptr.dtype.element_ty), mask=mask)
        dim = tl.arange(0, BLOCK_DIM)
        others = (dim >= ROTARY) & (dim < HEAD_DIM)
        rest = tl.load(qk_ptr + token * token_stride + NUM_HEADS * HEAD_DIM + dim, mask=others, other=0.0)
        tl.store(to_cache + dim, rest.to(cache_ptr.dtype.element_ty), mask=others)
    else:
        tl.store(from_qk, new_low.to(qk_ptr.dtype.element_ty), mask=mask)
        tl.store(from_qk + HALF, new_high.to(qk_ptr.dtype.element_ty), mask=mask)


def rope_write(qk_TC: Tensor, kv_1NSKE: Tensor, positions_T: Tensor, slot_mapping_T: Tensor, rope: Rope) -> Tensor:
    """Rotate the first numbers of queries and keys, write the keys, and return the queries, a view of qk_TC.

    Shapes: qk_TC (T, (H + 1) * E), written to; kv_1NSKE (1, N, S, 1, E); returns q_THE (T, H, E).
    Device: one launch, no host sync.
    """
    head_dim, (_, block_stride, offset_stride, _, _) = kv_1NSKE.shape[-1], kv_1NSKE.stride()
    num_heads, rotary = qk_TC.shape[1] // head_dim - 1, rope.table_PE.shape[1]
    q_THE = qk_TC.view(len(qk_TC), num_heads + 1, head_dim)[:, :num_heads]
    if len(qk_TC):
        _rope_write_kernel[(len(qk_TC), 2)](
            qk_TC, kv_1NSKE, positions_T, slot_mapping_T, rope.table_PE,
            qk_TC.stride(0), block_stride, offset_stride, rope.table_PE.stride(0),
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, ROTARY=rotary, BLOCK_SIZE=kv_1NSKE.shape[2],
            BLOCK_HEADS=next_power_of_2(num_heads), BLOCK_HALF=next_power_of_2(rotary // 2),
            BLOCK_DIM=next_power_of_2(head_dim), num_warps=4, LATE=triggers_late(len(qk_TC)),
            **launch_options(qk_TC.device),
        )  # fmt: skip
    return q_THE
