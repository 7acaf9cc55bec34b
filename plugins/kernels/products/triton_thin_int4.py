"""Triton products of one row with a weight in int4, whose groups of inputs have scales and zero points.

As in triton_thin.py, a program reads whole rows of the weight into registers before it waits for the launch before it.
A word of 32 bits has eight values; each becomes 128 + value by two instructions on its bits. The 128 and the zero point
are subtracted from the sum of a group, times the sum of the group's inputs.
Legend: D input features, O output features, F half of gate and up, W words of a row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.products.triton_scales import Scales, blocks_of, scaling_arguments
from hookline.plugins.kernels.products.triton_thin import DTYPES, MAX_WIDTH_OF_ONE_ROW
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, launches_early, next_power_of_2

VALUES = 8
"""Values of a word."""
BLOCK_OUTPUTS = 8
"""Rows of the weight that a program reads, gate and up together, which share the inputs that it loads and widens."""


@triton.jit
def _value(words, PLACE: tl.constexpr):
    """128 + the value at PLACE of each word, in float32: 128 has the unit of its mantissa at bit 16."""
    if PLACE <= 4:
        bits = words << (16 - 4 * PLACE)
    else:
        bits = words >> (4 * PLACE - 16)
    return (bits & 0xF0000 | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _group_sums(sums, x_sums, scale, zero, GROUPS: tl.constexpr):
    """The sum of each row: of each group, less (128 + zero point) times the sum of its inputs, times its scale."""
    rows: tl.constexpr = sums.shape[0]
    group_words: tl.constexpr = sums.shape[1] // GROUPS
    of_groups = tl.sum(tl.reshape(sums, [rows, GROUPS, group_words]), axis=2)
    x_of_groups = tl.sum(tl.reshape(x_sums, [1, GROUPS, group_words]), axis=2)
    return tl.sum((of_groups - (zero + 128.0) * x_of_groups) * scale, axis=1)


@triton.jit
def _thin_int4_kernel(
    x_ptr, words_ptr, bias_ptr, out_ptr, scale_ptr, zero_ptr, scale_stride, num_words, num_out,
    SCALE_ROWS: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    word = tl.arange(0, BLOCK_W)
    there, outs = word < num_words, out < num_out
    inside = outs[:, None] & there[None, :]
    words_at = words_ptr + out.to(tl.int64)[:, None] * num_words + word[None, :]
    words = tl.load(words_at, mask=inside, other=0)
    up_words = words
    group_words: tl.constexpr = BLOCK_W // GROUPS
    scale, zero = blocks_of(scale_ptr, zero_ptr, scale_stride, out, outs, num_words, SCALE_ROWS, group_words, GROUPS)
    if SILU:
        up_words = tl.load(words_at + num_out.to(tl.int64) * num_words, mask=inside, other=0)
        up_scale, up_zero = blocks_of(
            scale_ptr, zero_ptr, scale_stride, out + num_out, outs, num_words, SCALE_ROWS, group_words, GROUPS
        )
    if BIAS:
        bias = tl.load(bias_ptr + out, mask=outs, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    sums = tl.zeros([BLOCK_O, BLOCK_W], tl.float32)
    up_sums = tl.zeros([BLOCK_O, BLOCK_W], tl.float32)
    x_sums = tl.zeros([1, BLOCK_W], tl.float32)
    for place in tl.static_range(8):
        x = tl.load(x_ptr + word * 8 + place, mask=there, other=0.0).to(tl.float32)[None, :]
        x_sums += x
        sums += _value(words, place) * x
        if SILU:
            up_sums += _value(up_words, place) * x
    y = _group_sums(sums, x_sums, scale, zero, GROUPS)
    if BIAS:
        y += bias
    if SILU:
        y = y / (1.0 + tl.exp(-y)) * _group_sums(up_sums, x_sums, up_scale, up_zero, GROUPS)
    tl.store(out_ptr + out, y.to(out_ptr.dtype.element_ty), mask=outs)


def fits_int4(x_TD: Tensor, data_OW: Tensor, scales: Scales) -> bool:
    """Whether `thin_int4` takes this row and weight: one row of whole groups of whole words.

    Device: looks at shapes, strides, addresses and dtypes only, so a captured graph keeps its answer.
    """
    width = data_OW.shape[1] * scales.packed
    return (
        x_TD.dim() == 2
        and x_TD.shape[0] == 1
        and x_TD.stride(1) == 1
        and x_TD.dtype in DTYPES
        and width <= MAX_WIDTH_OF_ONE_ROW
        and width % VALUES == 0
        and data_OW.is_contiguous()
        and data_OW.data_ptr() % 16 == 0
        and (x_TD.device.type == "cpu" or launches_early(x_TD.device))
    )


def thin_int4(x_TD: Tensor, data_OW: Tensor, scales: Scales, bias_O: Tensor | None, silu: bool = False) -> Tensor:
    """x @ W.T + b if `fits_int4`; with `silu`, silu(its first half) * its second half, which takes no bias.

    Shapes: (1, D) -> (1, O), or (1, O / 2) with silu.
    Device: one launch, no host sync. The weight is read before the launch before has finished: it must not write it.
    """
    assert bias_O is None or not silu
    num_out, words_OW = len(data_OW) // (2 if silu else 1), data_OW.view(torch.int32)
    out_TO = torch.empty((1, num_out), dtype=x_TD.dtype, device=x_TD.device)
    num_words = words_OW.shape[1]
    block_w = max(4, next_power_of_2(num_words), scales.columns // VALUES)
    block_o = BLOCK_OUTPUTS // 2 if silu else BLOCK_OUTPUTS
    _thin_int4_kernel[(cdiv(num_out, block_o),)](
        x_TD, words_OW, words_OW if bias_O is None else bias_O, out_TO, *scaling_arguments(scales), num_words, num_out,
        SCALE_ROWS=scales.rows, GROUPS=block_w * VALUES // scales.columns if scales.columns else 1,
        BIAS=bias_O is not None, SILU=silu, BLOCK_O=block_o, BLOCK_W=block_w,
        num_warps=max(1, min(8, block_w // 128)), **launch_options(x_TD.device),
    )  # fmt: skip
    return out_TO
