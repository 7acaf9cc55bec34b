"""Triton products of experts in e4m3 with a scale for each block, for prompts: both operands come by the copy engine.

Rows are rounded to e4m3 in the order of pairs, so that a tile of pairs lies together in memory. A program has two
halves of outputs, gate and up or neighbours, whose sums share the rows. Each step has one scale of a half and one of
each row, so a step's sums are added to those before by one multiplication and addition each.
Legend: T tokens, D hidden, F intermediate features, X experts, A experts of a token, P = T * A pairs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from hookline.plugins.kernels.experts.triton_routing import Groups, group_by_expert
from hookline.plugins.kernels.products.triton_rounding import RoundedRows, round_rows
from hookline.plugins.kernels.products.triton_scales import Scales
from hookline.plugins.kernels.products.triton_wide import has_room
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import cdiv, launch_options

STEP = 128
"""Inputs of a step, which have one scale."""
HALF = 64
"""Outputs of a half of a program."""
TILE_PAIRS, NUM_WARPS, NUM_STAGES = 64, 4, 3
"""The fastest of eleven tilings at each of four numbers of tokens, Qwen3-30B-A3B's shape on an H200 (docs/log)."""
FEWEST_PAIRS = 32
"""Fewest pairs for each expert; with fewer it was not measured."""
GROUP_TILES = 8
"""Tiles that take turns over the columns together, so that an expert's weights are read from the L2."""


@triton.jit
def _step(acc, x, weight, unit, scale):
    """The sums of a half with those of one step."""
    return acc + tl.dot(x, weight.T) * (unit * scale)[:, None]


