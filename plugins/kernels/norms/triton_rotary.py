"""q/k-norm, rotation of the first values of each head, and the KV write, in one launch.

For rotary tables narrower than a head; whole heads take the kernel of triton_ops.py, which loads them by halves.
Legend: T tokens, H heads, K kv heads, E head dim, R rotated values of a head, C = (H + 2K) * E, P positions,
N cache blocks, S block size.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import QKNorm, Rope
from hookline.plugins.kernels.attention.triton_forms import load_rotation, rotary_partner
from hookline.plugins.kernels.triton_launch import launch_options

VALUES_PER_PROGRAM = 2048


@triton.jit
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
    tl.store(to_cache, x.to(cache_ptr.dtype.element_ty), mask=inside & (head >= NUM_HEADS)[:, None])


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
    total_heads, block_dim = num_heads + 2 * num_kv_heads, triton.next_power_of_2(head_dim)
    block_heads = min(triton.next_power_of_2(total_heads), max(1, VALUES_PER_PROGRAM // block_dim))
    half_stride, block_stride, offset_stride, head_stride, _ = kv_2NSKE.stride()
    _norm_partial_rope_write_kernel[(num_tokens, triton.cdiv(total_heads, block_heads))](
        qkv_TC, q_THE, kv_2NSKE, positions_T, slot_mapping_T, rope.table_PE, q_weight, k_weight,
        qkv_TC.stride(0), half_stride, block_stride, offset_stride, head_stride, rope.table_PE.stride(0),
        norm.eps if norm is not None else 0.0,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rope.table_PE.shape[1],
        BLOCK_SIZE=block_size, NORM=norm is not None, BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim, num_warps=4,
        **launch_options(qkv_TC.device),
    )  # fmt: skip
