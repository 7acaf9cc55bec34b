"""Triton products of each expert with the tokens that chose it, in tiles of pairs as triton_routing.py lists them.

There are two forms: plain (SiLU·mul), and with biases and a clamped gate (gpt-oss). Both are finished in float32 where
the products end, so that nothing in between goes through memory. The plain form takes weights in e4m3, int8 and int4
with scales too, which are widened in registers, or not at all: rows of a checkpoint whose activations are quantised are
rounded to e4m3, by the program that multiplies them, or before by a launch where an expert has many; those with scales
of blocks then go to triton_many_experts.py on a Hopper card. A launch is sized for the worst routing; programs that
find no tile return at once. Every program waits before it reads how many tiles there are, and lets the next kernel
start only after its last step: programs of that kernel would take the places of this one's that are still to start.
Legend: T tokens, D hidden, F intermediate features, X experts, A experts of a token, P = T * A pairs, W most tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.experts.triton_many_experts import many_expert_outputs, takes_blocks
from hookline.plugins.kernels.experts.triton_routing import (
    Tiling,
    clamped_tiling,
    fitting_cut,
    group_by_expert,
    rounded_tiling,
    rounds_ahead,
    scaled_tiling,
    tiling,
)
from hookline.plugins.kernels.products.triton_rounding import round_rows
from hookline.plugins.kernels.products.triton_scales import (
    Scales,
    add_step,
    converts,
    expert_scaling_arguments,
    loadable,
    rounded,
    scaling_constants,
)
from hookline.plugins.kernels.triton_activations import gelu_tanh
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import cdiv, launch_options

GROUP_TILES = 8
"""Tiles that take turns over the columns together, so that an expert's weights are read from the L2."""
ROUNDED_COLUMNS = 128
"""Columns of a row that share a scale when rounded, a multiple of any step's columns; smaller steps round as many."""
SUM_COLUMNS = 1024
"""Columns of a program that sums up."""


@triton.jit
def _tile_and_columns(most_tiles, num_column_blocks, GROUP: tl.constexpr):
    """This program's tile and block of columns: GROUP neighbouring tiles go over all columns before the next do."""
    program = tl.program_id(0)
    group = program // (GROUP * num_column_blocks)
    size = tl.minimum(most_tiles - group * GROUP, GROUP)
    inside = program % (GROUP * num_column_blocks)
    return group * GROUP + inside % size, inside // size


@triton.jit
def _rows_of(tile, ends_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M: tl.constexpr):
    """A tile's expert, its places in the order of pairs, and a mask of the places that have a pair."""
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
    return expert, row, row < tl.load(ends_ptr + expert)


