"""Products of two and more rows with a weight as triton_tiled.py stores it, which is unpacked in registers.

Programs of one tile of outputs and several tiles of rows are neighbours, so that the weight comes from memory once.
A value is multiplied by its scale before it is summed, and its offset is added, both in the rows' dtype, as where a
weight is dequantised: sums of groups would take as many registers again as the sums of all groups, and a wait for each.
Needs a Hopper card: rows come by its copy engine.
Legend: T rows, O output features, D input features, F half of gate and up.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from hookline.plugins.kernels.products.operands import has_aligned_rows
from hookline.plugins.kernels.products.triton_parts import PartsScratch, leave_part
from hookline.plugins.kernels.products.triton_tiled import STEP, TILE_OUTPUTS, TiledWeight, scaled_step, units_at
from hookline.plugins.kernels.products.triton_wide import rows_in_reach
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, next_power_of_2

MOST_ROWS = 512
"""Most rows of these products; products of more rows are faster with the weight in the rows' dtype."""
FULL_CARD = 132
"""Multiprocessors of an H200."""
MOST_PARTS = 4
MANY_OUTPUTS = 16384
"""Number of outputs from which on tiles of many outputs fill the card."""
LONG_INPUTS = 8192
"""Number of inputs from which on cutting them into parts is worth the sums of large tiles."""


@dataclass(frozen=True)
class RowsTiling:
    """Outputs and rows of a program, steps under way, warps, and how many programs run at once on a multiprocessor."""

    block_o: int
    block_t: int
    num_stages: int
    num_warps: int
    at_once: int


class TiledScratch(PartsScratch):
    """Scratch memory for the parts of these products, for as many programs as run at once."""

    @classmethod
    def make(cls, device: torch.device) -> TiledScratch:
        """Allocate."""
        return cls.allocate(device, FULL_CARD * 128 * 256, 4 * FULL_CARD)


def rows_tiling(num_rows: int, num_out: int, width: int, bits: int, *, silu: bool = False) -> RowsTiling:
    """The fastest of several tilings on an H200 at an 8B model's shapes, or near it (docs/log)."""
    if num_rows <= 64:
        block_t = max(16, next_power_of_2(num_rows))
        if silu:
            return RowsTiling(64, block_t, 3, 4, 3)
        num_stages = 4 if num_rows <= 32 else 3
        large, small = RowsTiling(128, block_t, num_stages, 4, 2), RowsTiling(64, block_t, num_stages, 4, 3)
        return large if _share_of_card(large, num_out) >= _share_of_card(small, num_out) else small
    if num_rows <= 256 and num_out >= MANY_OUTPUTS:
        return RowsTiling(256, 128, 3, 8, 1)
    if num_rows <= 128 and (bits == 4 or width < LONG_INPUTS):
        return RowsTiling(64, 128, 3, 4, 2)
    return RowsTiling(128, 128, 4, 8, 1)


