"""Weights in int4, or in int8 in groups of 32 inputs, stored once at load time for the kernels of a Hopper card.

128 inputs of an output are a step: 32 units of 16 bits, of which unit u has the inputs u, u + 32, u + 64 and u + 96
from its lowest bits on; in int8, 32 units for its first half, of which unit u has the inputs u and u + 32, and 32 for
its second. 64 outputs' units lie together, so that a program reads 4 KiB at once. A scale and its zero point share a
word: a float32 whose last eight bits are the zero point, which is 128 in int8. A scale loses 2^-16 of itself at most,
and nothing if it was in bfloat16 or float16. Products of one row are in triton_tiled_row.py, of more in
triton_tiled_rows.py.
One instruction makes two values 128 + value in bfloat16, and another subtracts 128 + zero point. For one token's
experts, the values' bits in their places are tiny float32 numbers; a factor of the input makes up for that.
Legend: T rows, O output features, D input features, F half of gate and up, S steps, G groups of inputs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from hookline.plugins.kernels.products.triton_scales import HALF_INT4, Scales
from hookline.plugins.kernels.triton_launch import cdiv

STEP = 128
"""Inputs of a step."""
TILE_OUTPUTS = 64
"""Outputs whose units of a step lie together."""
OFFSET_GROUPS = 4
"""Groups of a step that may have offsets."""
HALF_INT8 = 128
"""The code of 0 in int8: codes are values plus this."""


@dataclass(frozen=True, eq=False)
class TiledWeight:
    """A weight in int4 or int8, (num_rows, num_columns), or one of each of num_experts experts, one after the other.

    O here is the number of all outputs, made a multiple of TILE_OUTPUTS.
    units: int16 (O / 64, S, bits / 4, 64, 32), contiguous. scales_GO: int32, contiguous, `groups` of them a step: 1, 2
    or 4. offsets_PO: of 4 groups a step; the numbers in bfloat16 that are added to the values of two groups (P pairs)
    in an int32, the first group's in its low half.
    """

    units: Tensor
    scales_GO: Tensor
    groups: int
    num_rows: int
    num_columns: int
    num_experts: int | None = None
    offsets_PO: Tensor | None = None

    @property
    def bits(self) -> int:
        """Of a value: 4 or 8."""
        return self.units.shape[2] * 4

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight in this dtype: (O, D), or (X, O, D), contiguous. Device: one launch, no host sync."""
        all_rows = self.num_rows * (self.num_experts or 1)
        out_OD = torch.empty((all_rows, self.num_columns), dtype=dtype, device=self.units.device)
        tiles, steps = self.units.shape[:2]
        _dequantise_kernel[(tiles, steps)](
            self.units, self.scales_GO, self.offsets_PO, out_OD, all_rows, self.num_columns, steps, GROUPS=self.groups,
            BITS=self.bits, num_warps=4,
        )  # fmt: skip
        return out_OD if self.num_experts is None else out_OD.view(self.num_experts, self.num_rows, self.num_columns)

    def with_offsets(self, offsets_OC: Tensor) -> TiledWeight:
        """The same with an offset for each of 32 inputs: (O, D / 32). Device: copies."""
        assert self.groups == OFFSET_GROUPS and self.num_experts is None
        all_out, pairs = self.scales_GO.shape[1], self.units.shape[1] * 2
        num_out, num_groups = offsets_OC.shape
        padded = pad(offsets_OC.to(torch.bfloat16), (0, 2 * pairs - num_groups, 0, all_out - num_out))
        halves = padded.view(torch.int16).to(torch.int32).view(all_out, pairs, 2)
        words_PO = (halves[..., 0] & 0xFFFF | halves[..., 1] << 16).t().clone(memory_format=torch.contiguous_format)
        return replace(self, offsets_PO=words_PO)


