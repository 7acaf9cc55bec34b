"""q/k-norm, rotation and the KV write in one launch, of whole heads and of the first values of each head.

Heads that are rotated as a whole are loaded by halves; a rotary table narrower than a head takes another kernel.
Each reads its input once and writes its output once; arithmetic is float32, results are rounded once. The work on
whole heads is a function of its own, which a kernel of attention can call for the same bits.
Legend: T tokens, H heads, K kv heads, E head dim, R rotated values of a head, C = (H + 2K) * E, P positions,
N cache blocks, S block size.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import QKNorm, Rope
from hookline.plugins.kernels.attention.triton_forms import load_rotation, rotary_partner
from hookline.plugins.kernels.attention.triton_tiles import as_stored
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, launch_options, next_power_of_2

HEADS_PER_PROGRAM = 16
"""Of whole heads: the fastest at 1 token and at 16,384 (docs/log)."""
VALUES_PER_PROGRAM = 2048
"""Of heads of which some values stay."""


@triton.constexpr_function
def _halvings(width):
    """How often a power of two can be halved."""
    return width.bit_length() - 1


@triton.jit
def _sums_of_rows(x):
    """The sum of each row (n, 1): of pairs of neighbours, then of pairs of these sums, and so on.

    The order of additions is fixed, so that the bits do not depend on how the values lie in threads; a reduction of a
    whole row adds them in an order that depends on its layout.
    """
    for _ in tl.static_range(_halvings(x.shape[1])):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return x


@triton.jit
def load_halves(
    q_weight_ptr, k_weight_ptr, rope_row_ptr, dim, dims, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """The inputs of `norm_rope_write` that kernels only read: cosine, sine, and the weights of q's and k's halves."""
    nothing = tl.zeros([BLOCK_HALF], tl.float32)
    cos, sin, q_low, q_high, k_low, k_high = nothing, nothing, nothing, nothing, nothing, nothing
    if ROPE:
        cos = tl.load(rope_row_ptr + dim, mask=dims, other=0.0)
        sin = tl.load(rope_row_ptr + HEAD_DIM // 2 + dim, mask=dims, other=0.0)
    if NORM:
        q_low = tl.load(q_weight_ptr + dim, mask=dims, other=0.0).to(tl.float32)
        q_high = tl.load(q_weight_ptr + HEAD_DIM // 2 + dim, mask=dims, other=0.0).to(tl.float32)
        k_low = tl.load(k_weight_ptr + dim, mask=dims, other=0.0).to(tl.float32)
        k_high = tl.load(k_weight_ptr + HEAD_DIM // 2 + dim, mask=dims, other=0.0).to(tl.float32)
    return cos, sin, q_low, q_high, k_low, k_high


@triton.jit
def norm_rope_write(
    qkv_ptr, q_out_ptr, cache_ptr, token, slot, head, dim, dims, cos, sin, q_low, q_high, k_low, k_high,
    token_stride, half_stride, block_stride, offset_stride, head_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate these heads of a token, and store queries to q_out, keys and values to the cache.

    head: indices over the heads of q, k and v; larger ones are padding. ORDERED: the same bits in any kernel and for
    any choice of heads; sums of squares then have a fixed order, which takes longer. Multiplications and additions that
    a compiler might contract are fused explicitly.
    """
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & dims[None, :]
    source = qkv_ptr + token * token_stride + head[:, None] * HEAD_DIM + dim[None, :]
    low_in = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high_in = tl.load(source + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    low, high = low_in, high_in
    if NORM:
        squares = tl.fma(low, low, high * high)
        squares = _sums_of_rows(squares) if ORDERED else tl.sum(squares, axis=1)[:, None]
        scale = tl.rsqrt(tl.fma(squares, 1.0 / HEAD_DIM, eps))
        low = low * scale * tl.where(is_q[:, None], q_low[None, :], k_low[None, :])
        high = high * scale * tl.where(is_q[:, None], q_high[None, :], k_high[None, :])
    if ROPE:
        cos, sin, minus_sin = cos[None, :], sin[None, :], -sin[None, :]  # negated once, so that fma can subtract
        low, high = tl.fma(low, cos, high * minus_sin), tl.fma(high, cos, low * sin)
    low = tl.where(is_v[:, None], low_in, low)
    high = tl.where(is_v[:, None], high_in, high)

    to_q = q_out_ptr + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    q_mask = inside & is_q[:, None]
    tl.store(to_q, low.to(q_out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(to_q + HEAD_DIM // 2, high.to(q_out_ptr.dtype.element_ty), mask=q_mask)

    kv_head = tl.where(is_v, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride
    to_cache = (
        cache_ptr + place + tl.where(is_v, half_stride, 0)[:, None] + (kv_head * head_stride)[:, None] + dim[None, :]
    )
    kv_mask = inside & (head >= NUM_HEADS)[:, None]
    tl.store(to_cache, as_stored(low.to(q_out_ptr.dtype.element_ty), cache_ptr), mask=kv_mask)
    tl.store(to_cache + HEAD_DIM // 2, as_stored(high.to(q_out_ptr.dtype.element_ty), cache_ptr), mask=kv_mask)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _qk_norm_rope_write_kernel(
    qkv_ptr, q_out_ptr, cache_ptr, positions_ptr, slots_ptr, table_ptr, q_weight_ptr, k_weight_ptr,
    token_stride, half_stride: tl.int64, block_stride, offset_stride, head_stride, table_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, ORDERED: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_HALF)
    dims = dim < HEAD_DIM // 2
    if PDL:
        gdc_wait()
    rope_row_ptr = table_ptr
    if ROPE:
        rope_row_ptr += tl.load(positions_ptr + token) * table_stride
    cos, sin, q_low, q_high, k_low, k_high = load_halves(
        q_weight_ptr, k_weight_ptr, rope_row_ptr, dim, dims, HEAD_DIM, BLOCK_HALF, NORM, ROPE
    )
    norm_rope_write(
        qkv_ptr, q_out_ptr, cache_ptr, token, tl.load(slots_ptr + token), head, dim, dims,
        cos, sin, q_low, q_high, k_low, k_high,
        token_stride, half_stride, block_stride, offset_stride, head_stride, eps,
        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NORM, ROPE, ORDERED,
    )  # fmt: skip


def qk_norm_rope_write(
    qkv_TC: Tensor,
    kv_2NSKE: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    rope: Rope | None,
    norm: QKNorm | None,
    *,
    is_ordered: bool = False,
) -> Tensor:
    """Split qkv, normalise and rotate q and k, store k and v in the paged cache, return q.

    is_ordered: see `norm_rope_write`.
    Shapes: qkv_TC (T, (H + 2K) * E); positions_T, slot_mapping_T (T,) integer; returns q_THE (T, H, E), contiguous.
    Device: one launch, no host sync.
    """
    num_tokens, (_, _, block_size, num_kv_heads, head_dim) = len(qkv_TC), kv_2NSKE.shape
    num_heads = qkv_TC.shape[1] // head_dim - 2 * num_kv_heads
    q_THE = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_TC.dtype, device=qkv_TC.device)
    if not num_tokens:
        return q_THE
    if rope is not None and rope.table_PE.shape[1] != head_dim:
        norm_partial_rope_write(qkv_TC, kv_2NSKE, positions_T, slot_mapping_T, rope, norm, q_THE)
        return q_THE
    table = rope.table_PE if rope is not None else qkv_TC
    q_weight, k_weight = (norm.q_weight_E, norm.k_weight_E) if norm is not None else (qkv_TC, qkv_TC)
    total_heads = num_heads + 2 * num_kv_heads
    block_heads = min(next_power_of_2(total_heads), HEADS_PER_PROGRAM)
    half_stride, block_stride, offset_stride, head_stride, _ = kv_2NSKE.stride()
    _qk_norm_rope_write_kernel[(num_tokens, cdiv(total_heads, block_heads))](
        qkv_TC, q_THE, kv_2NSKE, positions_T, slot_mapping_T, table, q_weight, k_weight,
        qkv_TC.stride(0), half_stride, block_stride, offset_stride, head_stride, table.stride(0),
        norm.eps if norm is not None else 0.0,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        NORM=norm is not None, ROPE=rope is not None, ORDERED=is_ordered,
        BLOCK_HEADS=block_heads, BLOCK_HALF=next_power_of_2(head_dim // 2), num_warps=4,
        **launch_options(qkv_TC.device),
    )  # fmt: skip
    return q_THE


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _norm_partial_rope_write_kernel(
    qkv_ptr, q_out_ptr, cache_ptr, positions_ptr, slots_ptr, table_ptr, q_weight_ptr, k_weight_ptr,
    token_stride, half_stride: tl.int64, block_stride, offset_stride, head_stride, table_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    dims = dim < HEAD_DIM
    partner = rotary_partner(dim, ROTARY_DIM, HEAD_DIM)
    is_q = (head < NUM_HEADS)[:, None]
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & dims[None, :]
    source = qkv_ptr + token * token_stride + head[:, None] * HEAD_DIM
    given = tl.load(source + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    x, other = given, tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x *= scale * _weights(q_weight_ptr, k_weight_ptr, dim, dims, is_q)
        other *= scale * _weights(q_weight_ptr, k_weight_ptr, partner, dims, is_q)
    cos, sin = load_rotation(table_ptr + tl.load(positions_ptr + token) * table_stride, dim, dims, HEAD_DIM, ROTARY_DIM)
    x = tl.where(is_v, given, x * cos[None, :] + other * sin[None, :])

    to_q = q_out_ptr + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(to_q, x.to(q_out_ptr.dtype.element_ty), mask=inside & is_q)
    slot = tl.load(slots_ptr + token)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride
    kv_head = tl.where(is_v, head[:, None] - NUM_HEADS - NUM_KV_HEADS, head[:, None] - NUM_HEADS)
    to_cache = cache_ptr + place + tl.where(is_v, half_stride, 0) + kv_head * head_stride + dim[None, :]
    stored = as_stored(x.to(q_out_ptr.dtype.element_ty), cache_ptr)
    tl.store(to_cache, stored, mask=inside & (head >= NUM_HEADS)[:, None])


@triton.jit
def _weights(q_weight_ptr, k_weight_ptr, dim, dims, is_q):
    """The norm's weight of each head (heads, BLOCK_DIM)."""
    q_weight = tl.load(q_weight_ptr + dim, mask=dims, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dim, mask=dims, other=0.0).to(tl.float32)
    return tl.where(is_q, q_weight[None, :], k_weight[None, :])


def norm_partial_rope_write(
    qkv_TC: Tensor,
    kv_2NSKE: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    rope: Rope,
    norm: QKNorm | None,
    q_THE: Tensor,
) -> None:
    """Split qkv, normalise q and k and rotate their first values, store k and v in the paged cache, and q in q_THE.

    Shapes: qkv_TC (T, (H + 2K) * E); positions_T, slot_mapping_T (T,) integer; q_THE (T, H, E), contiguous, T > 0.
    Device: one launch, no host sync.
    """
    (num_tokens, num_heads, head_dim), (_, _, block_size, num_kv_heads, _) = q_THE.shape, kv_2NSKE.shape
    q_weight, k_weight = (norm.q_weight_E, norm.k_weight_E) if norm is not None else (qkv_TC, qkv_TC)
    total_heads, block_dim = num_heads + 2 * num_kv_heads, next_power_of_2(head_dim)
    block_heads = min(next_power_of_2(total_heads), max(1, VALUES_PER_PROGRAM // block_dim))
    half_stride, block_stride, offset_stride, head_stride, _ = kv_2NSKE.stride()
    _norm_partial_rope_write_kernel[(num_tokens, cdiv(total_heads, block_heads))](
        qkv_TC, q_THE, kv_2NSKE, positions_T, slot_mapping_T, rope.table_PE, q_weight, k_weight,
        qkv_TC.stride(0), half_stride, block_stride, offset_stride, head_stride, rope.table_PE.stride(0),
        norm.eps if norm is not None else 0.0,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rope.table_PE.shape[1],
        BLOCK_SIZE=block_size, NORM=norm is not None, BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim, num_warps=4,
        **launch_options(qkv_TC.device),
    )  # fmt: skip
