"""Triton products in which an output's sum is taken in one order, however many rows there are.

The input features of a weight are one part, or a few if it has few outputs: the weight alone says how many. A part is
added up from its first feature to its last, in steps of a fixed depth, into a float32 accumulator, and the parts are
added up in their order: by a program that computes them all, or by the last one to finish of programs that have a part
each, so that a few rows keep the whole card busy. The weight is the left operand, so that 16 rows and 256 take the same
matrix instruction (Hopper's wgmma has the rows as its N, from 8 to 256) and a tile's size only says which rows and
outputs a program has; tests/plugins/test_triton_invariant_bits.py compares all of them bit by bit.
Legend: T rows, D input features, O output features, F half of gate and up.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from hookline.plugins.kernels.products.operands import has_aligned_rows
from hookline.plugins.kernels.products.triton_parts import PartsScratch, leave_part
from hookline.plugins.kernels.products.triton_scales import (
    Scales,
    add_step,
    loadable,
    scaling_arguments,
    scaling_constants,
)
from hookline.plugins.kernels.products.triton_wide import empty_with_room, rows_in_reach
from hookline.plugins.kernels.triton_card import Card, Room, fitting
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, launches_early, next_power_of_2

ONLY_TILE: RowTile | None = None
"""Set to one of FLOAT32_TILES on a card where tiles do not give the same bits: every product then takes this tile."""
FULL = 90
"""Programs that fill a card well enough: a tile so large that fewer are left is slower."""
MOST_ASKED = 6 << 20
"""Most elements of a weight that programs fetch into the L2 before the launch before them has ended."""
GROUP = 8
"""Tiles of outputs that take turns over the rows together, so that rows and weights are read from the L2."""
STEP_BYTES = 128
"""Input features of a step, in bytes of one row: the same for every tile of a weight."""
MOST_PARTS = 4
MOST_CUT = 2048
"""Most outputs of a weight whose input features are cut into parts."""
FEWEST_STEPS = 8
"""Fewest steps of a part: shorter parts cost more to start and add up than they gain."""


@dataclass(frozen=True)
class RowTile:
    """The tile of a program: rows by output features. num_stages: depth of the software pipeline."""

    block_t: int
    block_o: int
    num_warps: int
    num_stages: int

    def number(self, num_rows: int, num_out: int) -> int:
        """Tiles of a product."""
        return int(cdiv(num_rows, self.block_t) * cdiv(num_out, self.block_o))


TILES = (
    RowTile(256, 128, 8, 4),
    RowTile(128, 128, 8, 4),
    RowTile(128, 64, 4, 4),
    RowTile(64, 64, 4, 6),
    RowTile(64, 64, 4, 4),
    RowTile(32, 64, 4, 8),
    RowTile(32, 64, 4, 4),
    RowTile(16, 64, 4, 8),
)
"""Tiles from large to small."""
MOST_ACCUMULATED = 128 * 256
"""Most elements of a tile, gate and up counted twice, that registers hold."""
FLOAT32_TILES = TILES[3:]
"""The tiles that products of every dtype may use, float32 included."""
FEW_ROWS = 32
"""Up to this many rows the smallest tiles read parts fastest; up to twice as many, tiles with many steps under way."""
SMALL_WEIGHT = 8192
"""Up to this many outputs, reading a weight again for another tile of rows is faster than computing rows of padding."""
MOST_APART = 396
"""With more programs of a part each, larger tiles are faster: that is three for a multiprocessor of an H200."""


LARGEST_APART = TILES[2]
"""The largest tile whose parts may have a program each."""


class RowScratch(PartsScratch):
    """Scratch memory for products of which `takes_parts_apart` is true: up to FULL tiles of 128 by 64."""

    @classmethod
    def make(cls, device: torch.device) -> RowScratch:
        """Allocate."""
        largest, smallest = (tile.block_t * tile.block_o for tile in (LARGEST_APART, TILES[-1]))
        return cls.allocate(device, FULL * MOST_PARTS * largest, FULL * largest // smallest)


def weight_parts(num_out: int, width: int, itemsize: int) -> int:
    """Number of parts of a weight's input features; it depends on the weight alone."""
    if num_out > MOST_CUT:
        return 1
    return max(1, min(MOST_PARTS, int(cdiv(width, STEP_BYTES // itemsize)) // FEWEST_STEPS))


def takes_parts_apart(num_rows: int, num_out: int) -> bool:
    """Whether a product of several parts has a program for each: where one for all of them would leave a card idle."""
    return LARGEST_APART.number(num_rows, num_out) < FULL


def row_tiles(num_operands: int, dtype: torch.dtype, *, is_apart: bool = False) -> list[RowTile]:
    """The tiles for such a product, from large to small: its choice may be among these.

    num_operands: accumulators of a program: 2 for gate and up, and for several parts, else 1. is_apart: a program has a
    part.
    """
    most = LARGEST_APART.block_t * LARGEST_APART.block_o if is_apart else MOST_ACCUMULATED // num_operands
    tiles = FLOAT32_TILES if dtype == torch.float32 else TILES
    return [tile for tile in tiles if tile.block_t * tile.block_o <= most]


def row_tile(num_rows: int, num_out: int, num_operands: int, dtype: torch.dtype) -> RowTile:
    """The largest tile that still fills the card and has little padding; the fastest on an H200 (docs/log)."""
    tiles = row_tiles(num_operands, dtype)
    if ONLY_TILE is not None:
        return ONLY_TILE
    is_small = num_rows <= 128
    most_padding = 64 if 128 < num_rows <= 256 and num_operands == 1 and num_out <= SMALL_WEIGHT else 256
    for tile in tiles:
        if tile.block_t == 64 and (tile.num_stages > 4) != (is_small and num_operands == 1):
            continue
        if is_small and tile.block_t == tile.block_o == 128:  # its weight is read more slowly
            continue
        padding = -num_rows % tile.block_t
        fits = tile.block_t <= max(16, next_power_of_2(num_rows)) and padding < most_padding
        if fits and tile.number(num_rows, num_out) >= FULL:
            return tile
    return tiles[-1]


def apart_tile(num_rows: int, num_out: int, parts: int, dtype: torch.dtype) -> RowTile:
    """The tile for programs of a part each; the fastest on an H200 (docs/log)."""
    *_, deep, shallow, smallest = tiles = row_tiles(1, dtype, is_apart=True)
    if ONLY_TILE is not None:
        return ONLY_TILE
    if num_rows <= FEW_ROWS:
        return smallest
    if num_rows <= 2 * FEW_ROWS:
        return deep
    return shallow if shallow.number(num_rows, num_out) * parts <= MOST_APART else tiles[0]


@cache
def fitting_row_tile(tile: RowTile, num_weights: int, card: Card) -> RowTile:
    """This tile with as many stages as the card has room for, else the largest smaller tile that fits the card.

    num_weights: tiles of a weight that a step takes, 2 for gate and up.
    Raises: ConfigError if not even the smallest tile fits.
    """

    def room(one: RowTile) -> Room:
        return Room((one.block_t + one.block_o * num_weights) * STEP_BYTES)

    smaller = [one for one in TILES if one.block_t <= tile.block_t and one.block_o <= tile.block_o]
    return fitting([tile, *smaller], room, card, "a batch-invariant product")


@triton.jit
def _ask_for_weight(weight_ptr, first_out, num_outs, width, weight_stride, used, BLOCK_O: tl.constexpr):
    """Fetch these rows of a weight into the L2, in halves: by as many threads as there are halves."""
    half = tl.arange(0, 2 * BLOCK_O)
    out = first_out + half // 2
    address = weight_ptr + out.to(tl.int64) * weight_stride + half % 2 * (width // 2)
    num_bytes = tl.zeros([2 * BLOCK_O], tl.int32) + width  # of half a row of 16-bit numbers
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r", [address.to(tl.int64, bitcast=True), (used & (out < num_outs)).to(tl.int32), num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _added_up(
    first, last, x, weight, first_row, first_out, rows, outs, num_out, width, x_stride, weight_stride,
    scale_ptr, zero_ptr, scale_stride, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    LOADED_STAGES: tl.constexpr, SILU: tl.constexpr, COPIED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum up these steps of the input features, from zero: (sums, sums of the up half with SILU)."""
    row, out = first_row + tl.arange(0, BLOCK_T), first_out + tl.arange(0, BLOCK_O)
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    up_acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=LOADED_STAGES):
        if COPIED:  # by the copy engine; beyond the operands it gives zeros
            x_TD = x.load([first_row, step * BLOCK_D])
            weight_OD = weight.load([first_out, step * BLOCK_D // PACKED])
            if SILU:
                up_OD = weight.load([first_out + num_out, step * BLOCK_D // PACKED])
        else:
            column = step * BLOCK_D + tl.arange(0, BLOCK_D)
            columns = column < width
            x_at = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
            if PACKED == 1:
                stored, stored_columns = column, columns
            else:
                stored = step * BLOCK_D // PACKED + tl.arange(0, BLOCK_D // PACKED)
                stored_columns = stored * PACKED < width
            weight_at = weight + out.to(tl.int64)[:, None] * weight_stride + stored[None, :]
            x_TD = tl.load(x_at, mask=rows[:, None] & columns[None, :], other=0.0)
            weight_OD = tl.load(weight_at, mask=outs[:, None] & stored_columns[None, :], other=0.0)
            if SILU:
                up_at = weight_at + num_out * weight_stride
                up_OD = tl.load(up_at, mask=outs[:, None] & stored_columns[None, :], other=0.0)
        acc = add_step(
            acc, weight_OD, x_TD, 1.0, scale_ptr, zero_ptr, scale_stride, out, outs, step * BLOCK_D,
            SCALE_ROWS, SCALE_COLUMNS, PACKED, False, PRECISION,
        )  # fmt: skip
        if SILU:
            up_acc = add_step(
                up_acc, up_OD, x_TD, 1.0, scale_ptr, zero_ptr, scale_stride, out + num_out, outs, step * BLOCK_D,
                SCALE_ROWS, SCALE_COLUMNS, PACKED, False, PRECISION,
            )  # fmt: skip
    return acc, up_acc


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _row_product_kernel(
    x, weight, weight_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, num_rows, num_out, width, steps, x_stride,
    weight_stride: tl.int64, scale_ptr, zero_ptr, scale_stride, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr, LOADED_STAGES: tl.constexpr, PARTS: tl.constexpr, APART: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, ASK: tl.constexpr, COPIED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute all parts of a tile; with APART only one part, and the last program of a tile adds them up."""
    if ASK:
        gdc_launch_dependents()
    num_row_tiles, num_out_tiles = tl.cdiv(num_rows, BLOCK_T), tl.cdiv(num_out, BLOCK_O)
    group = tl.program_id(0) // (GROUP * num_row_tiles)
    inside = tl.program_id(0) % (GROUP * num_row_tiles)
    size = tl.minimum(num_out_tiles - group * GROUP, GROUP)
    first_out = (group * GROUP + inside % size) * BLOCK_O
    first_row = inside // size * BLOCK_T
    part = tl.program_id(1)
    row, out = first_row + tl.arange(0, BLOCK_T), first_out + tl.arange(0, BLOCK_O)
    rows, outs = row < num_rows, out < num_out
    bias = tl.zeros([BLOCK_O], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + out, mask=outs, other=0.0).to(tl.float32)
    if ASK:
        is_first = (first_row == 0) & (part == 0)
        _ask_for_weight(weight_ptr, first_out, num_out, width, weight_stride, is_first, BLOCK_O)
        if SILU:
            ups = first_out + num_out
            _ask_for_weight(weight_ptr, ups, 2 * num_out, width, weight_stride, is_first, BLOCK_O)
    if PDL:
        gdc_wait()
    if PARTS == 1 or APART:
        acc, up_acc = _added_up(
            part * steps // PARTS, (part + 1) * steps // PARTS, x, weight, first_row, first_out, rows, outs, num_out,
            width, x_stride, weight_stride, scale_ptr, zero_ptr, scale_stride, SCALE_ROWS, SCALE_COLUMNS, PACKED,
            LOADED_STAGES, SILU, COPIED, PRECISION, BLOCK_T, BLOCK_O, BLOCK_D,
        )  # fmt: skip
    else:
        acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
        for one in range(PARTS):
            part_acc, up_acc = _added_up(
                one * steps // PARTS, (one + 1) * steps // PARTS, x, weight, first_row, first_out, rows, outs, num_out,
                width, x_stride, weight_stride, scale_ptr, zero_ptr, scale_stride, SCALE_ROWS, SCALE_COLUMNS, PACKED,
            LOADED_STAGES, SILU, COPIED, PRECISION, BLOCK_T, BLOCK_O, BLOCK_D,
            )  # fmt: skip
            acc += part_acc
    if PDL and not ASK:
        gdc_launch_dependents()  # not before: the next kernel's programs would take the places of this one's
    is_last = True
    if APART:
        place = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        parts_ptr = partials_ptr + tl.program_id(0) * PARTS * BLOCK_O * BLOCK_T + place
        at = parts_ptr + part * BLOCK_O * BLOCK_T
        is_last = leave_part(acc, at, counters_ptr + tl.program_id(0), PARTS)
        if is_last:
            acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
            for one in tl.static_range(PARTS):
                acc += tl.load(parts_ptr + one * BLOCK_O * BLOCK_T, cache_modifier=".cg")
    if is_last:
        if SCALE_ROWS and not SCALE_COLUMNS:
            acc *= tl.load(scale_ptr + out // SCALE_ROWS, mask=outs, other=0.0)[:, None]
            if SILU:
                up_acc *= tl.load(scale_ptr + (out + num_out) // SCALE_ROWS, mask=outs, other=0.0)[:, None]
        if BIAS:
            acc += bias[:, None]
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc)) * up_acc
        to_out = out_ptr + row.to(tl.int64)[:, None] * num_out + out[None, :]
        tl.store(to_out, acc.to(out_ptr.dtype.element_ty).T, mask=rows[:, None] & outs[None, :])


def row_product(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, *, silu: bool = False, tile: RowTile | None = None,
    scratch: RowScratch | None = None, scales: Scales | None = None,
) -> Tensor:  # fmt: skip
    """x @ W.T + b, or silu(first half of x @ W.T) * second half, which takes no bias.

    scales: of a weight in e4m3, int8 or int4.
    tile: one of `row_tiles` in place of the chosen tile; it changes no bit. scratch: lets few rows have a program for
    each part, which changes no bit either; the tile is then for programs of one part.
    Shapes: (T, D) -> (T, O), or (T, O / 2) with silu.
    Device: one launch, and a copy of rows that do not lie as the copy engine wants them; no host sync.
    """
    assert bias_O is None or not silu
    (num_rows, width), num_out = x_TD.shape, len(weight_OD) // (2 if silu else 1)
    if not num_rows:
        return x_TD.new_empty(0, num_out)
    is_copied = _is_copied(weight_OD)
    if x_TD.stride(1) != 1 or (is_copied and not has_aligned_rows(x_TD)):
        x_TD = x_TD.clone(memory_format=torch.contiguous_format)
    weight_OD = weight_OD if scales is None else loadable(weight_OD)
    weight_OD = weight_OD if weight_OD.stride(1) == 1 else weight_OD.contiguous()
    parts = 1 if silu else weight_parts(num_out, width, x_TD.element_size())
    is_apart = parts > 1 and scratch is not None and takes_parts_apart(num_rows, num_out)
    if tile is None and is_apart:
        tile = apart_tile(num_rows, num_out, parts, x_TD.dtype)
    elif tile is None:
        tile = row_tile(num_rows, num_out, 2 if silu or parts > 1 else 1, x_TD.dtype)
    tile = fitting_row_tile(tile, 2 if silu else 1, Card.of(x_TD.device))
    assert not is_apart or tile.block_t * tile.block_o <= LARGEST_APART.block_t * LARGEST_APART.block_o
    block_d, packed = STEP_BYTES // x_TD.element_size(), 1
    if scales is not None:
        block_d, packed = min(block_d, scales.columns or block_d), scales.packed
    x, weight = x_TD, weight_OD
    if is_copied:
        reach = min(rows_in_reach(x_TD), cdiv(num_rows, tile.block_t) * tile.block_t)
        x = TensorDescriptor(x_TD, [reach, width], list(x_TD.stride()), [tile.block_t, block_d])
        weight_block = [tile.block_o, block_d // packed]
        weight = TensorDescriptor(weight_OD, list(weight_OD.shape), list(weight_OD.stride()), weight_block)
    out = empty_with_room(num_rows, num_out, like=x_TD)
    partials, counters = (out, out) if scratch is None else (scratch.partials, scratch.counters)
    _row_product_kernel[(tile.number(num_rows, num_out), parts if is_apart else 1)](
        x, weight, weight_OD, weight_OD if bias_O is None else bias_O, out, partials, counters, num_rows, num_out,
        width, cdiv(width, block_d), x_TD.stride(0), weight_OD.stride(0), *scaling_arguments(scales),
        **scaling_constants(scales), LOADED_STAGES=tile.num_stages if scales is not None and scales.columns else None,
        PARTS=parts, APART=is_apart,
        BIAS=bias_O is not None, SILU=silu,
        ASK=_asks_early(weight_OD), COPIED=is_copied, PRECISION="ieee" if x_TD.dtype == torch.float32 else "tf32",
        BLOCK_T=tile.block_t, BLOCK_O=tile.block_o, BLOCK_D=block_d, GROUP=GROUP,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(x_TD.device),
    )  # fmt: skip
    return out


def _is_copied(weight_OD: Tensor) -> bool:
    """Whether tiles come by the copy engine: by the weight and the card alone, so that every batch takes one way."""
    row_bytes = weight_OD.shape[1] * weight_OD.element_size()
    if weight_OD.element_size() > 2 or row_bytes % 16 or not has_aligned_rows(weight_OD):
        return False
    return weight_OD.device.type == "cpu" or launches_early(weight_OD.device)


def _asks_early(weight_OD: Tensor) -> bool:
    """Whether programs ask for their part of the weight before they wait: only if all of the weight fits the L2."""
    is_small = weight_OD.numel() <= MOST_ASKED and weight_OD.shape[1] % 16 == 0 and weight_OD.element_size() == 2
    return is_small and has_aligned_rows(weight_OD) and launches_early(weight_OD.device)