def tiled_weight(data_OW: Tensor, scales: Scales) -> TiledWeight:
    """Store a weight in this layout. data_OW: uint8 (O, D / 2) with the even input in the low half, or (X, O, D / 2);
    or int8 (O, D).

    Does not call `contiguous`, which a torch without CUDA does not have for the fake tensors of a dry run.
    """
    *num_experts, num_rows, width = *data_OW.shape[:-1], data_OW.shape[-1] * scales.packed
    data_OW = data_OW.reshape(-1, width // scales.packed)
    num_out = len(data_OW)
    all_out, steps = cdiv(num_out, TILE_OUTPUTS) * TILE_OUTPUTS, cdiv(width, STEP)
    data_OW = pad(data_OW, (0, (steps * STEP - width) // scales.packed, 0, all_out - num_out))
    if scales.packed == 2:
        codes, bits = torch.stack((data_OW & 15, data_OW >> 4), 2), 4
    else:
        codes, bits = data_OW.view(torch.uint8) ^ 128, 8
    places = 16 // bits
    codes = codes.view(-1, TILE_OUTPUTS, steps, bits // 4, places, 32).permute(0, 2, 3, 1, 4, 5)
    units = codes[:, :, :, :, places - 1].to(torch.int16)
    for place in reversed(range(places - 1)):
        units = units << bits | codes[:, :, :, :, place]
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
    half = HALF_INT4 if bits == 4 else HALF_INT8
    words_GO |= half if scales.zeros_RC is None else spread(scales.zeros_RC).to(torch.int32)
    units = units.clone(memory_format=torch.contiguous_format)
    experts = num_experts[0] if num_experts else None
    return TiledWeight(units, words_GO, STEP // group, num_rows, width, experts)


@triton.jit
def scale_of(word):
    """The scale of a word, without its zero point."""
    return (word & -256).to(tl.float32, bitcast=True)


@triton.jit
def offset_of(word, HALF: tl.constexpr):
    """The offset in the low half of a word, or in its high one, in float32."""
    if HALF == 0:
        bits = word << 16
    else:
        bits = word & -65536
    return bits.to(tl.float32, bitcast=True)


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
def _bytes(units, PLACE: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr):
    """The byte at PLACE of each unit, less 128. 0x4300 with seven bits is 128 + them, 0xC380 or 0xC300 -256 or -128."""
    if ASM:
        if PLACE == 0:
            values = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; lop3.b32 t, $1, 0x007F007F, 0x43004300, 0xEA; "
                "lop3.b32 u, $1, 0x00800080, 0xC380C380, 0x6A; add.rn.bf16x2 $0, t, u; }",
                "=r,r", [units], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            values = tl.inline_asm_elementwise(
                "{ .reg .b32 s, t, u; shr.u32 s, $1, 8; lop3.b32 t, s, 0x007F007F, 0x43004300, 0xEA; "
                "lop3.b32 u, s, 0x00800080, 0xC380C380, 0x6A; add.rn.bf16x2 $0, t, u; }",
                "=r,r", [units], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        values = ((units >> (8 * PLACE) & 255).to(tl.float32) - 128.0).to(dtype)
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
def _times_scale_plus(values, word, offset, ASM: tl.constexpr):
    """The same plus an offset, rounded once."""
    scale = scale_of(word).to(values.dtype)[:, None]
    if ASM:
        result = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [values, scale, offset[:, None]], dtype=tl.bfloat16,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        result = (values.to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)[:, None]).to(values.dtype)
    return result


@triton.jit
def _quarter(
    units, scale_ptr, offset_ptr, all_out, PLACE: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A quarter of a step of the weight, values times scales: (outputs, 32)."""
    GROUP: tl.constexpr = PLACE * GROUPS // 4
    word = tl.load(scale_ptr + GROUP * all_out)
    if BITS == 8:
        values = _bytes(units, PLACE % 2, ASM, dtype)
    else:
        values = _values(units, word, PLACE, ASM, dtype)
    if offset_ptr is None:
        weight = _times_scale(values, word, ASM)
    else:
        offset = offset_of(tl.load(offset_ptr + PLACE // 2 * all_out), PLACE % 2)
        weight = _times_scale_plus(values, word, offset.to(dtype), ASM)
    return weight


@triton.jit
def _beside(left, right):
    """Both, one beside the other: no value changes its thread where columns are divided among a thread's registers."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def scaled_step(
    units_ptr, scale_ptr, offset_ptr, all_out, GROUPS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
    ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A step of the weight in the rows' dtype: (outputs, 128). Pointers: to its first units, scales and offsets.

    One product of the whole step lets the compiler unpack the next one while the matrix units work.
    """
    units = tl.load(units_ptr)
    more = units
    if BITS == 8:
        more = tl.load(units_ptr + TILE * 32)
    w0 = _quarter(units, scale_ptr, offset_ptr, all_out, 0, GROUPS, BITS, ASM, dtype)
    w1 = _quarter(units, scale_ptr, offset_ptr, all_out, 1, GROUPS, BITS, ASM, dtype)
    w2 = _quarter(more, scale_ptr, offset_ptr, all_out, 2, GROUPS, BITS, ASM, dtype)
    w3 = _quarter(more, scale_ptr, offset_ptr, all_out, 3, GROUPS, BITS, ASM, dtype)
    return _beside(_beside(w0, w1), _beside(w2, w3))


@triton.jit
def units_at(out, steps, TILE: tl.constexpr, BITS: tl.constexpr = 4):
    """Offsets of these outputs' first step of units; the units of the next step are TILE * 8 * BITS further."""
    return (out // TILE * steps).to(tl.int64) * (TILE * 8 * BITS) + out % TILE * 32


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


@triton.jit
def _dequantise_kernel(
    units_ptr, scale_ptr, offset_ptr, out_ptr, num_out, width, steps, GROUPS: tl.constexpr, BITS: tl.constexpr
):
    tile = tl.program_id(0)
    step = tl.program_id(1)
    all_out = tl.num_programs(0) * 64
    row = tl.arange(0, 64)
    out = tile * 64 + row
    unit = tl.arange(0, 32)[None, :]
    PLACES: tl.constexpr = 16 // BITS
    unit_at = units_ptr + (tile * steps + step).to(tl.int64) * (512 * BITS) + row[:, None] * 32 + unit
    for place in tl.static_range(4):
        units = tl.load(unit_at + place // PLACES * 2048)
        word = tl.load(scale_ptr + (step * GROUPS + place * GROUPS // 4) * all_out + out)[:, None]
        codes = units >> (BITS * (place % PLACES)) & (2**BITS - 1)
        values = (codes.to(tl.float32) - (word & 255).to(tl.float32)) * scale_of(word)
        if offset_ptr is not None:
            values += offset_of(tl.load(offset_ptr + (step * 2 + place // 2) * all_out + out), place % 2)[:, None]
        column = step * 128 + place * 32 + unit
        to_out = out_ptr + out.to(tl.int64)[:, None] * width + column
        tl.store(to_out, values.to(out_ptr.dtype.element_ty), mask=(out < num_out)[:, None] & (column < width))
