"""Triton products of experts in int4, stored as triton_tiled.py does: for a Hopper card and rows in bfloat16.

All experts are stored as one weight, each expert's outputs after the previous expert's. A single token reads its
experts' weights in two launches; more tokens are grouped by expert, in tiles of pairs as triton_routing.py lists them.
Legend: T tokens, D hidden, F intermediate features, X experts, A experts of a token, P = T * A pairs, W most tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.experts.triton_routing import FEW_PAIRS, group_by_expert
from hookline.plugins.kernels.products.triton_tiled import (
    STEP,
    TILE_OUTPUTS,
    TiledWeight,
    group_sums,
    load_step,
    scale_of,
    units_at,
    with_step,
)
from hookline.plugins.kernels.products.triton_tiled_row import expert_gates
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, next_power_of_2

FEW_OUTPUTS = 8
"""Outputs of a program of one token."""
MOST_CHOSEN = 8
"""Most experts of a token whose words a program has in registers, and most steps of them."""
MOST_DOWN_STEPS = 8
GROUP_TILES = 8
"""Tiles that take turns over the columns together, so that an expert's weights are read from the L2."""


@dataclass(frozen=True)
class Int4Tiling:
    """Pairs and outputs of a program, warps and stages of its loop, and whether values are multiplied by scales."""

    pairs: int
    outputs: int
    num_warps: int
    num_stages: int
    is_scaled: bool = False


def int4_tilings(num_pairs: int, num_experts: int) -> tuple[Int4Tiling, Int4Tiling]:
    """The tilings of gate and up, and of down, by how many pairs an expert has on average.

    The fastest of 3 to 11 tilings for each of eleven numbers of tokens, at Qwen3-30B-A3B's shape on an H200 (docs/log).
    """
    if num_pairs * 4 <= num_experts:
        return _both(Int4Tiling(16, 32, 2, 4))
    if num_pairs <= 8 * num_experts:
        return _both(Int4Tiling(16, 128, 4, 4))
    if num_pairs <= FEW_PAIRS * num_experts:
        return _both(Int4Tiling(32, 128, 4, 3))
    if num_pairs <= 3 * FEW_PAIRS * num_experts:
        return Int4Tiling(64, 128, 8, 3, True), Int4Tiling(64, 256, 8, 3, True)
    return Int4Tiling(128, 128, 8, 3, True), Int4Tiling(128, 256, 8, 3, True)


def _both(tiling: Int4Tiling) -> tuple[Int4Tiling, Int4Tiling]:
    return tiling, tiling


@triton.jit(do_not_specialize=["most_tiles"])
def _grouped_kernel(
    x_ptr, units_ptr, scale_ptr, pair_weight_ptr, out_ptr, order_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr,
    num_tiles_ptr, x_stride, num_chosen, expert_outs, num_out, all_out, width, steps, most_tiles,
    SILU: tl.constexpr, GROUPS: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, LOADED_STAGES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """With SILU silu(gate) * up of each pair, in the order of pairs; else down times its weight, at its own place."""
    if PDL:
        gdc_wait()
    num_tiles = tl.load(num_tiles_ptr)
    program, blocks = tl.program_id(0), tl.cdiv(num_out, BLOCK_O)
    group = program // (GROUP * blocks)
    size = tl.minimum(most_tiles - group * GROUP, GROUP)
    inside = program % (GROUP * blocks)
    tile = group * GROUP + inside % size
    if tile >= num_tiles:
        return
    expert = tl.load(tile_expert_ptr + tile)
    row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_T)
    rows = row < tl.load(ends_ptr + expert)
    pair = tl.load(order_ptr + row, mask=rows, other=0)
    out = inside // size * BLOCK_O + tl.arange(0, BLOCK_O)
    outs = out < num_out
    column = tl.arange(0, 32)[None, :]
    x_row = pair // num_chosen if SILU else row
    x_at = x_ptr + x_row.to(tl.int64)[:, None] * x_stride + column
    expert_out = expert * expert_outs + tl.where(outs, out, 0)
    unit_at = units_ptr + units_at(expert_out, steps, TILE)[:, None] + column
    scale_at = scale_ptr + expert_out
    up_unit_at = unit_at
    if SILU:
        up_unit_at = units_ptr + units_at(expert_out + num_out, steps, TILE)[:, None] + column
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    up_acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for step in tl.range(0, steps, num_stages=LOADED_STAGES):
        units = tl.load(unit_at + step * (TILE * 32))
        x0, x1, x2, x3 = load_step(x_at + step * 128, rows[:, None], width - step * 128 - column, EVEN)
        scale_step = scale_at + step * GROUPS * all_out
        acc = with_step(acc, units, scale_step, all_out, x0, x1, x2, x3, GROUPS, SCALED, ASM)
        if SILU:
            up = tl.load(up_unit_at + step * (TILE * 32))
            up_acc = with_step(
                up_acc, up, scale_step + num_out, all_out, x0, x1, x2, x3, GROUPS, SCALED, ASM
            )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
        place = row
    else:
        acc *= tl.load(pair_weight_ptr + pair, mask=rows, other=0.0)[None, :]
        place = pair
    to_out = out_ptr + place.to(tl.int64)[:, None] * num_out + out[None, :]
    tl.store(to_out, acc.T.to(out_ptr.dtype.element_ty), mask=rows[:, None] & outs[None, :])


