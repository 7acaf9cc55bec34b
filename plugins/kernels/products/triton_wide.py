"""Triton products of up to 128 rows with the weight matrices of a large model, for its decode steps.

Such a product lasts as long as its weight takes to come from memory, so it has a program on every multiprocessor with
as much of the weight under way as shared memory holds. A weight with few output features is cut along its input
features too, and the last program of a tile to finish adds up the parts, in their order. The weight is the left
operand: its many output features then fill the matrix unit, and few rows waste nothing. Accumulation is float32. Needs
a Hopper card: tiles come by its copy engine. A product that ranks sum up may send its tiles to them as it ends.

A weight in e4m3 is half as long on its way, and is widened in registers, or not at all: then the rows are rounded to
e4m3 too, in programs, step by step with a scale for each row and step, or before, with one for each row.
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

from hookline.plugins.kernels.peer_memory.triton_slots import Sends, send_tile, sending_arguments, sending_constants
from hookline.plugins.kernels.products.operands import has_aligned_rows
from hookline.plugins.kernels.products.triton_parts import PartsScratch, leave_part
from hookline.plugins.kernels.products.triton_product import DTYPES, MAX_WEIGHT, Kind
from hookline.plugins.kernels.products.triton_scales import (
    Scales,
    add_step,
    rounded,
    scaling_arguments,
    scaling_constants,
)
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, launches_early, next_power_of_2

MAX_ROWS = 128
FEW_ROWS = 32
"""Up to this many rows, a weight of any width is read faster than by the general product."""
FULL_CARD = 132
"""Programs that run at once, one a multiprocessor (H200)."""
MIN_PROGRAMS = 76
"""Fewest programs that read as fast as memory delivers."""
MAX_PARTS = 4
MIN_STEPS = 8
"""Fewest steps of a part: shorter ones cost more to start and add up than they gain."""
SHARED_BYTES = 224 << 10
"""Shared memory of a multiprocessor for the tiles under way of all its programs."""
SCALED_SHARED_BYTES = 220 << 10
"""Shared memory for the tiles under way of a product with a weight in e4m3."""
MOST_STAGES = 10
MAX_SHARED_TILE = 64 * 64
"""Most elements of a tile that is cut into parts."""


@dataclass(frozen=True)
class WideTiling:
    """How a product is cut: rows and output features of a program, input features of a step, parts, pipelining."""

    block_t: int
    block_o: int
    block_d: int
    num_stages: int
    num_warps: int = 4
    parts: int = 1


class WideScratch(PartsScratch):
    """Scratch memory for the parts of wide products."""

    @classmethod
    def make(cls, device: torch.device) -> WideScratch:
        """Allocate."""
        return cls.allocate(device, FULL_CARD * MAX_SHARED_TILE, FULL_CARD)


def wide_tiling(kind: Kind, num_rows: int, num_out: int, width: int, *, sends: bool = False) -> WideTiling | None:
    """The fastest tiling on an H200 at Qwen3-32B's and 8B's shapes (docs/log); None if the general product is faster.

    sends: tiles go to the ranks that sum them up, which makes up for a slower product.
    """
    block_t = _tile_rows(num_rows)
    num_tiles = cdiv(num_out, 64)
    if kind is Kind.SILU:
        is_narrow = num_tiles <= FULL_CARD
        if block_t <= FEW_ROWS:
            return _filling(block_t, 64 if num_out < 96 * 128 else 128, 128, num_out, operands=2)
        if block_t <= 64:
            return _filling(block_t, 64, 128 if is_narrow else 64, num_out, operands=2)
        if is_narrow and num_rows <= 104:  # too much of the tile would be padding
            return None
        return _filling(block_t, 64 if is_narrow else 128, 64, num_out, operands=2)
    most_rows = most_sending_rows(width) if sends else 64 if width >= 4096 else FEW_ROWS
    if kind is not Kind.PLAIN or block_t > most_rows or num_tiles > 2 * FULL_CARD:
        return None
    parts = 1
    if num_tiles < MIN_PROGRAMS and block_t * 64 <= MAX_SHARED_TILE:
        parts = max(1, min(FULL_CARD // num_tiles, MAX_PARTS, cdiv(width, 128) // MIN_STEPS))
    return _filling(block_t, 64, 128, num_out, parts=parts)


def most_sending_rows(width: int) -> int:
    """Most rows for which a product that sends its tiles, with the sum after it, is faster than a general one."""
    return 128 if width <= 2048 else 64


def _filling(
    block_t: int, block_o: int, block_d: int, num_out: int, *, operands: int = 1, parts: int = 1
) -> WideTiling | None:
    """The tiling with as many stages as fit for one or two programs a multiprocessor; None if too few programs read.

    operands: tiles of the weight that a step takes.
    """
    num_programs = cdiv(num_out, block_o) * parts
    if num_programs < MIN_PROGRAMS:
        return None
    step_bytes = (block_o * operands + block_t) * block_d * 2
    at_once = 1 if num_programs <= FULL_CARD or SHARED_BYTES // 2 // step_bytes < 3 else 2
    num_stages = min(MOST_STAGES, SHARED_BYTES // at_once // step_bytes)
    num_warps = 8 if block_t * block_o * operands > 128 * 128 else 4
    return WideTiling(block_t, block_o, block_d, num_stages, num_warps, parts)


def _tile_rows(num_rows: int) -> int:
    return int(max(16, next_power_of_2(num_rows)))


def empty_with_room(num_rows: int, *sizes: int, like: Tensor) -> Tensor:
    """Uninitialised rows for a wide product to take, (num_rows, *sizes), in memory of a whole tile of them.

    The copy engine takes up to twice as long for a tile that ends beyond its tensor (docs/log).
    """
    has_room = num_rows <= MAX_ROWS and like.is_cuda  # the interpreter would warn of uninitialised memory
    rows = _tile_rows(num_rows) if has_room else num_rows
    return torch.empty((rows, *sizes), dtype=like.dtype, device=like.device)[:num_rows]


def rows_in_reach(x_TD: Tensor) -> int:
    """Rows that x would have if it extended to the end of its memory; the values of the further rows do not matter."""
    last = x_TD.untyped_storage().nbytes() // x_TD.element_size() - x_TD.storage_offset() - x_TD.shape[1]
    return last // x_TD.stride(0) + 1


@cache
def has_room(device: torch.device) -> bool:
    """Whether a program may have as much shared memory; the interpreter has no limit."""
    return device.type != "cuda" or (launches_early(device) and Card.of(device).shared_memory_bytes > SHARED_BYTES)


def fitting_wide_tiling(kind: Kind, x_TD: Tensor, weight_OD: Tensor, *, sends: bool = False) -> WideTiling | None:
    """The tiling for these rows and weight, or None if another product takes them; `sends` as in `wide_tiling`.

    Device: looks at shapes, strides, addresses and dtypes only, so a captured graph keeps its answer.
    """
    if x_TD.dim() != 2 or not 0 < len(x_TD) <= MAX_ROWS or x_TD.dtype not in DTYPES or x_TD.dtype != weight_OD.dtype:
        return None
    if weight_OD.numel() <= MAX_WEIGHT or not has_room(x_TD.device):
        return None
    if not has_aligned_rows(x_TD) or not has_aligned_rows(weight_OD):
        return None
    num_out = weight_OD.shape[0] // (2 if kind is Kind.SILU else 1)
    return wide_tiling(kind, len(x_TD), num_out, weight_OD.shape[1], sends=sends)


@triton.jit(do_not_specialize=["num_rows", "rank", "x_scale_stride", "out_scale_stride"])
def _wide_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, partials_ptr, counters_ptr, addresses, counts, rank, num_rows, num_out,
    scale_ptr, zero_ptr, scale_stride, x_scale_ptr, x_scale_stride, out_scale_ptr, out_scale_stride,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    X_COLUMNS: tl.constexpr, ROUND: tl.constexpr, LOADED_STAGES: tl.constexpr,
    STEPS: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    SEND: tl.constexpr, SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr, PART: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first_out = tile * BLOCK_O
    first = part * STEPS // PARTS
    last = (part + 1) * STEPS // PARTS
    row = tl.arange(0, BLOCK_T)
    out = first_out + tl.arange(0, BLOCK_O)
    bias = tl.zeros([BLOCK_O], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + out, mask=out < num_out, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    up_acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=LOADED_STAGES):
        x = x_desc.load([0, step * BLOCK_D])
        unit = 1.0
        if ROUND:
            x, unit = rounded(x)
            unit = unit[None, :]
        if X_COLUMNS:
            x_group = step * BLOCK_D // X_COLUMNS
            unit = tl.load(x_scale_ptr + x_group * x_scale_stride + row, mask=row < num_rows, other=0.0)[None, :]
        weight = weight_desc.load([first_out, step * BLOCK_D // PACKED])
        acc = add_step(
            acc, weight, x, unit, scale_ptr, zero_ptr, scale_stride, out, out < num_out, step * BLOCK_D,
            SCALE_ROWS, SCALE_COLUMNS, PACKED, ROUND or X_COLUMNS != 0, None,
        )  # fmt: skip
        if SILU:
            up = weight_desc.load([first_out + num_out, step * BLOCK_D // PACKED])
            up_acc = add_step(
                up_acc, up, x, unit, scale_ptr, zero_ptr, scale_stride, out + num_out, out < num_out, step * BLOCK_D,
                SCALE_ROWS, SCALE_COLUMNS, PACKED, ROUND or X_COLUMNS != 0, None,
            )  # fmt: skip
    if PDL:
        # Not earlier: the next kernel's programs would occupy multiprocessors that this kernel's programs still need,
        # and a sum of sent tiles may only start after the wait above.
        gdc_launch_dependents()
    is_last = True
    if PARTS > 1:
        place = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + row[None, :]
        parts_ptr = partials_ptr + tile * PARTS * BLOCK_O * BLOCK_T + place
        is_last = leave_part(acc, parts_ptr + part * BLOCK_O * BLOCK_T, counters_ptr + tile, PARTS)
        if is_last:
            acc = tl.load(parts_ptr, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                acc += tl.load(parts_ptr + other * BLOCK_O * BLOCK_T, cache_modifier=".cg")
    if is_last:
        if SCALE_ROWS and not SCALE_COLUMNS:
            acc *= tl.load(scale_ptr + out // SCALE_ROWS, mask=out < num_out, other=0.0)[:, None]
            if SILU:
                up_acc *= tl.load(scale_ptr + (out + num_out) // SCALE_ROWS, mask=out < num_out, other=0.0)[:, None]
        if x_scale_ptr is not None and not X_COLUMNS:
            x_scale = tl.load(x_scale_ptr + row, mask=row < num_rows, other=0.0)[None, :]
            acc *= x_scale
            if SILU:
                up_acc *= x_scale
        if BIAS:
            acc += bias[:, None]
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc)) * up_acc
        dtype = out_ptr.dtype.element_ty
        if SEND:
            send_tile(
                acc.T, first_out, row, num_rows, addresses, counts, rank, dtype,
                SIZE, SLOT_BYTES, PART, BLOCK_T, BLOCK_O,
            )  # fmt: skip
        else:
            to_out = out_ptr + row.to(tl.int64)[:, None] * num_out + out[None, :]
            inside = (row < num_rows)[:, None] & (out < num_out)[None, :]
            if out_scale_ptr is not None:
                values, out_scale = rounded(acc.T)
                tl.store(out_scale_ptr + tile * out_scale_stride + row, out_scale, mask=row < num_rows)
                tl.store(to_out, values, mask=inside)
            else:
                tl.store(to_out, acc.T.to(dtype), mask=inside)


def wide_product(
    kind: Kind, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, tiling: WideTiling, scratch: WideScratch
) -> Tensor:
    """x @ W.T + b for rows and a weight that `fitting_wide_tiling` takes; SILU takes no bias.

    Shapes: (T, D) -> (T, O) for PLAIN, (T, O / 2) for SILU.
    Device: one launch, no host sync.
    """
    num_out = weight_OD.shape[0] // (2 if kind is Kind.SILU else 1)
    out = empty_with_room(len(x_TD), num_out, like=x_TD)
    _launch(kind, x_TD, weight_OD, bias_O, tiling, scratch, out, None)
    return out


@dataclass(frozen=True)
class ScaledWideTiling(WideTiling):
    """A WideTiling for a weight in e4m3. rounds: whether programs round the rows to e4m3."""

    rounds: bool = False


MOST_ROUNDED = 32
"""Up to this many rows, rounding the rows in each program is faster than rounding them once in a launch before."""
MOST_AT_ONCE = 3
"""Programs on a multiprocessor of a product whose programs also round or widen."""
SCALED_TILE_OUTPUTS = 64
WIDE_TILE_OUTPUTS = 128
"""Outputs of a program of which one fills a multiprocessor: half as many programs round or read each row."""
DEEP_OUTPUTS = 4096
"""Up to this many outputs, whose inputs are cut into many parts, programs take steps of 256 inputs."""


class ScaledScratch(PartsScratch):
    """Scratch memory for the parts of products with a weight in e4m3."""

    @classmethod
    def make(cls, device: torch.device) -> ScaledScratch:
        """Allocate."""
        return cls.allocate(device, MOST_AT_ONCE * FULL_CARD * 64 * SCALED_TILE_OUTPUTS, MOST_AT_ONCE * FULL_CARD)


def scaled_wide_tiling(
    kind: Kind, num_rows: int, num_out: int, width: int, scales: Scales, *, x_groups: int, may_round: bool
) -> ScaledWideTiling:
    """The fastest tiling on an H100 at Qwen3-8B's shapes, of 17 to 32 rows on an H200 at Qwen3-32B's, too (docs/log).

    x_groups: scales of a row in e4m3, 0 for rows that are not. may_round: programs may round them to it.
    """
    block_t, is_silu, x_is_rounded = _tile_rows(num_rows), kind is Kind.SILU, x_groups > 0
    rounds = may_round and not x_is_rounded
    if x_is_rounded:
        is_deep = block_t <= (64 if is_silu else MAX_ROWS)
    else:
        is_deep = not is_silu and (block_t <= 16 or (block_t <= FEW_ROWS and num_out <= DEEP_OUTPUTS))
    block_d = min(256 if is_deep and not scales.columns and x_groups <= 1 else 128, scales.columns or 256)
    block_o, parts = SCALED_TILE_OUTPUTS, 1
    most_parts = max(1, min(MAX_PARTS, cdiv(width, block_d) // (MIN_STEPS // 2)))
    if not is_silu:
        at_once = MOST_AT_ONCE if block_t <= 64 and not x_is_rounded else 1  # programs that do more than read
        parts = max(1, min(at_once * FULL_CARD // cdiv(num_out, block_o), most_parts))
        wide_parts = min(FULL_CARD // cdiv(num_out, WIDE_TILE_OUTPUTS), most_parts)
        is_cut = wide_parts >= 3 and cdiv(num_out, WIDE_TILE_OUTPUTS) * wide_parts >= MIN_PROGRAMS
        if is_cut and block_t == FEW_ROWS and (rounds or x_groups > 1):
            block_o, parts = WIDE_TILE_OUTPUTS, wide_parts
            block_d = min(128 if scales.columns or x_groups > 1 else 256, scales.columns or 256)
    most_at_once = 1 if is_silu and block_d == 256 else 2 if is_silu and x_is_rounded else MOST_AT_ONCE
    at_once = max(1, min(most_at_once, cdiv(cdiv(num_out, block_o) * parts, FULL_CARD)))
    row_bytes = block_d * (3 if rounds else 1 if x_is_rounded else 2)
    step_bytes = block_o * block_d // scales.packed * (2 if is_silu else 1) + block_t * row_bytes
    num_stages = max(3, min(MOST_STAGES, SCALED_SHARED_BYTES // at_once // step_bytes))
    return ScaledWideTiling(block_t, block_o, block_d, num_stages, 4, parts, rounds)


def rounded_silu_tiling(num_rows: int, num_out: int, scales: Scales) -> ScaledWideTiling | None:
    """The tiling of a product with SiLU of rows in e4m3 whose result goes in e4m3, a program's outputs with one scale.

    None where it is faster to round the result in the next product's programs: with a scale for each output, and for
    other numbers of rows.
    """
    block_t, num_tiles = _tile_rows(num_rows), cdiv(num_out, WIDE_TILE_OUTPUTS)
    if not scales.columns or block_t != FEW_ROWS or num_out % WIDE_TILE_OUTPUTS or num_tiles < MIN_PROGRAMS:
        return None
    block_d = min(128, scales.columns)
    at_once = min(2, cdiv(num_tiles, FULL_CARD))
    num_stages = SCALED_SHARED_BYTES // at_once // ((2 * WIDE_TILE_OUTPUTS + block_t) * block_d)
    return ScaledWideTiling(block_t, WIDE_TILE_OUTPUTS, block_d, num_stages)


def scaled_wide_product(
    kind: Kind, x_TD: Tensor, x_scale_TG: Tensor | None, weight_OD: Tensor, scales: Scales, bias_O: Tensor | None,
    tiling: ScaledWideTiling, scratch: ScaledScratch, dtype: torch.dtype, rounded: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """x @ W.T + b with a weight in e4m3; rows are in e4m3 if they have scales. SILU takes no bias.

    rounded: where the result goes instead, in e4m3, and its scales, of groups of tiling.block_o columns.
    Shapes: (T, D) to (T, O) for PLAIN, (T, O / 2) for SILU, of dtype. Scales are (T, 1), or (T, G) for G groups of
    at least tiling.block_d columns, those of a group one after the other in memory.
    Device: one launch, no host sync.
    """
    num_out = weight_OD.shape[0] // (2 if kind is Kind.SILU else 1)
    if rounded is None:
        out, out_scale_TG = empty_with_room(len(x_TD), num_out, like=scratch.partials.new_empty(0, dtype=dtype)), None
    else:
        (out, out_scale_TG), is_even = rounded, num_out % tiling.block_o == 0
        assert is_even and tiling.parts == 1
    _launch(
        kind, x_TD, weight_OD, bias_O, tiling, scratch, out, None, scales, x_scale_TG, out_scale_TG,
        rounds=tiling.rounds,
    )  # fmt: skip
    return out


def send_wide_product(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, tiling: WideTiling, scratch: WideScratch, sends: Sends
) -> None:
    """x @ W.T + b, each tile sent to the ranks that sum it up, in place of an output; `sends` must take the tiles.

    Device: one launch, no host sync, waits for no rank.
    """
    assert sends.takes(weight_OD.shape[0], tiling.block_o)
    _launch(Kind.PLAIN, x_TD, weight_OD, bias_O, tiling, scratch, x_TD, sends)


def _launch(
    kind: Kind, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, tiling: WideTiling, scratch: PartsScratch,
    out: Tensor, sends: Sends | None, scales: Scales | None = None, x_scale_TG: Tensor | None = None,
    out_scale_TG: Tensor | None = None, *, rounds: bool = False,
) -> None:  # fmt: skip
    assert kind is not Kind.PARTS and (bias_O is None or kind is not Kind.SILU)
    (num_rows, width), num_out = x_TD.shape, weight_OD.shape[0] // (2 if kind is Kind.SILU else 1)
    num_tiles = cdiv(num_out, tiling.block_o)
    num_partials = num_tiles * tiling.parts * tiling.block_o * tiling.block_t
    assert tiling.parts == 1 or (kind is Kind.PLAIN and num_partials <= scratch.partials.numel())
    assert tiling.parts == 1 or num_tiles <= scratch.counters.numel()
    reach = min(rows_in_reach(x_TD), tiling.block_t)
    x_desc = TensorDescriptor(x_TD, [reach, width], list(x_TD.stride()), [tiling.block_t, tiling.block_d])
    weight_block = [tiling.block_o, tiling.block_d // (1 if scales is None else scales.packed)]
    weight_desc = TensorDescriptor(weight_OD, list(weight_OD.shape), list(weight_OD.stride()), weight_block)
    x_columns = 0 if x_scale_TG is None or x_scale_TG.shape[1] == 1 else width // x_scale_TG.shape[1]
    assert x_columns % tiling.block_d == 0
    has_steps = x_columns != 0 or (scales is not None and scales.columns != 0)
    _wide_kernel[(num_tiles, tiling.parts)](
        x_desc, weight_desc, weight_OD if bias_O is None else bias_O, out, scratch.partials, scratch.counters,
        *sending_arguments(sends, scratch.counters), num_rows, num_out,
        *scaling_arguments(scales), x_scale_TG, 0 if x_scale_TG is None else x_scale_TG.stride(1),
        out_scale_TG, 0 if out_scale_TG is None else out_scale_TG.stride(1), **scaling_constants(scales),
        X_COLUMNS=x_columns, ROUND=rounds, LOADED_STAGES=tiling.num_stages if has_steps else None,
        STEPS=cdiv(width, tiling.block_d), PARTS=tiling.parts, BIAS=bias_O is not None, SILU=kind is Kind.SILU,
        **sending_constants(sends, num_out), BLOCK_T=tiling.block_t, BLOCK_O=tiling.block_o, BLOCK_D=tiling.block_d,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(x_TD.device),
    )  # fmt: skip