@triton.jit
def _columns_of(block, width, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A block's columns, a mask of the columns that exist, and the first step along the depth."""
    column, step = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    return column, column < width, step


@triton.jit
def _weight_at(weight_ptr, expert, column, step, expert_stride, weight_stride):
    """Pointers to the first step of these columns of an expert's weight, (BLOCK_K, BLOCK_N)."""
    return weight_ptr + expert * expert_stride + column[None, :].to(tl.int64) * weight_stride + step[:, None]


@triton.jit
def _gate_up(
    x_at, gate_at, up_at, rows, columns, step, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of a tile's rows with gate and up. x_at, gate_at, up_at: pointers to their first steps."""
    gate, up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = start + step < depth
        x = tl.load(x_at + start, mask=rows[:, None] & inside[None, :], other=0.0)
        gate_weight = tl.load(gate_at + start, mask=columns[None, :] & inside[:, None], other=0.0)
        up_weight = tl.load(up_at + start, mask=columns[None, :] & inside[:, None], other=0.0)
        gate = tl.dot(x, gate_weight, gate, input_precision=PRECISION)
        up = tl.dot(x, up_weight, up, input_precision=PRECISION)
    return gate, up


@triton.jit
def _down(
    hidden_at, weight_at, rows, columns, step, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product of a tile's rows with down. hidden_at, weight_at: pointers to their first steps."""
    out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = start + step < depth
        hidden = tl.load(hidden_at + start, mask=rows[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=columns[None, :] & inside[:, None], other=0.0)
        out = tl.dot(hidden, weight, out, input_precision=PRECISION)
    return out


@triton.jit
def _scaled_products(
    x_at, x_scale_at, x_scale_stride, weight_ptr, up_offset, scale_ptr, zero_ptr, scale_stride, rows, out, outs,
    first_up, weight_stride, depth, BOTH: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr, ROUND: tl.constexpr, LOADED_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products with these outputs of an expert's weight with scales; BOTH: and with outputs `first_up` further.

    The weight is the left operand, so that matrix instructions can take it from registers. x_scale_at: pointers to the
    rows' first scales, if the rows are rounded already; ROUND: this program rounds them.
    """
    has_units: tl.constexpr = x_scale_at is not None
    ROUNDED: tl.constexpr = 128  # ROUNDED_COLUMNS
    step, stored = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // PACKED)
    weight_at = weight_ptr + out[:, None].to(tl.int64) * weight_stride + stored[None, :]
    acc, up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=LOADED_STAGES):
        x = tl.load(x_at + start, mask=rows[:, None] & (start + step < depth)[None, :], other=0.0)
        inside = outs[:, None] & (start + stored * PACKED < depth)[None, :]
        weight = tl.load(weight_at + start // PACKED, mask=inside, other=0.0)
        unit = 1.0
        if ROUND:
            x, unit = rounded(x)
            unit = unit[None, :]
        elif has_units:
            unit = tl.load(x_scale_at + start // ROUNDED * x_scale_stride, mask=rows, other=0.0)[None, :]
        acc = add_step(
            acc, weight, x, unit, scale_ptr, zero_ptr, scale_stride, out, outs, start,
            SCALE_ROWS, SCALE_COLUMNS, PACKED, ROUND or has_units, PRECISION,
        )  # fmt: skip
        if BOTH:
            up_weight = tl.load(weight_at + up_offset + start // PACKED, mask=inside, other=0.0)
            up_acc = add_step(
                up_acc, up_weight, x, unit, scale_ptr, zero_ptr, scale_stride, out + first_up, outs, start,
                SCALE_ROWS, SCALE_COLUMNS, PACKED, ROUND or has_units, PRECISION,
            )  # fmt: skip
    if not SCALE_COLUMNS:
        acc *= tl.load(scale_ptr + out // SCALE_ROWS * scale_stride, mask=outs, other=0.0)[:, None]
        if BOTH:
            up_at = scale_ptr + (out + first_up) // SCALE_ROWS * scale_stride
            up_acc *= tl.load(up_at, mask=outs, other=0.0)[:, None]
    return acc.T, up_acc.T


@triton.jit
def _store(out_ptr, out, place, column, rows, columns, width):
    """Store a tile, each of whose rows has its place in the output."""
    out_at = out_ptr + place[:, None].to(tl.int64) * width + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=rows[:, None] & columns[None, :])


@triton.jit(do_not_specialize=["most_tiles", "x_scale_stride"])
def _gate_up_kernel(
    x_ptr, weight_ptr, out_ptr, order_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    x_stride, expert_stride, weight_stride, half_stride, num_chosen, depth, width, most_tiles,
    x_scale_ptr, x_scale_stride, scale_ptr, zero_ptr, scale_stride, expert_scale_stride, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, PACKED: tl.constexpr, ROUND: tl.constexpr, LOADED_STAGES: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of each pair, in the order of pairs; with GELU, gelu(gate) * up."""
    if PDL:
        gdc_wait()
    num_tiles = tl.load(num_tiles_ptr)
    tile, block = _tile_and_columns(most_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    if tile >= num_tiles:
        return
    expert, row, rows = _rows_of(tile, ends_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M)
    token = (tl.load(order_ptr + row, mask=rows, other=0) // num_chosen).to(tl.int64)
    column, columns, step = _columns_of(block, width, BLOCK_N, BLOCK_K)
    x_at = x_ptr + token[:, None] * x_stride + step[None, :]
    if SCALE_ROWS:
        scale_at = scale_ptr + expert * expert_scale_stride
        zero_at = zero_ptr if zero_ptr is None else zero_ptr + expert * expert_scale_stride
        x_scale_at = x_scale_ptr if x_scale_ptr is None else x_scale_ptr + token
        gate, up = _scaled_products(
            x_at, x_scale_at, x_scale_stride, weight_ptr + expert * expert_stride, half_stride, scale_at, zero_at,
            scale_stride, rows, column, columns, width, weight_stride, depth, True, SCALE_ROWS, SCALE_COLUMNS, PACKED,
            ROUND, LOADED_STAGES, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
    else:
        gate_at = _weight_at(weight_ptr, expert, column, step, expert_stride, weight_stride)
        up_at = gate_at + half_stride
        gate, up = _gate_up(x_at, gate_at, up_at, rows, columns, step, depth, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    if PDL:
        gdc_launch_dependents()
    out = (gelu_tanh(gate) if GELU else gate / (1.0 + tl.exp(-gate))) * up
    _store(out_ptr, out, row, column, rows, columns, width)


@triton.jit(do_not_specialize=["most_tiles", "alpha", "limit"])
def _clamped_gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    x_stride, expert_stride, weight_stride, half_stride, bias_stride, num_chosen, depth, width, most_tiles,
    alpha, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As _gate_up_kernel with biases, and the gate of Kernels.clamped_expert_mlp."""
    if PDL:
        gdc_wait()
    num_tiles = tl.load(num_tiles_ptr)
    tile, block = _tile_and_columns(most_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    if tile >= num_tiles:
        return
    expert, row, rows = _rows_of(tile, ends_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M)
    token = (tl.load(order_ptr + row, mask=rows, other=0) // num_chosen).to(tl.int64)
    column, columns, step = _columns_of(block, width, BLOCK_N, BLOCK_K)
    x_at = x_ptr + token[:, None] * x_stride + step[None, :]
    gate_at = _weight_at(weight_ptr, expert, column, step, expert_stride, weight_stride)
    up_at = gate_at + half_stride
    bias_at = bias_ptr + expert * bias_stride + column
    gate_bias = tl.load(bias_at, mask=columns, other=0.0).to(tl.float32)
    up_bias = tl.load(bias_at + width, mask=columns, other=0.0).to(tl.float32)
    gate, up = _gate_up(x_at, gate_at, up_at, rows, columns, step, depth, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    if PDL:
        gdc_launch_dependents()
    gate = tl.minimum(gate + gate_bias[None, :], limit)
    up = tl.maximum(tl.minimum(up + up_bias[None, :], limit), -limit)
    out = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    _store(out_ptr, out, row, column, rows, columns, width)


@triton.jit(do_not_specialize=["most_tiles", "x_scale_stride"])
def _down_kernel(
    hidden_ptr, weight_ptr, pair_weight_ptr, out_ptr, order_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    expert_stride, weight_stride, depth, width, most_tiles,
    x_scale_ptr, x_scale_stride, scale_ptr, zero_ptr, scale_stride, expert_scale_stride, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, PACKED: tl.constexpr, ROUND: tl.constexpr, LOADED_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each pair's output times its weight, at the pair's own place."""
    if PDL:
        gdc_wait()
    num_tiles = tl.load(num_tiles_ptr)
    tile, block = _tile_and_columns(most_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    if tile >= num_tiles:
        return
    expert, row, rows = _rows_of(tile, ends_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M)
    pair = tl.load(order_ptr + row, mask=rows, other=0)
    column, columns, step = _columns_of(block, width, BLOCK_N, BLOCK_K)
    hidden_at = hidden_ptr + row[:, None].to(tl.int64) * depth + step[None, :]
    if SCALE_ROWS:
        scale_at = scale_ptr + expert * expert_scale_stride
        zero_at = zero_ptr if zero_ptr is None else zero_ptr + expert * expert_scale_stride
        x_scale_at = x_scale_ptr if x_scale_ptr is None else x_scale_ptr + row
        out, _ = _scaled_products(
            hidden_at, x_scale_at, x_scale_stride, weight_ptr + expert * expert_stride, 0, scale_at, zero_at,
            scale_stride, rows, column, columns, 0, weight_stride, depth, False, SCALE_ROWS, SCALE_COLUMNS, PACKED,
            ROUND, LOADED_STAGES, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
    else:
        weight_at = _weight_at(weight_ptr, expert, column, step, expert_stride, weight_stride)
        out = _down(hidden_at, weight_at, rows, columns, step, depth, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    if PDL:
        gdc_launch_dependents()
    out *= tl.load(pair_weight_ptr + pair, mask=rows, other=0.0)[:, None]
    _store(out_ptr, out, pair, column, rows, columns, width)


@triton.jit(do_not_specialize=["most_tiles"])
def _biased_down_kernel(
    hidden_ptr, weight_ptr, bias_ptr, pair_weight_ptr, out_ptr,
    order_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    expert_stride, weight_stride, bias_stride, depth, width, most_tiles, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As _down_kernel with a bias, if there is one."""
    if PDL:
        gdc_wait()
    num_tiles = tl.load(num_tiles_ptr)
    tile, block = _tile_and_columns(most_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    if tile >= num_tiles:
        return
    expert, row, rows = _rows_of(tile, ends_ptr, tile_expert_ptr, tile_row_ptr, BLOCK_M)
    pair = tl.load(order_ptr + row, mask=rows, other=0)
    column, columns, step = _columns_of(block, width, BLOCK_N, BLOCK_K)
    hidden_at = hidden_ptr + row[:, None].to(tl.int64) * depth + step[None, :]
    weight_at = _weight_at(weight_ptr, expert, column, step, expert_stride, weight_stride)
    out = _down(hidden_at, weight_at, rows, columns, step, depth, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    if PDL:
        gdc_launch_dependents()
    if BIAS:
        out += tl.load(bias_ptr + expert * bias_stride + column, mask=columns, other=0.0).to(tl.float32)[None, :]
    out *= tl.load(pair_weight_ptr + pair, mask=rows, other=0.0)[:, None]
    _store(out_ptr, out, pair, column, rows, columns, width)


@triton.jit
def _sum_kernel(parts_ptr, out_ptr, width, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(CHOSEN):
        total += tl.load(parts_ptr + (row * CHOSEN + place) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
    cut: Tiling | None = None, *, gelu: bool = False,
) -> Tensor:  # fmt: skip
    """See Kernels.expert_mlp, and with `gelu` gelu_expert_mlp. `cut` replaces the tiling of choice.

    Each expert's output is rounded to x's dtype once it is weighted; their sum is float32, rounded once.
    Device: four launches (some more beyond MOST_PAIRS_SCANNED pairs), no host sync.
    """
    return summed(expert_outputs(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, cut, gelu=gelu))


def clamped_expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor,
    down_XDF: Tensor, down_bias_XD: Tensor | None, alpha: float, limit: float, cut: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """See Kernels.clamped_expert_mlp; else as `expert_mlp`."""
    clamps = gate_up_bias_XF, down_bias_XD, alpha, limit
    return summed(expert_outputs(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, cut, *clamps))


def summed(parts_TAD: Tensor) -> Tensor:
    """The sum of each token's parts, in their order, in float32 and rounded once: (T, A, D) -> (T, D).

    Shapes: parts_TAD contiguous. Device: one launch, no host sync.
    """
    num_tokens, num_chosen, width = parts_TAD.shape
    out_TD = torch.empty((num_tokens, width), dtype=parts_TAD.dtype, device=parts_TAD.device)
    if num_tokens:
        _sum_kernel[(num_tokens, cdiv(width, SUM_COLUMNS))](
            parts_TAD, out_TD, width, CHOSEN=num_chosen, COLUMNS=SUM_COLUMNS, num_warps=4,
            **launch_options(out_TD.device),
        )  # fmt: skip
    return out_TD


def expert_outputs(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
    cut: Tiling | None = None, gate_up_bias_XF: Tensor | None = None, down_bias_XD: Tensor | None = None,
    alpha: float = 1.0, limit: float = 0.0, scales: tuple[Scales, Scales] | None = None, *, may_round: bool = False,
    gelu: bool = False,
) -> Tensor:  # fmt: skip
    """The terms of the sum of `expert_mlp`, or of `clamped_expert_mlp` with gate_up_bias_XF: (T, A, D), contiguous.

    scales: of both weights, which are then as ScaledWeight has them, and go without biases. may_round: whether rows
    may be rounded to e4m3; in float32, and where the card does not convert it, they are not.
    """
    (num_tokens, hidden), num_chosen = x_TD.shape, expert_TA.shape[1]
    num_experts, inner = len(down_XDF), gate_up_XFD.shape[1] // 2
    num_pairs = num_tokens * num_chosen
    if not num_pairs:
        return x_TD.new_zeros(num_tokens, num_chosen, hidden)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    assert gate_up_XFD.stride(2) == 1 and down_XDF.stride(2) == 1
    gate_up_scales, down_scales = scales or (None, None)
    rounds = may_round and rounds_rows(x_TD)
    if rounds and scales and cut is None and not gelu and takes_blocks(num_pairs, gate_up_XFD, down_XDF, scales):
        return many_expert_outputs(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, scales)
    unscaled = tiling if gate_up_bias_XF is None else clamped_tiling
    choice = rounded_tiling if rounds else scaled_tiling if scales else unscaled
    cut = cut or choice(num_pairs, num_experts, x_TD.element_size())
    weight_bits = 8 // scales[0].packed if scales else None
    cut = fitting_cut(cut, x_TD.element_size(), Card.of(x_TD.device), weight_bits, rounds=rounds)
    ahead = rounds and rounds_ahead(num_pairs, num_experts)
    gate_up_XFD, down_XDF = (one if scales is None else loadable(one) for one in (gate_up_XFD, down_XDF))
    groups = group_by_expert(expert_TA, num_experts, cut.block_m)
    listed = (groups.order_P, groups.ends_X, groups.tile_expert_W, groups.tile_row_W, groups.num_tiles_1)
    most_tiles, weight_TA = len(groups.tile_expert_W), weight_TA.contiguous()
    hidden_PF = torch.empty((num_pairs, inner), dtype=x_TD.dtype, device=x_TD.device)
    out_PD = torch.empty((num_pairs, hidden), dtype=x_TD.dtype, device=x_TD.device)
    gate_up_grid = (most_tiles * cdiv(inner, cut.gate_up[0]),)
    down_grid = (most_tiles * cdiv(hidden, cut.down[0]),)
    rows_TD, *units = _rounded_ahead(x_TD) if ahead else (x_TD, None, None)
    strides = rows_TD.stride(0), gate_up_XFD.stride(0), gate_up_XFD.stride(1), inner * gate_up_XFD.stride(1)
    if gate_up_bias_XF is None:
        _gate_up_kernel[gate_up_grid](
            rows_TD, gate_up_XFD, hidden_PF, *listed, *strides, num_chosen, hidden, inner, most_tiles,
            *units, *expert_scaling_arguments(gate_up_scales), ROUND=rounds and not ahead, GELU=gelu,
            **_scaled_options(cut.block_m, cut.gate_up, x_TD, gate_up_scales),
        )  # fmt: skip
        rows_PF, *units = _rounded_ahead(hidden_PF) if ahead else (hidden_PF, None, None)
        _down_kernel[down_grid](
            rows_PF, down_XDF, weight_TA, out_PD, *listed, down_XDF.stride(0), down_XDF.stride(1), inner, hidden,
            most_tiles, *units, *expert_scaling_arguments(down_scales), ROUND=rounds and not ahead,
            **_scaled_options(cut.block_m, cut.down, x_TD, down_scales),
        )  # fmt: skip
    else:
        assert scales is None
        assert gate_up_bias_XF.stride(1) == 1
        _clamped_gate_up_kernel[gate_up_grid](
            x_TD, gate_up_XFD, gate_up_bias_XF, hidden_PF, *listed, *strides, gate_up_bias_XF.stride(0), num_chosen,
            hidden, inner, most_tiles, float(alpha), float(limit), **_options(cut.block_m, cut.gate_up, x_TD),
        )  # fmt: skip
        bias_XD = down_XDF if down_bias_XD is None else down_bias_XD
        _biased_down_kernel[down_grid](
            hidden_PF, down_XDF, bias_XD, weight_TA, out_PD, *listed, down_XDF.stride(0), down_XDF.stride(1),
            bias_XD.stride(0), inner, hidden, most_tiles, BIAS=down_bias_XD is not None,
            **_options(cut.block_m, cut.down, x_TD),
        )  # fmt: skip
    return out_PD.view(num_tokens, num_chosen, hidden)


def rounds_rows(x_TD: Tensor) -> bool:
    """Whether `expert_outputs` rounds such rows to e4m3 if it may."""
    return x_TD.element_size() == 2 and converts(x_TD.device)


def _rounded_ahead(x_TD: Tensor) -> tuple[Tensor, Tensor, int]:
    """The rows in e4m3, their scales, and how far apart in memory a row's scales are. Device: one launch."""
    rows = round_rows(x_TD, ROUNDED_COLUMNS)
    return rows.values_TD, rows.scales_TG, rows.scales_TG.stride(1)


def _scaled_options(
    block_m: int, cut: tuple[int, int, int, int], x_TD: Tensor, scales: Scales | None
) -> dict[str, object]:
    """Options of a kernel for weights with scales: a step lies in one block of scales, which are loaded ahead, too."""
    columns = 0 if scales is None else scales.columns
    block_n, block_k, num_warps, num_stages = cut
    options = _options(block_m, (block_n, min(block_k, columns or block_k), num_warps, num_stages), x_TD)
    return {**options, **scaling_constants(scales), "LOADED_STAGES": num_stages if columns else None}


def _options(block_m: int, cut: tuple[int, int, int, int], x_TD: Tensor) -> dict[str, object]:
    block_n, block_k, num_warps, num_stages = cut
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP": GROUP_TILES,
        "PRECISION": "ieee" if x_TD.dtype == torch.float32 else "tf32",
        "num_warps": num_warps,
        "num_stages": num_stages,
        **launch_options(x_TD.device),
    }
