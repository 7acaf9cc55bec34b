"""Triton products of experts with biases and a clamped gate (gpt-oss).

Pairs are grouped and cut into tiles as in triton_experts.py; the biases, the clamps and the gate's sigmoid are applied
where the products end, in float32, so that nothing in between goes through memory.
Legend: T tokens, D hidden, F intermediate features, X experts, A experts of a token, P = T * A pairs, W most tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.plugins.kernels.experts.triton_experts import Tiling, _options, group_by_expert, tile_and_columns, tiling


def clamped_tiling(num_pairs: int, num_experts: int, itemsize: int) -> Tiling:
    """By how many pairs an expert has on average; wider types take shallower steps.

    Between 16 and 48 pairs a tile holds nearly all pairs of an expert, so that its weights are read once: these experts
    are few and large, and their weights do not stay in the L2 from one tile to the next.
    """
    shrink = max(1, itemsize // 2)
    if 16 * num_experts < num_pairs <= 48 * num_experts:
        return Tiling(64, (64, 64 // shrink, 4, 4), (128, 64 // shrink, 4, 4))
    return tiling(num_pairs, num_experts, itemsize)


@triton.jit(do_not_specialize=["most_tiles", "alpha", "limit"])
def _clamped_gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    x_stride, expert_stride, weight_stride, half_stride, bias_stride, num_chosen, depth, width, most_tiles,
    alpha, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.load(num_tiles_ptr)
    tile, block = tile_and_columns(num_tiles, most_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    rows = row < tl.load(ends_ptr + expert)
    token = (tl.load(order_ptr + row, mask=rows, other=0) // num_chosen).to(tl.int64)
    column, step = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    columns = column < width
    x_at = x_ptr + token[:, None] * x_stride + step[None, :]
    gate_at = weight_ptr + expert * expert_stride + column[None, :].to(tl.int64) * weight_stride + step[:, None]
    up_at = gate_at + half_stride
    bias_at = bias_ptr + expert * bias_stride + column
    gate_bias = tl.load(bias_at, mask=columns, other=0.0).to(tl.float32)
    up_bias = tl.load(bias_at + width, mask=columns, other=0.0).to(tl.float32)
    gate, up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = start + step < depth
        x = tl.load(x_at + start, mask=rows[:, None] & inside[None, :], other=0.0)
        gate_weight = tl.load(gate_at + start, mask=columns[None, :] & inside[:, None], other=0.0)
        up_weight = tl.load(up_at + start, mask=columns[None, :] & inside[:, None], other=0.0)
        gate = tl.dot(x, gate_weight, gate, input_precision=PRECISION)
        up = tl.dot(x, up_weight, up, input_precision=PRECISION)
    gate = tl.minimum(gate + gate_bias[None, :], limit)
    up = tl.maximum(tl.minimum(up + up_bias[None, :], limit), -limit)
    out = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    out_at = out_ptr + row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=rows[:, None] & columns[None, :])


@triton.jit(do_not_specialize=["most_tiles"])
def _biased_down_kernel(
    hidden_ptr, weight_ptr, bias_ptr, pair_weight_ptr, out_ptr,
    order_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    expert_stride, weight_stride, bias_stride, depth, width, most_tiles, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.load(num_tiles_ptr)
    tile, block = tile_and_columns(num_tiles, most_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    rows = row < tl.load(ends_ptr + expert)
    pair = tl.load(order_ptr + row, mask=rows, other=0)
    column, step = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    columns = column < width
    hidden_at = hidden_ptr + row[:, None].to(tl.int64) * depth + step[None, :]
    weight_at = weight_ptr + expert * expert_stride + column[None, :].to(tl.int64) * weight_stride + step[:, None]
    out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = start + step < depth
        hidden = tl.load(hidden_at + start, mask=rows[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=columns[None, :] & inside[:, None], other=0.0)
        out = tl.dot(hidden, weight, out, input_precision=PRECISION)
    if BIAS:
        out += tl.load(bias_ptr + expert * bias_stride + column, mask=columns, other=0.0).to(tl.float32)[None, :]
    out *= tl.load(pair_weight_ptr + pair, mask=rows, other=0.0)[:, None]
    out_at = out_ptr + pair[:, None].to(tl.int64) * width + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=rows[:, None] & columns[None, :])


def clamped_expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor,
    down_XDF: Tensor, down_bias_XD: Tensor | None, alpha: float, limit: float, cut: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """See Kernels.clamped_expert_mlp. `cut` replaces the tiling of choice.

    Each expert's output is rounded to x's dtype once it is weighted; their sum is float32, rounded once.
    Device: four launches (some more beyond MOST_PAIRS_SCANNED pairs), no host sync.
    """
    weights = gate_up_XFD, gate_up_bias_XF, down_XDF, down_bias_XD
    return clamped_outputs(x_TD, expert_TA, weight_TA, *weights, alpha, limit, cut).sum(1)


def clamped_outputs(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor,
    down_XDF: Tensor, down_bias_XD: Tensor | None, alpha: float, limit: float, cut: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """The weighted outputs of each token's experts, (T, A, D), which `clamped_expert_mlp` sums up."""
    (num_tokens, hidden), num_chosen = x_TD.shape, expert_TA.shape[1]
    num_experts, _, inner = down_XDF.shape
    num_pairs = num_tokens * num_chosen
    if not num_pairs:
        return x_TD.new_zeros(num_tokens, num_chosen, hidden)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    assert gate_up_XFD.stride(2) == 1 and down_XDF.stride(2) == 1 and gate_up_bias_XF.stride(1) == 1
    cut = cut or clamped_tiling(num_pairs, num_experts, x_TD.element_size())
    groups = group_by_expert(expert_TA, num_experts, cut.block_m)
    listed = (groups.order_P, groups.ends_X, groups.tile_expert_W, groups.tile_row_W, groups.num_tiles_1)
    most_tiles = len(groups.tile_expert_W)
    hidden_PF = torch.empty((num_pairs, inner), dtype=x_TD.dtype, device=x_TD.device)
    _clamped_gate_up_kernel[(most_tiles * triton.cdiv(inner, cut.gate_up[0]),)](
        x_TD, gate_up_XFD, gate_up_bias_XF, hidden_PF, *listed,
        x_TD.stride(0), gate_up_XFD.stride(0), gate_up_XFD.stride(1), inner * gate_up_XFD.stride(1),
        gate_up_bias_XF.stride(0), num_chosen, hidden, inner, most_tiles, float(alpha), float(limit),
        **_options(cut.block_m, cut.gate_up, x_TD),
    )  # fmt: skip
    out_PD = torch.empty((num_pairs, hidden), dtype=x_TD.dtype, device=x_TD.device)
    bias_XD = down_XDF if down_bias_XD is None else down_bias_XD
    _biased_down_kernel[(most_tiles * triton.cdiv(hidden, cut.down[0]),)](
        hidden_PF, down_XDF, bias_XD, weight_TA.contiguous(), out_PD, *listed,
        down_XDF.stride(0), down_XDF.stride(1), bias_XD.stride(0), inner, hidden, most_tiles,
        BIAS=down_bias_XD is not None, **_options(cut.block_m, cut.down, x_TD),
    )  # fmt: skip
    return out_PD.view(num_tokens, num_chosen, hidden)
