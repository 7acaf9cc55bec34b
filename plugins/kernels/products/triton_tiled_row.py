"""Products of one row with a weight in int4, as triton_tiled.py stores it, by matrix instructions.

A warp multiplies 16 outputs by 128 inputs, a step, in eight instructions of 16 x 16 by 16 x 8. The left operand has
values as they lie in the weight's words: one `and` leaves two of them, which in bfloat16 are tiny numbers; the inputs
are enlarged to make up for that. A column of the right operand has the inputs of one step. Each step is multiplied by
all columns and only its own column's sums are kept, so that threads exchange nothing before the end, and a thread has
the sums of groups, each of which takes its scale and zero point once. The sum of a group's inputs is that of a weight
of ones.
Legend: T rows, A experts of a token, P = T * A pairs, O output features, D input features, F half of gate and up.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.products.triton_tiled import TILE_OUTPUTS, TiledWeight, offset_of, scale_of
from hookline.plugins.kernels.triton_launch import cdiv, launch_options

OUTPUTS = 16
"""Outputs of a program, of gate and up together: the rows of a matrix instruction."""
COLUMNS = 8
"""Columns of a matrix instruction: most steps of a chunk."""


@dataclass(frozen=True)
class RowCut:
    """Warps of a program, steps that a warp reads at once (a chunk), and chunks of a warp."""

    num_warps: int
    chunk: int
    chunks: int


@triton.jit
def _four(ptr, at, mask, EVEN: tl.constexpr):
    """The four words from each of these offsets on, in a tensor each; EVEN: all exist."""
    place = at[:, None] + tl.arange(0, 4)[None, :]
    if EVEN:
        words = tl.load(ptr + place)
    else:
        words = tl.load(ptr + place, mask=mask[:, None], other=0)
    even, odd = tl.split(tl.reshape(words, [at.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _pair(words):
    """The two numbers in bfloat16 of each word, in float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _enlarged(words, ODD: tl.constexpr, ASM: tl.constexpr):
    """Both numbers of each word times 2^60, or 2^56 for odd places, whose values look 16 times as large."""
    if ASM:  # 0x5D80 is 2^60 in bfloat16, 0x8000 is -0
        enlarged = tl.inline_asm_elementwise(
            "{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }", "=r,r,r",
            [words, 0x5D805D80 - 0x02000200 * ODD], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first, second = _pair(words)
        first, second = first * 2.0 ** (60 - 4 * ODD), second * 2.0 ** (60 - 4 * ODD)
        enlarged = (first.to(tl.int32, bitcast=True) >> 16) & 65535 | second.to(tl.int32, bitcast=True)
    return enlarged


@triton.jit
def _products(left, right):
    """The sums of eight rows times eight columns, four threads each: those of each thread's even and odd column."""
    warps: tl.constexpr = left.shape[0] // 32
    product = tl.reshape(left, [warps, 8, 1, 4]) * tl.reshape(right, [warps, 1, 8, 4])
    even, odd = tl.split(tl.reshape(tl.sum(product, axis=3), [warps, 8, 4, 2]))
    return tl.reshape(even, [left.shape[0]]), tl.reshape(odd, [left.shape[0]])


@triton.jit
def _plus_place(sums, low, high, x, PLACE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """A thread's four sums with those of the values at PLACE of these words times inputs.

    Thread 4 r + q of a warp has four words of row r (low) and of row r + 8 (high), in 8 bits eight, of which the second
    four have the last two places; four words of inputs of column r,
    and the sums of row r in the columns 2 q and 2 q + 1, then those of row r + 8.
    """
    # bfloat16's smallest numbers are evenly spaced up to 2^8 of them: four bits from bit 4 on are 16 times the value.
    FIRST: tl.constexpr = PLACE // 2 * 4 if BITS == 8 else 0
    MASK: tl.constexpr = 0x00FF00FF if BITS == 8 else 0x000F000F << (PLACE % 2 * 4)
    a0, a1, a2, a3 = low[FIRST], low[FIRST + 1], low[FIRST + 2], low[FIRST + 3]
    b0, b1, b2, b3 = high[FIRST], high[FIRST + 1], high[FIRST + 2], high[FIRST + 3]
    if PLACE % 2 if BITS == 8 else PLACE >= 2:
        a0, a1, a2, a3 = a0 >> 8, a1 >> 8, a2 >> 8, a3 >> 8
        b0, b1, b2, b3 = b0 >> 8, b1 >> 8, b2 >> 8, b3 >> 8
    if ASM:
        s0, s1, s2, s3 = tl.inline_asm_elementwise(
            "{ .reg .b32 a<8>;"
            "and.b32 a0, $8, $20; and.b32 a1, $12, $20; and.b32 a2, $9, $20; and.b32 a3, $13, $20;"
            "and.b32 a4, $10, $20; and.b32 a5, $14, $20; and.b32 a6, $11, $20; and.b32 a7, $15, $20;"
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            " {$0, $1, $2, $3}, {a0, a1, a2, a3}, {$16, $17}, {$4, $5, $6, $7};"
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            " {$0, $1, $2, $3}, {a4, a5, a6, a7}, {$18, $19}, {$0, $1, $2, $3}; }",
            "=&f,=&f,=&f,=&f,f,f,f,f,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [
                sums[0], sums[1], sums[2], sums[3], a0, a1, a2, a3, b0, b1, b2, b3,
                x[PLACE * 4], x[PLACE * 4 + 1], x[PLACE * 4 + 2], x[PLACE * 4 + 3], MASK,
            ],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        s0, s1, s2, s3 = sums
        lows, highs = (a0, a1, a2, a3), (b0, b1, b2, b3)
        for word in tl.static_range(4):
            lefts = _pair(lows[word] & MASK)
            high_lefts = _pair(highs[word] & MASK)
            rights = _pair(x[PLACE * 4 + word])
            for half in tl.static_range(2):
                even, odd = _products(lefts[half], rights[half])
                s0, s1 = s0 + even, s1 + odd
                even, odd = _products(high_lefts[half], rights[half])
                s2, s3 = s2 + even, s3 + odd
    return s0, s1, s2, s3


@triton.jit
def _group(low, high, x, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """The four sums of these words' places from FIRST on."""
    zero = tl.zeros([low[0].shape[0]], tl.float32)
    sums = (zero, zero, zero, zero)
    for place in tl.static_range(FIRST, FIRST + COUNT):
        sums = _plus_place(sums, low, high, x, place, BITS, ASM)
    return sums


@triton.jit
def _plus_group(y, sums, x_sums, word):
    """y plus the sums of a group, less its zero point times the inputs, times its scale."""
    return y + (sums - (word & 255).to(tl.float32) * x_sums) * scale_of(word)


@triton.jit
def _plus_offset(y, x_sums, word, HALF: tl.constexpr):
    """y plus the sum of a group's inputs times its offset."""
    return y + x_sums * offset_of(word, HALF)


@triton.jit
def _words(ptr, at, mask, EVEN: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    """The words of a thread's row of a step: four, or eight in 8 bits."""
    words = _four(ptr, at, mask, EVEN)
    if BITS == 8:
        words = words + _four(ptr, at + TILE * 16, mask, EVEN)  # type: ignore[assignment]
    return words


@triton.jit
def _one_row_kernel(
    x_ptr, words_ptr, scale_ptr, offset_ptr, bias_ptr, out_ptr, num_out, all_out, half_out, steps, x_end,
    expert_ptr, x_stride, num_chosen, expert_outs, BIAS: tl.constexpr, SILU: tl.constexpr, GROUPS: tl.constexpr,
    BITS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """expert_ptr: each pair's expert, or None; with experts, x has a row for each token, x_stride words apart."""
    first = 0
    if expert_ptr is not None:
        pair = tl.program_id(1)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()  # not before: the next kernel reads which experts there are ahead of its wait
        first = tl.load(expert_ptr + pair).to(tl.int32) * expert_outs
        x_ptr += pair // num_chosen * x_stride
        out_ptr += pair * num_out
    elif PDL:
        gdc_launch_dependents()
    OWN: tl.constexpr = 8 if SILU else 16
    thread = tl.arange(0, WARPS * 32)
    warp, row, quad = thread // 32, thread % 32 // 4, thread % 4
    out = tl.program_id(0) * OWN + row
    low = first + tl.minimum(out, num_out - 1)
    if SILU:
        high = low + half_out
    else:
        high = first + tl.minimum(out + 8, num_out - 1)
    STEP_WORDS: tl.constexpr = TILE * 4 * BITS
    low_at = (low // TILE * steps).to(tl.int64) * STEP_WORDS + (low % TILE * 16 + quad * 4)
    high_at = (high // TILE * steps).to(tl.int64) * STEP_WORDS + (high % TILE * 16 + quad * 4)
    one = tl.full([WARPS * 32], 0x01010101 if BITS == 8 else 0x11111111, tl.int32)  # values of 1
    ones = (one, one, one, one)
    if BITS == 8:
        ones = ones + ones  # type: ignore[assignment]
    y = tl.zeros([WARPS * 32], tl.float32)
    y_high = tl.zeros([WARPS * 32], tl.float32)
    for turn in tl.static_range(CHUNKS):
        first_step = (turn * WARPS + warp) * CHUNK
        lows = ()
        highs = ()
        scales = ()
        for index in tl.static_range(CHUNK):
            step = first_step + index
            lows = lows + (_words(words_ptr, low_at + step * STEP_WORDS, step < steps, EVEN, BITS, TILE),)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
            highs = highs + (_words(words_ptr, high_at + step * STEP_WORDS, step < steps, EVEN, BITS, TILE),)  # type: ignore[assignment]  # noqa: RUF005
        for group in tl.static_range(GROUPS):
            for odd in tl.static_range(2):
                column = quad * 2 + odd
                there = (column < CHUNK) & (first_step + column < steps)
                at = ((first_step + column) * GROUPS + group) * all_out
                low_scale = tl.load(scale_ptr + at + low, mask=there, other=0)
                high_scale = tl.load(scale_ptr + at + high, mask=there, other=0)
                scales = scales + (low_scale, high_scale)  # type: ignore[assignment]  # noqa: RUF005
        offsets = ()
        if offset_ptr is not None:
            for two in tl.static_range(2):
                for odd in tl.static_range(2):
                    column = quad * 2 + odd
                    there = (column < CHUNK) & (first_step + column < steps)
                    at = ((first_step + column) * 2 + two) * all_out
                    low_offset = tl.load(offset_ptr + at + low, mask=there, other=0)
                    high_offset = tl.load(offset_ptr + at + high, mask=there, other=0)
                    offsets = offsets + (low_offset, high_offset)  # type: ignore[assignment]  # noqa: RUF005
        if turn == 0 and PDL and expert_ptr is None:
            gdc_wait()
        x = ()
        for place in tl.static_range(4):
            at = (first_step + row) * 64 + place * 16 + quad * 4
            four = _four(x_ptr, at, (row < CHUNK) & (at < x_end), False)
            for word in tl.static_range(4):
                x = x + (_enlarged(four[word], place % 2 if BITS == 4 else 0, ASM),)  # type: ignore[assignment]  # noqa: RUF005
        for group in tl.static_range(GROUPS):
            x_even, x_odd, _, _ = _group(ones, ones, x, group * (4 // GROUPS), 4 // GROUPS, BITS, ASM)
            even = tl.zeros([WARPS * 32], tl.float32)
            odd = tl.zeros([WARPS * 32], tl.float32)
            even_high = tl.zeros([WARPS * 32], tl.float32)
            odd_high = tl.zeros([WARPS * 32], tl.float32)
            for index in tl.static_range(CHUNK):
                sums = _group(lows[index], highs[index], x, group * (4 // GROUPS), 4 // GROUPS, BITS, ASM)
                is_own = quad == index // 2
                if index % 2 == 0:
                    even, even_high = tl.where(is_own, sums[0], even), tl.where(is_own, sums[2], even_high)
                else:
                    odd, odd_high = tl.where(is_own, sums[1], odd), tl.where(is_own, sums[3], odd_high)
            y = _plus_group(y, even, x_even, scales[group * 4])
            y_high = _plus_group(y_high, even_high, x_even, scales[group * 4 + 1])
            y = _plus_group(y, odd, x_odd, scales[group * 4 + 2])
            y_high = _plus_group(y_high, odd_high, x_odd, scales[group * 4 + 3])
            if offset_ptr is not None:
                y = _plus_offset(y, x_even, offsets[group // 2 * 4], group % 2)
                y_high = _plus_offset(y_high, x_even, offsets[group // 2 * 4 + 1], group % 2)
                y = _plus_offset(y, x_odd, offsets[group // 2 * 4 + 2], group % 2)
                y_high = _plus_offset(y_high, x_odd, offsets[group // 2 * 4 + 3], group % 2)
    both = tl.reshape(tl.join(y, y_high), [WARPS, 8, 4, 2])
    both = tl.sum(tl.sum(both, axis=2), axis=0) * 2.0**73  # 2^(133 - 60): a 1 has the bits of 2^-133
    if SILU:
        gate, up = tl.split(both)
        out = tl.program_id(0) * OWN + tl.arange(0, 8)
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        out = tl.program_id(0) * OWN + tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :] * 8
        result = both
        if BIAS:
            result += tl.load(bias_ptr + out, mask=out < num_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + out, result.to(out_ptr.dtype.element_ty), mask=out < num_out)


def row_cut(steps: int, groups: int) -> RowCut:
    """The cut of a weight of so many steps with so many groups: the fastest of several on an H200 (docs/log)."""
    if groups > 2:
        num_warps, most = 8 if steps <= 64 else 16, COLUMNS // 2
    else:
        num_warps, most = 8 if 32 < steps <= 48 else 4 if steps <= 128 else 16, COLUMNS
    chunks = cdiv(steps, num_warps * most)
    return RowCut(num_warps, cdiv(steps, num_warps * chunks), chunks)


def _constants(x_TD: Tensor, weight: TiledWeight) -> dict[str, object]:
    """Compile-time constants of a launch, and its options."""
    steps = weight.units.shape[1]
    cut = row_cut(steps, weight.groups)
    return {
        "GROUPS": weight.groups, "BITS": weight.bits, "CHUNK": cut.chunk, "CHUNKS": cut.chunks,
        "EVEN": cut.num_warps * cut.chunk * cut.chunks == steps, "TILE": TILE_OUTPUTS,
        "ASM": x_TD.device.type == "cuda", "WARPS": cut.num_warps, "num_warps": cut.num_warps,
        **launch_options(x_TD.device),
    }  # fmt: skip


def expert_gates(x_TD: Tensor, expert_TA: Tensor, weight: TiledWeight) -> Tensor:
    """silu(gate) * up of each pair of a token and one of its experts, in bfloat16: (T, D) -> (T * A, F).

    Shapes: x_TD with rows of whole words of 32 bits; expert_TA (T, A) contiguous.
    Device: one launch, no host sync.
    """
    num_out = weight.num_rows // 2
    out_PF = torch.empty((expert_TA.numel(), num_out), dtype=x_TD.dtype, device=x_TD.device)
    _one_row_kernel[(cdiv(num_out, OUTPUTS // 2), len(out_PF))](
        x_TD.view(torch.int32), weight.units.view(torch.int32), weight.scales_GO, None, weight.scales_GO, out_PF,
        num_out, weight.scales_GO.shape[1], num_out, weight.units.shape[1], weight.num_columns // 2, expert_TA,
        x_TD.stride(0) // 2, expert_TA.shape[1], weight.num_rows, BIAS=False, SILU=True, **_constants(x_TD, weight),
    )  # fmt: skip
    return out_PF


def fits_row(x_TD: Tensor) -> bool:
    """Whether `one_row` takes x. Device: looks at shapes and dtypes only, so a captured graph keeps its answer."""
    is_row = x_TD.dim() == 2 and len(x_TD) == 1 and x_TD.stride(1) == 1 and x_TD.stride(0) % 2 == 0
    return is_row and x_TD.dtype is torch.bfloat16 and x_TD.data_ptr() % 4 == 0


def one_row(x_TD: Tensor, weight: TiledWeight, bias_O: Tensor | None, *, silu: bool = False) -> Tensor:
    """x @ W.T + b of one row in bfloat16; with `silu`, silu(its first half) * its second half, which takes no bias.

    Shapes: (1, D) -> (1, O), or (1, O / 2) with silu.
    Device: one launch, no host sync. The weight is read before the launch before has finished: it must not write it.
    """
    num_out = weight.num_rows // (2 if silu else 1)
    out_TO = torch.empty((1, num_out), dtype=x_TD.dtype, device=x_TD.device)
    _one_row_kernel[(cdiv(num_out, OUTPUTS // (2 if silu else 1)),)](
        x_TD.view(torch.int32), weight.units.view(torch.int32), weight.scales_GO, weight.offsets_PO,
        weight.scales_GO if bias_O is None else bias_O, out_TO, num_out, weight.scales_GO.shape[1], num_out,
        weight.units.shape[1], weight.num_columns // 2, None, None, None, None, BIAS=bias_O is not None, SILU=silu,
        **_constants(x_TD, weight),
    )  # fmt: skip
    return out_TO