@triton.jit
def _few_down_kernel(
    hidden_ptr, words_ptr, scale_ptr, expert_ptr, pair_weight_ptr, out_ptr, expert_outs, num_out, all_out, steps, x_end,
    GROUPS: tl.constexpr, CHOSEN: tl.constexpr, TILE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The sum of a token's experts, each times its weight."""
    token = tl.program_id(1)
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    word = tl.arange(0, BLOCK_S * 16)[None, :]
    step = tl.arange(0, BLOCK_S)[None, :]
    of_experts = ()
    scales = ()
    for place in tl.static_range(CHOSEN):
        # Routing was over when the kernel before this one let it start; it is read past the L1.
        expert = tl.load(expert_ptr + token * CHOSEN + place, cache_modifier=".cg").to(tl.int32)
        o = (expert * expert_outs + out)[:, None].to(tl.int64)
        at = ((o // TILE * steps + word // 16) * TILE + o % TILE) * 16 + word % 16
        words = tl.load(words_ptr + at, mask=(word // 16 < steps) & (o < all_out), other=0)
        of_experts = of_experts + (words,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
        for group in tl.static_range(GROUPS):
            at = scale_ptr + (step * GROUPS + group) * all_out + o
            scale = tl.load(at, mask=(step < steps) & (o < all_out), other=0)
            scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.zeros([BLOCK_O], tl.float32)
    x_at = word // 16 * 64 + word % 16
    for place in tl.static_range(CHOSEN):
        pair = token * CHOSEN + place
        of_pair = tl.zeros([BLOCK_O], tl.float32)
        for group in tl.static_range(GROUPS):
            sums, x_sums = group_sums(
                of_experts[place], hidden_ptr + pair * x_end, x_at, x_end, group * (4 // GROUPS), 4 // GROUPS
            )  # fmt: skip
            of_steps = tl.sum(tl.reshape(sums, [BLOCK_O, BLOCK_S, 16]), axis=2)
            x_of_steps = tl.sum(tl.reshape(x_sums, [1, BLOCK_S, 16]), axis=2)
            scale = scales[place * GROUPS + group]
            zero = (scale & 255).to(tl.float32)  # type: ignore[attr-defined]
            of_pair += tl.sum((of_steps - zero * x_of_steps) * scale_of(scale), axis=1)
        y += of_pair * tl.load(pair_weight_ptr + pair, cache_modifier=".cg")
    tl.store(out_ptr + token * num_out + out, y.to(out_ptr.dtype.element_ty), mask=out < num_out)


def fits_few(x_TD: Tensor, expert_TA: Tensor, gate_up: TiledWeight, down: TiledWeight) -> bool:
    """Whether `few_int4_experts` takes these tokens and weights, and is faster than grouping the tokens.

    Device: looks at shapes and dtypes only, so a captured graph keeps its answer.
    """
    fits = len(x_TD) == 1 and expert_TA.shape[1] <= MOST_CHOSEN and down.units.shape[1] <= MOST_DOWN_STEPS
    return fits and x_TD.dtype is torch.bfloat16 and gate_up.num_columns % 2 == down.num_columns % 2 == 0


def few_int4_experts(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up: TiledWeight, down: TiledWeight
) -> Tensor:  # fmt: skip
    """The sum of each token's experts: (T, D) -> (T, D).

    Device: two launches, no host sync. The weights of the second product and the routing are read before the launch
    before has finished: it must not write them.
    """
    if x_TD.stride(1) != 1 or x_TD.stride(0) % 2 or x_TD.storage_offset() % 2:
        x_TD = x_TD.clone(memory_format=torch.contiguous_format)  # else one row would keep the distance to the next
    expert_TA, weight_TA = expert_TA.contiguous(), weight_TA.contiguous()
    hidden_PF = expert_gates(x_TD, expert_TA, gate_up)
    steps = down.units.shape[1]
    out_TD = torch.empty((len(x_TD), down.num_rows), dtype=x_TD.dtype, device=x_TD.device)
    _few_down_kernel[(cdiv(down.num_rows, FEW_OUTPUTS), len(x_TD))](
        hidden_PF.view(torch.int32), down.units.view(torch.int32), down.scales_GO, expert_TA, weight_TA, out_TD,
        down.num_rows, down.num_rows, down.scales_GO.shape[1], steps, down.num_columns // 2, GROUPS=down.groups,
        CHOSEN=expert_TA.shape[1], TILE=TILE_OUTPUTS, BLOCK_O=FEW_OUTPUTS, BLOCK_S=next_power_of_2(steps), num_warps=4,
        **launch_options(x_TD.device),
    )  # fmt: skip
    return out_TD


def int4_expert_outputs(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up: TiledWeight, down: TiledWeight,
    tilings: tuple[Int4Tiling, Int4Tiling] | None = None,
) -> Tensor:  # fmt: skip
    """Each pair's output times its weight: (T, A, D), contiguous.

    Device: three launches (some more for many pairs), no host sync.
    """
    num_tokens, num_chosen = expert_TA.shape
    num_experts, num_pairs = gate_up.num_experts, expert_TA.numel()
    hidden, inner = down.num_rows, gate_up.num_rows // 2
    assert num_experts is not None
    if not num_pairs:
        return x_TD.new_zeros(num_tokens, num_chosen, hidden)
    first, second = tilings or int4_tilings(num_pairs, num_experts)
    assert first.pairs == second.pairs
    groups = group_by_expert(expert_TA, num_experts, first.pairs)
    listed = (groups.order_P, groups.ends_X, groups.tile_expert_W, groups.tile_row_W, groups.num_tiles_1)
    hidden_PF = torch.empty((num_pairs, inner), dtype=x_TD.dtype, device=x_TD.device)
    out_PD = torch.empty((num_pairs, hidden), dtype=x_TD.dtype, device=x_TD.device)
    weight_TA = weight_TA.contiguous()
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    for x, weight, out, num_out, tiling in (
        (x_TD, gate_up, hidden_PF, inner, first), (hidden_PF, down, out_PD, hidden, second)
    ):  # fmt: skip
        most_tiles = len(groups.tile_expert_W)
        _grouped_kernel[(most_tiles * cdiv(num_out, tiling.outputs),)](
            x, weight.units, weight.scales_GO, weight_TA, out, *listed, x.stride(0), num_chosen, weight.num_rows,
            num_out, weight.scales_GO.shape[1], weight.num_columns, weight.units.shape[1], most_tiles,
            SILU=weight is gate_up, GROUPS=weight.groups, SCALED=tiling.is_scaled,
            EVEN=weight.num_columns % STEP == 0, TILE=TILE_OUTPUTS, GROUP=GROUP_TILES, BLOCK_O=tiling.outputs,
            BLOCK_T=tiling.pairs, LOADED_STAGES=tiling.num_stages,
            ASM=x.device.type == "cuda" and x.dtype is torch.bfloat16, num_warps=tiling.num_warps,
            num_stages=tiling.num_stages, **launch_options(x.device),
        )  # fmt: skip
    return out_PD.view(num_tokens, num_chosen, hidden)