def _share_of_card(cut: RowsTiling, num_out: int) -> float:
    """How much of the card works, if each multiprocessor has as many programs of one tile of rows as the busiest."""
    tiles = cdiv(num_out, cut.block_o)
    num_programs = tiles * max(1, min(MOST_PARTS, cut.at_once * FULL_CARD // tiles))
    return num_programs / (cdiv(num_programs, FULL_CARD) * FULL_CARD)


def fuses_silu(num_rows: int, weight: TiledWeight) -> bool:
    """Whether programs that have the accumulators of gate and up are faster than a product and SiLU apart."""
    return num_rows <= (64 if weight.bits == 4 else 16)


def fits_rows(x_TD: Tensor) -> bool:
    """Whether `tiled_product` takes these rows; else the weight is dequantised.

    Device: looks at shape, strides, address and dtype only, so a captured graph keeps its answer.
    """
    is_many = x_TD.dim() == 2 and 0 < len(x_TD) <= MOST_ROWS
    return is_many and x_TD.element_size() == 2 and has_aligned_rows(x_TD)


@triton.jit
def unknown_zeros(zeros):
    """Zeros that the assembler does not know as such: it lets no matrix instructions overlap if it can write constants
    into their accumulator (its message C7515).
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [zeros], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_desc, units_ptr, scale_ptr, offset_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, num_rows, num_out, all_out,
    steps, BIAS: tl.constexpr, SILU: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, LOADED_STAGES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # The last tile of rows begins early: the copy engine is slow with tiles that end beyond the rows. What two programs
    # compute has the same bits.
    first_row = tl.minimum(tl.program_id(0) * BLOCK_T, tl.maximum(num_rows - BLOCK_T, 0))
    tile = tl.program_id(1)
    part = tl.program_id(2)
    row = first_row + tl.arange(0, BLOCK_T)
    out = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    stored = tl.where(out < num_out, out, 0)
    STEP_UNITS: tl.constexpr = TILE * 8 * BITS
    unit_at = units_ptr + units_at(stored, steps, TILE, BITS)[:, None] + tl.arange(0, 32)[None, :]
    scale_at = scale_ptr + stored
    up_unit_at = unit_at
    if SILU:
        up_unit_at = units_ptr + units_at(stored + num_out, steps, TILE, BITS)[:, None] + tl.arange(0, 32)[None, :]
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    up_acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    if ASM:
        acc = unknown_zeros(acc)
        if SILU:
            up_acc = unknown_zeros(up_acc)
    for step in tl.range(part * steps // PARTS, (part + 1) * steps // PARTS, num_stages=LOADED_STAGES):
        x = x_desc.load([first_row, step * 128])
        scale_step = scale_at + step * GROUPS * all_out
        offset_step = None
        if offset_ptr is not None:
            offset_step = offset_ptr + stored + step * 2 * all_out
        weight = scaled_step(
            unit_at + step * STEP_UNITS, scale_step, offset_step, all_out, GROUPS, BITS, TILE, ASM, x.dtype
        )
        acc = tl.dot(weight, x.T, acc)
        if SILU:
            if offset_ptr is not None:
                offset_step += num_out
            up = scaled_step(
                up_unit_at + step * STEP_UNITS, scale_step + num_out, offset_step, all_out, GROUPS, BITS, TILE, ASM,
                x.dtype,
            )  # fmt: skip
            up_acc = tl.dot(up, x.T, up_acc)
    if PDL:
        gdc_launch_dependents()
    is_last = True
    if PARTS > 1:
        of_all = tile * tl.num_programs(0) + tl.program_id(0)
        place = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        parts_ptr = partials_ptr + of_all * PARTS * BLOCK_O * BLOCK_T + place
        is_last = leave_part(acc, parts_ptr + part * BLOCK_O * BLOCK_T, counters_ptr + of_all, PARTS)
        if is_last:
            acc = tl.load(parts_ptr, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                acc += tl.load(parts_ptr + other * BLOCK_O * BLOCK_T, cache_modifier=".cg")
    if is_last:
        if BIAS:
            acc += tl.load(bias_ptr + out, mask=out < num_out, other=0.0).to(tl.float32)[:, None]
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc)) * up_acc
        to_out = out_ptr + row.to(tl.int64)[:, None] * num_out + out[None, :]
        inside = (row < num_rows)[:, None] & (out < num_out)[None, :]
        tl.store(to_out, acc.T.to(out_ptr.dtype.element_ty), mask=inside)


def tiled_product(
    x_TD: Tensor, weight: TiledWeight, bias_O: Tensor | None, scratch: PartsScratch, tiling: RowsTiling | None = None,
    *, silu: bool = False,
) -> Tensor:  # fmt: skip
    """x @ W.T + b for rows that `fits_rows`; with `silu`, silu(its first half) * its second half, which takes no bias.

    Shapes: (T, D) -> (T, O), or (T, O / 2) with silu.
    Device: one launch, no host sync.
    """
    assert bias_O is None or not silu
    (num_rows, width), num_out = x_TD.shape, weight.num_rows // (2 if silu else 1)
    cut = tiling or rows_tiling(num_rows, num_out, width, weight.bits, silu=silu)
    steps, all_out = weight.units.shape[1], weight.scales_GO.shape[1]
    out_TO = torch.empty((num_rows, num_out), dtype=x_TD.dtype, device=x_TD.device)
    blocks, tiles = cdiv(num_rows, cut.block_t), cdiv(num_out, cut.block_o)
    room = min(cut.at_once * FULL_CARD, scratch.partials.numel() // (cut.block_o * cut.block_t))
    parts = 1 if silu else max(1, min(MOST_PARTS, room // (blocks * tiles), steps))
    reach = max(num_rows, min(rows_in_reach(x_TD), cut.block_t))
    x_desc = TensorDescriptor(x_TD, [reach, width], list(x_TD.stride()), [cut.block_t, STEP])
    _rows_kernel[(blocks, tiles, parts)](
        x_desc, weight.units, weight.scales_GO, weight.offsets_PO, weight.scales_GO if bias_O is None else bias_O,
        out_TO, scratch.partials, scratch.counters, num_rows, num_out, all_out, steps,
        BIAS=bias_O is not None, SILU=silu, GROUPS=weight.groups, BITS=weight.bits, PARTS=parts, TILE=TILE_OUTPUTS,
        BLOCK_O=cut.block_o, BLOCK_T=cut.block_t, LOADED_STAGES=cut.num_stages,
        ASM=x_TD.device.type == "cuda" and x_TD.dtype is torch.bfloat16, num_warps=cut.num_warps,
        num_stages=cut.num_stages, **launch_options(x_TD.device),
    )  # fmt: skip
    return out_TO
