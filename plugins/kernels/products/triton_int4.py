"""Products of 2 to 64 rows with a weight in int4, stored once at load time as a Hopper card's kernels read it fastest.

128 inputs of an output are a step: 32 units of 16 bits, of which unit u has the inputs u, u + 32, u + 64 and u + 96
from its lowest bits on. 64 outputs' units of a step lie together, so that a program reads 4 KiB at once. A scale and
its zero point share a word: a float32 whose last eight bits are the zero point. A scale loses 2^-16 of itself at most,
and nothing if it was in bfloat16 or float16.
One instruction makes two values 128 + value in bfloat16, and another subtracts 128 + zero point. For one token's
experts, the values' bits in their places are tiny float32 numbers; a factor of the input makes up for that.
Legend: T rows, O output features, D input features, F half of gate and up, S steps, G groups of inputs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.products.triton_parts import PartsScratch, leave_part
from hookline.plugins.kernels.products.triton_scales import HALF_INT4, Scales
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, next_power_of_2

STEP = 128
"""Inputs of a step."""
TILE_OUTPUTS = 64
"""Outputs whose units of a step lie together, and that a program of many rows computes."""
MOST_ROWS = 64
"""Most rows of these products; triton_int4_row.py has products of one row, triton_int4_rows.py of more rows."""
MOST_PARTS = 4
STAGES = {16: 8, 32: 6, 64: 4}
"""Steps of a program in flight, by its rows."""


@dataclass(frozen=True, eq=False)
class TiledInt4:
    """A weight in int4, (num_rows, num_columns), or one of each of num_experts experts, one after the other.

    O here is the number of all outputs, made a multiple of TILE_OUTPUTS.
    units: int16 (O / 64, S, 64, 32), contiguous. scales_GO: int32, contiguous, `groups` of them a step: 1, 2 or 4.
    """

    units: Tensor
    scales_GO: Tensor
    groups: int
    num_rows: int
    num_columns: int
    num_experts: int | None = None

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight in this dtype: (O, D), or (X, O, D), contiguous. Device: one launch, no host sync."""
        all_rows = self.num_rows * (self.num_experts or 1)
        out_OD = torch.empty((all_rows, self.num_columns), dtype=dtype, device=self.units.device)
        tiles, steps = self.units.shape[:2]
        _dequantise_kernel[(tiles, steps)](
            self.units, self.scales_GO, out_OD, all_rows, self.num_columns, steps, GROUPS=self.groups, num_warps=4
        )
        return out_OD if self.num_experts is None else out_OD.view(self.num_experts, self.num_rows, self.num_columns)


