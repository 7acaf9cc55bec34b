"""Triton kernels of RMS norms, alone and joined to what comes before or after them: a sum, a second norm, a gate.

Each reads its input once and writes its output once; arithmetic is float32, results are rounded once to the input's
dtype. Legend: T tokens, D hidden, H heads, E head dim, P parts of a sum.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.triton_launch import LARGE_WIDTH, cdiv, launch_options, next_power_of_2, triggers_late

ELEMENTS = 1024
"""Values that a program of `rms_norm_silu_mul`, of some heads, or of `take_columns` takes."""
MANY_TOKENS = 32
"""From so many tokens on, a program of `norm_heads` takes NORM_TOKENS of them, so that it reads places and scales once
for all."""
NORM_TOKENS = 4


@triton.jit(do_not_specialize=["scale_stride"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, row_stride, part_stride, width, eps, scale_ptr, scale_stride,
    GROUP: tl.constexpr,
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
    normed = x * scale * weight
    if scale_ptr is not None:  # rounded to e4m3, whose largest value is 448, with a scale for each group of columns
        groups: tl.constexpr = BLOCK // GROUP
        normed = tl.reshape(normed, [groups, GROUP])
        largest = tl.maximum(tl.max(tl.abs(normed), axis=1), 1e-20)
        normed = tl.reshape(normed * (448.0 / largest)[:, None], [BLOCK])
        group = tl.arange(0, groups)
        tl.store(scale_ptr + group * scale_stride + row, largest * (1.0 / 448.0), mask=group * GROUP < width)
    tl.store(out_ptr + row * width + column, normed.to(out_ptr.dtype.element_ty), mask=inside)


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
    block = next_power_of_2(width)
    if len(rows_TD):
        _rms_norm_kernel[(len(rows_TD),)](
            rows_TD, rows_TD, weight_D, out_TD, rows_TD.stride(0), 0, width, eps, None, None, GROUP=0,
            PARTS=1, ADD=False, BLOCK=block, num_warps=_norm_warps(block),
            LATE=triggers_late(len(rows_TD), is_large=width >= LARGE_WIDTH), **launch_options(x_TD.device),
        )  # fmt: skip
    return out_TD.view(x_TD.shape)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, rounded: tuple[Tensor, Tensor, int] | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is written over residual, the norm over x.

    rounded: where the norm goes instead, in e4m3, (T, D); the scales of its rows' groups, (groups, T) float32; and the
    columns of a group, a power of two. The norm is about the first times the second.
    Shapes: both (T, D), contiguous. The norm is taken of the sum before it is rounded.
    Device: one launch, no host sync.
    """
    width = x_TD.shape[-1]
    out_TD, scales_GT, columns = rounded if rounded is not None else (None, None, 0)
    block = next_power_of_2(width)
    x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
    if x_TD.numel():
        _rms_norm_kernel[(x_TD.numel() // width,)](
            x_TD, residual_TD, weight_D, x_TD if out_TD is None else out_TD, width, 0, width, eps,
            scales_GT, None if scales_GT is None else scales_GT.stride(0), GROUP=min(columns, block),
            PARTS=1, ADD=True, BLOCK=block, num_warps=_norm_warps(block),
            LATE=triggers_late(len(x_TD), is_large=width >= LARGE_WIDTH), **launch_options(x_TD.device),
        )  # fmt: skip
    return x_TD, residual_TD


def add_parts_rms_norm(
    parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum of the parts + residual), that sum); the sum is written over residual, the norm to `out_TD` if any.

    Shapes: parts_PTD (P, T, D), each row contiguous, with one stride between rows and one between parts; residual_TD
    (T, D), contiguous, gives the dtype of both results.
    Device: one launch, no host sync.
    """
    num_parts, num_rows, width = parts_PTD.shape
    assert parts_PTD.stride(2) == 1
    block = next_power_of_2(width)
    if out_TD is None:
        out_TD = torch.empty((num_rows, width), dtype=residual_TD.dtype, device=residual_TD.device)
    if out_TD.numel():
        _rms_norm_kernel[(num_rows,)](
            parts_PTD, residual_TD, weight_D, out_TD, parts_PTD.stride(1), parts_PTD.stride(0), width, eps,
            None, None, GROUP=0, PARTS=num_parts, ADD=True, BLOCK=block, num_warps=_norm_warps(block),
            LATE=triggers_late(num_rows, is_large=width >= LARGE_WIDTH), **launch_options(out_TD.device),
        )  # fmt: skip
    return out_TD, residual_TD


@triton.jit
def _norm_add_rms_norm_kernel(
    x_ptr, inner_weight_ptr, y_ptr, y_weight_ptr, outer_weight_ptr, residual_ptr, weight_ptr, scale_ptr, out_ptr,
    x_stride, y_stride, weight_stride, norm_stride, width, eps,
    BESIDE: tl.constexpr, SCALED: tl.constexpr, NORMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    if PDL and not LATE:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    inner_weight = tl.load(inner_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weights = ()
    for norm in tl.static_range(NORMS):
        weight = tl.load(weight_ptr + norm * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
        weights = weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
    if BESIDE:
        y_weight = tl.load(y_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        outer_weight = tl.load(outer_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if PDL and LATE:
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    residual_at = residual_ptr + row * width + column
    residual = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    if BESIDE:
        y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, axis=0) / width + eps) * y_weight
    total = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * inner_weight
    if BESIDE:
        total += y
        total *= tl.rsqrt(tl.sum(total * total, axis=0) / width + eps) * outer_weight
    total += residual
    if SCALED:
        total *= tl.load(scale_ptr).to(tl.float32)
    tl.store(residual_at, total.to(residual_ptr.dtype.element_ty), mask=inside)
    total *= tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    for norm in tl.static_range(NORMS):
        out_at = out_ptr + norm * norm_stride + row * width + column
        tl.store(out_at, (total * weights[norm]).to(out_ptr.dtype.element_ty), mask=inside)


def norm_add_rms_norm(
    x_TD: Tensor, inner_weight_D: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float,
    scale_1: Tensor | None = None, beside: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See Kernels.norm_add_rms_norm; the sum is written over residual. Norms are taken of sums before they are rounded.

    Device: one launch, no host sync.
    """
    num_rows, width = x_TD.shape
    block = next_power_of_2(width)
    y_TD, y_weight_D, outer_weight_D = (x_TD, inner_weight_D, inner_weight_D) if beside is None else beside
    x_TD, y_TD = (one if one.stride(1) == 1 else one.contiguous() for one in (x_TD, y_TD))
    residual_TD = residual_TD.contiguous()
    assert weight_D.stride(-1) == 1
    out_TD = torch.empty((*weight_D.shape[:-1], num_rows, width), dtype=x_TD.dtype, device=x_TD.device)
    if out_TD.numel():
        _norm_add_rms_norm_kernel[(num_rows,)](
            x_TD, inner_weight_D, y_TD, y_weight_D, outer_weight_D, residual_TD, weight_D, scale_1, out_TD,
            x_TD.stride(0), y_TD.stride(0), weight_D.stride(0), num_rows * width, width, eps,
            BESIDE=beside is not None, SCALED=scale_1 is not None, NORMS=weight_D.numel() // width,
            BLOCK=block, num_warps=_norm_warps(block),
            LATE=triggers_late(num_rows, is_large=width >= LARGE_WIDTH), **launch_options(x_TD.device),
        )  # fmt: skip
    return out_TD, residual_TD


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_heads_kernel(
    x_ptr, places_ptr, scale_ptr, out_ptr, x_stride, out_stride, num_tokens, head_dim, eps,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    first_token, column = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, BLOCK)
    columns, at = column < WIDTH, tl.program_id(1) * WIDTH + column
    place = tl.load(places_ptr + at, mask=columns, other=-1)
    scale = tl.load(scale_ptr + at, mask=columns, other=0.0).to(tl.float32)
    inside = place >= 0
    head = place // head_dim
    first = tl.min(tl.where(inside, head, 1 << 30), axis=0)
    if PDL:
        gdc_wait()
    for index in tl.static_range(TOKENS):
        token = first_token + index
        there = column < tl.where(token < num_tokens, WIDTH, 0)
        x = tl.load(x_ptr + token * x_stride + place, mask=inside & there, other=0.0).to(tl.float32)
        own = scale
        for one in tl.static_range(HEADS):
            mine = head == first + one
            squares = tl.sum(tl.where(mine, x * x, 0.0), axis=0)
            own = tl.where(mine, own * tl.rsqrt(squares / head_dim + eps), own)
        tl.store(out_ptr + token * out_stride + at, (x * own).to(out_ptr.dtype.element_ty), mask=there)


