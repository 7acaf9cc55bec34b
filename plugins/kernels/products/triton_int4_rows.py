"""Products of many rows with a weight in int4 as triton_int4.py stores it, which is unpacked in registers.

Programs of one tile of outputs and several tiles of rows are neighbours, so that the weight comes from memory once.
A value is multiplied by its scale before it is summed, both in the rows' dtype, as where a weight is dequantised: sums
of groups would take as many registers again as the sums of all groups. Needs a Hopper card: rows come by its copy
engine.
Legend: T rows, O output features, D input features.
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
from hookline.plugins.kernels.products.triton_int4 import TILE_OUTPUTS, TiledInt4, units_at, with_step
from hookline.plugins.kernels.products.triton_parts import PartsScratch, leave_part
from hookline.plugins.kernels.products.triton_wide import rows_in_reach
from hookline.plugins.kernels.triton_launch import cdiv, launch_options

MOST_ROWS = 256
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


class Int4Scratch(PartsScratch):
    """Scratch memory for the parts of products with weights in int4, for as many programs as run at once."""

    @classmethod
    def make(cls, device: torch.device) -> Int4Scratch:
        """Allocate."""
        return cls.allocate(device, FULL_CARD * 128 * 256, 4 * FULL_CARD)


def rows_tiling(num_rows: int, num_out: int, width: int) -> RowsTiling:
    """The fastest tiling on an H200 at Qwen3-8B's shapes (docs/log)."""
    if num_out >= MANY_OUTPUTS:
        return RowsTiling(256, 128, 4, 8, 1) if num_rows <= 128 else RowsTiling(128, 128, 4, 8, 1)
    if width >= LONG_INPUTS and num_rows > 128:
        return RowsTiling(128, 256, 3, 8, 1)
    return RowsTiling(64, 128, 3, 4, 2)


def fits_rows(x_TD: Tensor) -> bool:
    """Whether `rows_of_int4` takes these rows; else the weight is dequantised.

    Device: looks at shape, strides, address and dtype only, so a captured graph keeps its answer.
    """
    is_many = x_TD.dim() == 2 and 0 < len(x_TD) <= MOST_ROWS
    return is_many and x_TD.element_size() == 2 and has_aligned_rows(x_TD)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_desc, units_ptr, scale_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, num_rows, num_out, all_out, steps,
    BIAS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr, LOADED_STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The last tile of rows begins early: the copy engine is slow with tiles that end beyond the rows. What two programs
    # compute has the same bits.
    first_row = tl.minimum(tl.program_id(0) * BLOCK_T, tl.maximum(num_rows - BLOCK_T, 0))
    tile = tl.program_id(1)
    part = tl.program_id(2)
    row = first_row + tl.arange(0, BLOCK_T)
    out = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    stored = tl.where(out < all_out, out, 0)
    unit_at = units_ptr + units_at(stored, steps, TILE)[:, None] + tl.arange(0, 32)[None, :]
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for step in tl.range(part * steps // PARTS, (part + 1) * steps // PARTS, num_stages=LOADED_STAGES):
        units = tl.load(unit_at + step * (TILE * 32))
        x0 = x_desc.load([first_row, step * 128])
        x1 = x_desc.load([first_row, step * 128 + 32])
        x2 = x_desc.load([first_row, step * 128 + 64])
        x3 = x_desc.load([first_row, step * 128 + 96])
        scale_at = scale_ptr + step * GROUPS * all_out + stored
        acc = with_step(acc, units, scale_at, all_out, x0, x1, x2, x3, GROUPS, True, ASM)
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
        to_out = out_ptr + row.to(tl.int64)[:, None] * num_out + out[None, :]
        inside = (row < num_rows)[:, None] & (out < num_out)[None, :]
        tl.store(to_out, acc.T.to(out_ptr.dtype.element_ty), mask=inside)


def rows_of_int4(
    x_TD: Tensor, weight: TiledInt4, bias_O: Tensor | None, scratch: PartsScratch, tiling: RowsTiling | None = None
) -> Tensor:
    """x @ W.T + b for rows that `fits_rows`: (T, D) -> (T, O).

    Device: one launch, no host sync.
    """
    (num_rows, width), num_out = x_TD.shape, weight.num_rows
    cut = tiling or rows_tiling(num_rows, num_out, width)
    steps, all_out = weight.units.shape[1], weight.scales_GO.shape[1]
    out_TO = torch.empty((num_rows, num_out), dtype=x_TD.dtype, device=x_TD.device)
    blocks, tiles = cdiv(num_rows, cut.block_t), cdiv(num_out, cut.block_o)
    room = min(cut.at_once * FULL_CARD, scratch.partials.numel() // (cut.block_o * cut.block_t))
    parts = max(1, min(MOST_PARTS, room // (blocks * tiles), steps))
    reach = max(num_rows, min(rows_in_reach(x_TD), cut.block_t))
    x_desc = TensorDescriptor(x_TD, [reach, width], list(x_TD.stride()), [cut.block_t, 32])
    _rows_kernel[(blocks, tiles, parts)](
        x_desc, weight.units, weight.scales_GO, weight.scales_GO if bias_O is None else bias_O, out_TO,
        scratch.partials, scratch.counters, num_rows, num_out, all_out, steps,
        BIAS=bias_O is not None, GROUPS=weight.groups, PARTS=parts, TILE=TILE_OUTPUTS, BLOCK_O=cut.block_o,
        BLOCK_T=cut.block_t, LOADED_STAGES=cut.num_stages,
        ASM=x_TD.device.type == "cuda" and x_TD.dtype is torch.bfloat16, num_warps=cut.num_warps,
        num_stages=cut.num_stages, **launch_options(x_TD.device),
    )  # fmt: skip
    return out_TO