@triton.jit(do_not_specialize=["most_tiles", "unit_stride"])
def _many_kernel(
    x_desc, weight_desc, unit_ptr, scale_ptr, pair_weight_ptr, out_ptr, order_ptr, ends_ptr, tile_expert_ptr,
    tile_row_ptr, num_tiles_ptr, unit_stride, scale_stride, expert_scale_stride, expert_outs, num_out, most_tiles,
    SILU: tl.constexpr, SCALE_ROWS: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, LOADED_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With SILU silu(gate) * up of each pair, in the order of pairs; else down times its weight, at its own place."""
    if PDL:
        gdc_wait()
    num_tiles = tl.load(num_tiles_ptr)
    program, blocks = tl.program_id(0), tl.cdiv(num_out, BLOCK_O if SILU else 2 * BLOCK_O)
    group = program // (GROUP * blocks)
    size = tl.minimum(most_tiles - group * GROUP, GROUP)
    inside = program % (GROUP * blocks)
    tile = group * GROUP + inside % size
    if tile >= num_tiles:
        return
    expert = tl.load(tile_expert_ptr + tile)
    first_row = tl.load(tile_row_ptr + tile)
    row = first_row + tl.arange(0, BLOCK_T)
    rows = row < tl.load(ends_ptr + expert)
    first = inside // size * (BLOCK_O if SILU else 2 * BLOCK_O)
    second = first + (num_out if SILU else BLOCK_O)
    stored = expert * expert_outs
    scale_at = scale_ptr + expert * expert_scale_stride + first // SCALE_ROWS * scale_stride
    # The second half may lie beyond the last output; its scale is then any, and its sums are not stored.
    in_reach = tl.minimum(second, expert_outs - 1)
    other_scale_at = scale_ptr + expert * expert_scale_stride + in_reach // SCALE_ROWS * scale_stride
    acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    other = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for step in tl.range(0, STEPS, num_stages=LOADED_STAGES):
        x = x_desc.load([first_row, step * STEP])
        unit = tl.load(unit_ptr + step * unit_stride + row, mask=rows, other=0.0)
        weight = weight_desc.load([stored + first, step * STEP])
        acc = _step(acc, x, weight, unit, tl.load(scale_at + step))
        weight = weight_desc.load([stored + second, step * STEP])
        other = _step(other, x, weight, unit, tl.load(other_scale_at + step))
    if PDL:
        gdc_launch_dependents()
    out = first + tl.arange(0, BLOCK_O)
    if SILU:
        value = acc / (1.0 + tl.exp(-acc)) * other
        out_at = out_ptr + row.to(tl.int64)[:, None] * num_out + out[None, :]
        tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=rows[:, None] & (out < num_out)[None, :])
    else:
        pair = tl.load(order_ptr + row, mask=rows, other=0)
        factor = tl.load(pair_weight_ptr + pair, mask=rows, other=0.0)[:, None]
        out_at = out_ptr + pair.to(tl.int64)[:, None] * num_out + out[None, :]
        tl.store(out_at, (acc * factor).to(out_ptr.dtype.element_ty), mask=rows[:, None] & (out < num_out)[None, :])
        inside = rows[:, None] & (out + BLOCK_O < num_out)[None, :]
        tl.store(out_at + BLOCK_O, (other * factor).to(out_ptr.dtype.element_ty), mask=inside)


def takes_blocks(num_pairs: int, gate_up_XFD: Tensor, down_XDF: Tensor, scales: tuple[Scales, Scales]) -> bool:
    """Whether `many_expert_outputs` takes so many pairs and these weights, with values in e4m3 unless packed.

    Device: looks at shapes, strides and addresses only, so a captured graph keeps its answer.
    """
    weights, inner, hidden = (gate_up_XFD, down_XDF), down_XDF.shape[2], gate_up_XFD.shape[2]
    has_blocks = all(one.columns == STEP and one.rows % HALF == 0 and one.packed == 1 for one in scales)
    fits = inner % HALF == 0 and hidden % 16 == 0 and all(one.is_contiguous() for one in weights)
    is_aligned = all(one.data_ptr() % 16 == 0 for one in weights)
    has_card = Card.of(down_XDF.device).is_hopper and has_room(down_XDF.device)
    return num_pairs >= FEWEST_PAIRS * len(down_XDF) and has_blocks and fits and is_aligned and has_card


def many_expert_outputs(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
    scales: tuple[Scales, Scales],
) -> Tensor:  # fmt: skip
    """The terms of the sum of `expert_mlp`, of rows rounded to e4m3: (T, A, D), contiguous.

    Device: five launches (some more for many pairs), no host sync.
    """
    (num_tokens, num_chosen), hidden = expert_TA.shape, x_TD.shape[1]
    num_experts, _, inner = down_XDF.shape
    num_pairs = num_tokens * num_chosen
    groups, weight_TA = group_by_expert(expert_TA, num_experts, TILE_PAIRS), weight_TA.contiguous()
    hidden_PF = torch.empty((num_pairs, inner), dtype=x_TD.dtype, device=x_TD.device)
    out_PD = torch.empty((num_pairs, hidden), dtype=x_TD.dtype, device=x_TD.device)
    rows = round_rows(x_TD, STEP, order_P=groups.order_P, num_chosen=num_chosen)
    _launch(rows, gate_up_XFD, scales[0], hidden_PF, groups, weight_TA, is_gate_up=True)
    _launch(round_rows(hidden_PF, STEP), down_XDF, scales[1], out_PD, groups, weight_TA, is_gate_up=False)
    return out_PD.view(num_tokens, num_chosen, hidden)


def _launch(
    rows: RoundedRows, weight_XOD: Tensor, scales: Scales, out: Tensor, groups: Groups, weight_TA: Tensor, *,
    is_gate_up: bool,
) -> None:  # fmt: skip
    (num_pairs, width), (num_experts, expert_outs) = rows.shape, weight_XOD.shape[:2]
    num_out, most_tiles = out.shape[1], len(groups.tile_expert_W)
    x_desc = TensorDescriptor(rows.values_TD, [num_pairs, width], list(rows.values_TD.stride()), [TILE_PAIRS, STEP])
    weight_desc = TensorDescriptor(weight_XOD, [num_experts * expert_outs, width], [width, 1], [HALF, STEP])
    _many_kernel[(most_tiles * cdiv(num_out, HALF if is_gate_up else 2 * HALF),)](
        x_desc, weight_desc, rows.scales_TG, scales.factors_RC, weight_TA, out, groups.order_P, groups.ends_X,
        groups.tile_expert_W, groups.tile_row_W, groups.num_tiles_1, rows.scales_TG.stride(1),
        scales.factors_RC.stride(1), scales.factors_RC.stride(0), expert_outs, num_out, most_tiles,
        SILU=is_gate_up, SCALE_ROWS=scales.rows, STEPS=cdiv(width, STEP), STEP=STEP, GROUP=GROUP_TILES, BLOCK_O=HALF,
        BLOCK_T=TILE_PAIRS, LOADED_STAGES=NUM_STAGES, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        **launch_options(out.device),
    )  # fmt: skip