def norm_heads(x_TN: Tensor, head_dim: int, eps: float, places_C: Tensor, scale_C: Tensor, width: int) -> Tensor:
    """Each head normalised, its numbers in other places and with scales, see Kernels.norm_heads: (T, C).

    Device: one launch, no host sync.
    """
    num_tokens, num_places = len(x_TN), len(places_C)
    x_TN = x_TN if x_TN.stride(1) == 1 else x_TN.contiguous()
    out_TC = torch.empty((num_tokens, num_places), dtype=x_TN.dtype, device=x_TN.device)
    if out_TC.numel():
        tokens = NORM_TOKENS if num_tokens >= MANY_TOKENS else 1
        _norm_heads_kernel[(cdiv(num_tokens, tokens), num_places // width)](
            x_TN, places_C, scale_C, out_TC, x_TN.stride(0), num_places, num_tokens, head_dim, eps,
            WIDTH=width, HEADS=width // head_dim, BLOCK=next_power_of_2(width), TOKENS=tokens, num_warps=1,
            **launch_options(x_TN.device),
        )  # fmt: skip
    return out_TC


@triton.jit
def _take_columns_kernel(
    x_ptr, places_ptr, out_ptr, x_stride, num_places, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_places
    place = tl.load(places_ptr + column, mask=inside, other=0)
    if PDL:
        gdc_wait()
    tl.store(out_ptr + row * num_places + column, tl.load(x_ptr + row * x_stride + place, mask=inside), mask=inside)


def take_columns(x_TD: Tensor, places_N: Tensor) -> Tensor:
    """The columns of x at these places: (T, D) -> (T, N). Device: one launch, no host sync."""
    num_rows, num_places = len(x_TD), len(places_N)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    out_TN = torch.empty((num_rows, num_places), dtype=x_TD.dtype, device=x_TD.device)
    if out_TN.numel():
        _take_columns_kernel[(num_rows, cdiv(num_places, ELEMENTS))](
            x_TD, places_N, out_TN, x_TD.stride(0), num_places, BLOCK=ELEMENTS, num_warps=4,
            **launch_options(x_TD.device),
        )  # fmt: skip
    return out_TN


@triton.jit
def _rms_norm_silu_mul_kernel(
    x_ptr, weight_ptr, gate_ptr, out_ptr, x_stride, gate_stride, num_heads, head_dim, eps,
    BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = tl.arange(0, BLOCK_E)
    inside = (head < num_heads)[:, None] & (e < head_dim)[None, :]
    place = head[:, None] * head_dim + e[None, :]
    weight = tl.load(weight_ptr + e, mask=e < head_dim, other=0.0).to(tl.float32)[None, :]
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + token * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / head_dim + eps)[:, None]
    out = x * scale * weight * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + token * num_heads * head_dim + place, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_silu_mul(x_THE: Tensor, weight_E: Tensor, eps: float, gate_THE: Tensor) -> Tensor:
    """rms_norm(x) * silu(gate), head by head.

    Shapes: (T, H, E) both; the heads of a token lie one behind the other.
    Device: one launch, no host sync.
    """
    num_tokens, num_heads, head_dim = x_THE.shape
    x_THE, gate_THE = _with_whole_tokens(x_THE), _with_whole_tokens(gate_THE)
    out_THE = torch.empty(x_THE.shape, dtype=x_THE.dtype, device=x_THE.device)
    block_e = next_power_of_2(head_dim)
    block_h = max(1, min(ELEMENTS // block_e, next_power_of_2(num_heads)))
    if out_THE.numel():
        _rms_norm_silu_mul_kernel[(num_tokens, cdiv(num_heads, block_h))](
            x_THE, weight_E, gate_THE, out_THE, x_THE.stride(0), gate_THE.stride(0), num_heads, head_dim, eps,
            BLOCK_H=block_h, BLOCK_E=block_e, num_warps=4, **launch_options(x_THE.device),
        )  # fmt: skip
    return out_THE


def _with_whole_tokens(x_THE: Tensor) -> Tensor:
    is_whole = x_THE.stride(2) == 1 and x_THE.stride(1) == x_THE.shape[2]
    return x_THE if is_whole else x_THE.contiguous()
