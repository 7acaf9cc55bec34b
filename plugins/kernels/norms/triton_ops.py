"""Triton kernels of everything around attention: norms, SiLU·mul, and q/k-norm + RoPE + KV write in one launch.

Each reads its input once and writes its output once; arithmetic is float32, results are rounded once to the input's
dtype. Knows nothing of batches or requests.
Legend: T tokens, D hidden, F feed-forward, H heads, K kv heads, E head dim, C = (H + 2K) * E, P positions,
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
from hookline.plugins.kernels.norms.triton_rotary import norm_partial_rope_write
from hookline.plugins.kernels.triton_launch import LARGE_WIDTH, launch_options, triggers_late

SILU_BLOCK = 1024
"""Columns per program of `silu_mul`."""
HEADS_PER_PROGRAM = 16
"""For `qk_norm_rope_write`: the fastest at 1 token and at 16,384 (docs/log.md)."""


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, row_stride, part_stride, width, eps,
    PARTS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    if PDL and not LATE:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if PDL and LATE:
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * part_stride + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual_ptr + row * width + column
        x += tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_at, x.to(residual_ptr.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(out_ptr + row * width + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def _norm_warps(block: int) -> int:
    """16 bytes a thread at bfloat16, between 1 and 16 warps."""
    return max(1, min(16, block // 256))


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Shapes: x (..., D) with one stride between rows; returns the same shape, contiguous.
    Device: one launch, no host sync.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    width = x_TD.shape[-1]
    rows_TD = x_TD.reshape(-1, width) if x_TD.dim() != 2 else x_TD
    out_TD = torch.empty(rows_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if rows_TD.stride(1) != 1:
        rows_TD = rows_TD.contiguous()
    block = triton.next_power_of_2(width)
    if len(rows_TD):
        _rms_norm_kernel[(len(rows_TD),)](
            rows_TD, rows_TD, weight_D, out_TD, rows_TD.stride(0), 0, width, eps,
            PARTS=1, ADD=False, BLOCK=block, num_warps=_norm_warps(block),
            LATE=triggers_late(len(rows_TD), is_large=width >= LARGE_WIDTH), **launch_options(x_TD.device),
        )  # fmt: skip
    return out_TD.view(x_TD.shape)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is written over residual, the norm over x.

    Shapes: both (T, D), contiguous. The norm is taken of the sum before it is rounded.
    Device: one launch, no host sync.
    """
    width = x_TD.shape[-1]
    block = triton.next_power_of_2(width)
    x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
    if x_TD.numel():
        _rms_norm_kernel[(x_TD.numel() // width,)](
            x_TD, residual_TD, weight_D, x_TD, width, 0, width, eps,
            PARTS=1, ADD=True, BLOCK=block, num_warps=_norm_warps(block),
            LATE=triggers_late(len(x_TD), is_large=width >= LARGE_WIDTH), **launch_options(x_TD.device),
        )  # fmt: skip
    return x_TD, residual_TD


def add_parts_rms_norm(
    parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum of the parts + residual), that sum); the sum is written over residual, the norm to `out_TD` if any.

    Shapes: parts_PTD (P, T, D), each part contiguous; residual_TD (T, D), contiguous, gives the dtype of both results.
    Device: one launch, no host sync.
    """
    num_parts, num_rows, width = parts_PTD.shape
    block = triton.next_power_of_2(width)
    if out_TD is None:
        out_TD = torch.empty((num_rows, width), dtype=residual_TD.dtype, device=residual_TD.device)
    if out_TD.numel():
        _rms_norm_kernel[(num_rows,)](
            parts_PTD, residual_TD, weight_D, out_TD, width, parts_PTD.stride(0), width, eps,
            PARTS=num_parts, ADD=True, BLOCK=block, num_warps=_norm_warps(block),
            LATE=triggers_late(num_rows, is_large=width >= LARGE_WIDTH), **launch_options(out_TD.device),
        )  # fmt: skip
    return out_TD, residual_TD


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """silu(first half) * second half along the last dimension.

    Shapes: (T, 2F) -> (T, F).
    Device: one launch, no host sync.
    """
    width = gate_up_TF.shape[-1] // 2
    rows_TF = gate_up_TF.reshape(-1, 2 * width)
    out_TF = torch.empty((*gate_up_TF.shape[:-1], width), dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    if out_TF.numel():
        grid = (len(rows_TF), triton.cdiv(width, SILU_BLOCK))
        _silu_mul_kernel[grid](
            rows_TF, out_TF, rows_TF.stride(0), width, BLOCK=SILU_BLOCK, num_warps=4, **launch_options(out_TF.device)
        )  # fmt: skip
    return out_TF


@triton.jit
def _normed(low, high, weight_ptr, dim, dims, eps, HEAD_DIM: tl.constexpr):
    """RMS-normalise heads given as two halves (heads, HEAD_DIM / 2)."""
    scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM + eps)[:, None]
    weight_low = tl.load(weight_ptr + dim, mask=dims, other=0.0).to(tl.float32)[None, :]
    weight_high = tl.load(weight_ptr + HEAD_DIM // 2 + dim, mask=dims, other=0.0).to(tl.float32)[None, :]
    return low * scale * weight_low, high * scale * weight_high


@triton.jit
def _qk_norm_rope_write_kernel(
    qkv_ptr, q_out_ptr, cache_ptr, positions_ptr, slots_ptr, table_ptr, q_weight_ptr, k_weight_ptr,
    token_stride, half_stride: tl.int64, block_stride, offset_stride, head_stride, table_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_HALF)
    dims = dim < HEAD_DIM // 2
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & dims[None, :]

    if PDL:
        gdc_wait()
    source = qkv_ptr + token * token_stride + head[:, None] * HEAD_DIM + dim[None, :]
    low_in = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high_in = tl.load(source + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token)
    low, high = low_in, high_in
    if NORM:
        q_low, q_high = _normed(low, high, q_weight_ptr, dim, dims, eps, HEAD_DIM)
        k_low, k_high = _normed(low, high, k_weight_ptr, dim, dims, eps, HEAD_DIM)
        low = tl.where(is_q[:, None], q_low, k_low)
        high = tl.where(is_q[:, None], q_high, k_high)
    if ROPE:
        row = table_ptr + tl.load(positions_ptr + token) * table_stride
        cos = tl.load(row + dim, mask=dims, other=0.0)[None, :]
        sin = tl.load(row + HEAD_DIM // 2 + dim, mask=dims, other=0.0)[None, :]
        low, high = low * cos - high * sin, high * cos + low * sin
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
    tl.store(to_cache, low.to(cache_ptr.dtype.element_ty), mask=kv_mask)
    tl.store(to_cache + HEAD_DIM // 2, high.to(cache_ptr.dtype.element_ty), mask=kv_mask)


def qk_norm_rope_write(
    qkv_TC: Tensor,
    kv_2NSKE: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    rope: Rope | None,
    norm: QKNorm | None,
) -> Tensor:
    """Split qkv, normalise and rotate q and k, store k and v in the paged cache, return q.

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
    block_heads = min(triton.next_power_of_2(total_heads), HEADS_PER_PROGRAM)
    half_stride, block_stride, offset_stride, head_stride, _ = kv_2NSKE.stride()
    _qk_norm_rope_write_kernel[(num_tokens, triton.cdiv(total_heads, block_heads))](
        qkv_TC, q_THE, kv_2NSKE, positions_T, slot_mapping_T, table, q_weight, k_weight,
        qkv_TC.stride(0), half_stride, block_stride, offset_stride, head_stride, table.stride(0),
        norm.eps if norm is not None else 0.0,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        NORM=norm is not None, ROPE=rope is not None,
        BLOCK_HEADS=block_heads, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), num_warps=4,
        **launch_options(qkv_TC.device),
    )  # fmt: skip
    return q_THE