def tiled_int4(data_OW: Tensor, scales: Scales) -> TiledInt4:
    """Store a weight in this layout. data_OW: uint8 (O, D / 2) with the even input in the low half, or (X, O, D / 2).

    Does not call `contiguous`, which a torch without CUDA does not have for the fake tensors of a dry run.
    """
    *num_experts, num_rows, width = *data_OW.shape[:-1], data_OW.shape[-1] * 2
    data_OW = data_OW.reshape(-1, width // 2)
    num_out = len(data_OW)
    all_out, steps = cdiv(num_out, TILE_OUTPUTS) * TILE_OUTPUTS, cdiv(width, STEP)
    data_OW = pad(data_OW, (0, steps * STEP // 2 - width // 2, 0, all_out - num_out))
    codes = torch.stack((data_OW & 15, data_OW >> 4), 2).view(-1, TILE_OUTPUTS, steps, 4, 32).transpose(1, 2)
    units = codes[:, :, :, 3].to(torch.int16)
    for place in (2, 1, 0):
        units = units << 4 | codes[:, :, :, place]
    group = min(scales.columns or STEP, STEP)
    times = 1 if scales.columns else cdiv(width, STEP)

    def spread(of_blocks: Tensor) -> Tensor:
        """(R, C) -> (G, O)."""
        of_outputs = of_blocks.repeat_interleave(scales.rows, -2)[..., :num_rows, :].reshape(num_out, -1)
        of_groups = of_outputs.repeat_interleave(times if not scales.columns else scales.columns // group, 1)
        of_groups = of_groups[:, : steps * STEP // group]
        return pad(of_groups, (0, steps * STEP // group - of_groups.shape[1], 0, all_out - num_out)).t()

    scales_GO = spread(scales.factors_RC).clone(memory_format=torch.contiguous_format)
    words_GO = scales_GO.view(torch.int32) + 128 & -256
    words_GO |= HALF_INT4 if scales.zeros_RC is None else spread(scales.zeros_RC).to(torch.int32)
    units = units.clone(memory_format=torch.contiguous_format)
    return TiledInt4(units, words_GO, STEP // group, num_rows, width, *num_experts)


@triton.jit
def scale_of(word):
    """The scale of a word, without its zero point."""
    return (word & -256).to(tl.float32, bitcast=True)


@triton.jit
def _tiny(words, PLACE: tl.constexpr):
    """The four bits of each word from bit PLACE on, at most 20, in float32: the value times 2^(PLACE - 149)."""
    return (words & (15 << PLACE)).to(tl.float32, bitcast=True)


@triton.jit
def group_sums(words, x_ptr, x_at, x_end, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Sums over places FIRST to FIRST + COUNT: of value times input (outputs, words), and of the inputs (1, words).

    x_ptr: two inputs in bfloat16 a word, as the units are.
    """
    sums = tl.zeros(words.shape, tl.float32)
    x_sums = tl.zeros(x_at.shape, tl.float32)
    high = words >> 8
    for place in tl.static_range(FIRST, FIRST + COUNT):
        at = x_at + place * 16
        pair = tl.load(x_ptr + at, mask=at < x_end, other=0)
        x = (pair << 16).to(tl.float32, bitcast=True)
        x_sums += x
        sums += _tiny(words, 4 * place) * (x * 2.0 ** (60 - 4 * place))
        x = (pair & -65536).to(tl.float32, bitcast=True)
        x_sums += x
        if place < 2:
            sums += _tiny(words, 16 + 4 * place) * (x * 2.0 ** (44 - 4 * place))
        else:
            sums += _tiny(high, 8 + 4 * place) * (x * 2.0 ** (52 - 4 * place))
    return sums * 2.0**89, x_sums


@triton.jit
def _values(units, word, PLACE: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr):
    """The value at PLACE of each unit, less its zero point. 0x4300 is 128 in bfloat16, 0xC300 is -128."""
    if ASM:
        less = (word & 255 | 0xC300).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
        if PLACE == 0:
            values = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; lop3.b32 t, $1, 983055, 1124090624, 234; mov.b32 u, 1065369472; "
                "fma.rn.bf16x2 $0, t, u, $2; }",
                "=r,r,r", [units, less], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif PLACE == 1:
            values = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; shr.u32 t, $1, 4; lop3.b32 t, t, 983055, 1124090624, 234; mov.b32 u, 1065369472; "
                "fma.rn.bf16x2 $0, t, u, $2; }",
                "=r,r,r", [units, less], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif PLACE == 2:
            values = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; shr.u32 t, $1, 8; lop3.b32 t, t, 983055, 1124090624, 234; mov.b32 u, 1065369472; "
                "fma.rn.bf16x2 $0, t, u, $2; }",
                "=r,r,r", [units, less], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            values = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; shr.u32 t, $1, 12; lop3.b32 t, t, 983055, 1124090624, 234; mov.b32 u, 1065369472; "
                "fma.rn.bf16x2 $0, t, u, $2; }",
                "=r,r,r", [units, less], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        values = (((units >> (4 * PLACE)) & 15).to(tl.float32) - (word & 255).to(tl.float32)[:, None]).to(dtype)
    return values


@triton.jit
def _times_scale(values, word, ASM: tl.constexpr):
    """The same values times their scale, both rounded to the rows' dtype."""
    scale = scale_of(word).to(values.dtype)[:, None]
    if ASM:
        product = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [values, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        product = values * scale
    return product


@triton.jit
def units_at(out, steps, TILE: tl.constexpr):
    """Offsets of these outputs' first step of 32 units; the units of the next step are TILE * 32 further."""
    return (out // TILE * steps).to(tl.int64) * (TILE * 32) + out % TILE * 32


@triton.jit
def load_step(x_ptr, rows, left, EVEN: tl.constexpr):
    """The four quarters of a step's inputs of these rows. left: inputs from each column on; EVEN: all exist."""
    if EVEN:
        x0 = tl.load(x_ptr, mask=rows, other=0.0)
        x1 = tl.load(x_ptr + 32, mask=rows, other=0.0)
        x2 = tl.load(x_ptr + 64, mask=rows, other=0.0)
        x3 = tl.load(x_ptr + 96, mask=rows, other=0.0)
    else:
        x0 = tl.load(x_ptr, mask=rows & (left > 0), other=0.0)
        x1 = tl.load(x_ptr + 32, mask=rows & (left > 32), other=0.0)
        x2 = tl.load(x_ptr + 64, mask=rows & (left > 64), other=0.0)
        x3 = tl.load(x_ptr + 96, mask=rows & (left > 96), other=0.0)
    return x0, x1, x2, x3


@triton.jit
def with_step(
    acc, units, scale_ptr, all_out, x0, x1, x2, x3, GROUPS: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr
):
    """The accumulator (outputs, rows) with the product of one step; scale_ptr: of its first group.

    SCALED: each value is multiplied by its scale, instead of the sum of a group.
    """
    word = tl.load(scale_ptr)
    values = _values(units, word, 0, ASM, x0.dtype)
    if SCALED:
        acc = tl.dot(_times_scale(values, word, ASM), x0.T, acc)
        if GROUPS == 4:
            word = tl.load(scale_ptr + all_out)
        acc = tl.dot(_times_scale(_values(units, word, 1, ASM, x0.dtype), word, ASM), x1.T, acc)
        if GROUPS > 1:
            word = tl.load(scale_ptr + (GROUPS // 2) * all_out)
        acc = tl.dot(_times_scale(_values(units, word, 2, ASM, x0.dtype), word, ASM), x2.T, acc)
        if GROUPS == 4:
            word = tl.load(scale_ptr + 3 * all_out)
        acc = tl.dot(_times_scale(_values(units, word, 3, ASM, x0.dtype), word, ASM), x3.T, acc)
    else:
        part = tl.dot(values, x0.T)
        if GROUPS == 4:
            acc += part * scale_of(word)[:, None]
            word = tl.load(scale_ptr + all_out)
            part = tl.dot(_values(units, word, 1, ASM, x0.dtype), x1.T)
        else:
            part = tl.dot(_values(units, word, 1, ASM, x0.dtype), x1.T, part)
        if GROUPS == 1:
            part = tl.dot(_values(units, word, 2, ASM, x0.dtype), x2.T, part)
        else:
            acc += part * scale_of(word)[:, None]
            word = tl.load(scale_ptr + (GROUPS // 2) * all_out)
            part = tl.dot(_values(units, word, 2, ASM, x0.dtype), x2.T)
        if GROUPS == 4:
            acc += part * scale_of(word)[:, None]
            word = tl.load(scale_ptr + 3 * all_out)
            part = tl.dot(_values(units, word, 3, ASM, x0.dtype), x3.T)
        else:
            part = tl.dot(_values(units, word, 3, ASM, x0.dtype), x3.T, part)
        acc += part * scale_of(word)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _tiles_kernel(
    x_ptr, x_stride, units_ptr, scale_ptr, bias_ptr, out_ptr, partials_ptr, counters_ptr, num_rows, num_out, all_out,
    width, steps, BIAS: tl.constexpr, SILU: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, EVEN: tl.constexpr, LOADED_STAGES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_T)
    out = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.arange(0, 32)[None, :]
    unit_at = tl.arange(0, BLOCK_O)[:, None] * 32 + column
    x_ptr += row.to(tl.int64)[:, None] * x_stride + column
    rows = row[:, None] < num_rows
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    up_acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for step in tl.range(part * steps // PARTS, (part + 1) * steps // PARTS, num_stages=LOADED_STAGES):
        units = tl.load(units_ptr + (tile * steps + step).to(tl.int64) * (BLOCK_O * 32) + unit_at)
        x0, x1, x2, x3 = load_step(x_ptr + step * 128, rows, width - step * 128 - column, EVEN)
        scale_at = scale_ptr + step * GROUPS * all_out + out
        acc = with_step(acc, units, scale_at, all_out, x0, x1, x2, x3, GROUPS, False, ASM)
        if SILU:
            up_tile = tile + num_out // BLOCK_O
            up = tl.load(units_ptr + (up_tile * steps + step).to(tl.int64) * (BLOCK_O * 32) + unit_at)
            up_acc = with_step(
                up_acc, up, scale_at + num_out, all_out, x0, x1, x2, x3, GROUPS, False, ASM
            )  # fmt: skip
    if PDL:
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
        if BIAS:
            acc += tl.load(bias_ptr + out, mask=out < num_out, other=0.0).to(tl.float32)[:, None]
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc)) * up_acc
        to_out = out_ptr + row.to(tl.int64)[:, None] * num_out + out[None, :]
        tl.store(to_out, acc.T.to(out_ptr.dtype.element_ty), mask=rows & (out < num_out)[None, :])


@triton.jit
def _dequantise_kernel(units_ptr, scale_ptr, out_ptr, num_out, width, steps, GROUPS: tl.constexpr):
    tile = tl.program_id(0)
    step = tl.program_id(1)
    all_out = tl.num_programs(0) * 64
    row = tl.arange(0, 64)
    out = tile * 64 + row
    unit = tl.arange(0, 32)[None, :]
    units = tl.load(units_ptr + (tile * steps + step).to(tl.int64) * 2048 + row[:, None] * 32 + unit)
    for place in tl.static_range(4):
        word = tl.load(scale_ptr + (step * GROUPS + place * GROUPS // 4) * all_out + out)[:, None]
        values = ((units >> (4 * place) & 15).to(tl.float32) - (word & 255).to(tl.float32)) * scale_of(word)
        column = step * 128 + place * 32 + unit
        to_out = out_ptr + out.to(tl.int64)[:, None] * width + column
        tl.store(to_out, values.to(out_ptr.dtype.element_ty), mask=(out < num_out)[:, None] & (column < width))


def fits_tiled(x_TD: Tensor, weight: TiledInt4, *, silu: bool = False) -> bool:
    """Whether `tiled_product` takes x. Device: looks at shapes and dtypes only, so a graph keeps its answer."""
    is_whole = not silu or weight.num_rows % (2 * TILE_OUTPUTS) == 0
    is_few = x_TD.dim() == 2 and 0 < len(x_TD) <= MOST_ROWS and x_TD.stride(1) == 1 and x_TD.data_ptr() % 4 == 0
    return is_whole and is_few and x_TD.dtype in (torch.bfloat16, torch.float16)


def tiled_product(
    x_TD: Tensor, weight: TiledInt4, bias_O: Tensor | None, scratch: PartsScratch, *, silu: bool = False
) -> Tensor:
    """x @ W.T + b if `fits_tiled`; with `silu`, silu(its first half) * its second half, which takes no bias.

    Shapes: (T, D) -> (T, O), or (T, O / 2) with silu.
    Device: one launch, no host sync.
    """
    assert bias_O is None or not silu
    num_rows, num_out = len(x_TD), weight.num_rows // (2 if silu else 1)
    steps, all_out = weight.units.shape[1], weight.scales_GO.shape[1]
    out_TO = torch.empty((num_rows, num_out), dtype=x_TD.dtype, device=x_TD.device)
    bias = weight.scales_GO if bias_O is None else bias_O
    options = launch_options(x_TD.device)
    constants = {"BIAS": bias_O is not None, "SILU": silu, "GROUPS": weight.groups, **options}
    on_pairs = x_TD.device.type == "cuda" and x_TD.dtype is torch.bfloat16
    block_t, tiles = max(16, next_power_of_2(num_rows)), cdiv(num_out, TILE_OUTPUTS)
    room = scratch.partials.numel() // (TILE_OUTPUTS * block_t * tiles) if tiles <= scratch.counters.numel() else 0
    parts = 1 if silu else max(1, min(MOST_PARTS, room, steps))
    _tiles_kernel[(tiles, parts)](
        x_TD, x_TD.stride(0), weight.units, weight.scales_GO, bias, out_TO, scratch.partials, scratch.counters,
        num_rows, num_out, all_out, weight.num_columns, steps, PARTS=parts, BLOCK_O=TILE_OUTPUTS, BLOCK_T=block_t,
        EVEN=weight.num_columns % STEP == 0, LOADED_STAGES=STAGES[block_t],
        ASM=on_pairs, num_warps=4, num_stages=STAGES[block_t], **constants,
    )  # fmt: skip
    return out_TO
