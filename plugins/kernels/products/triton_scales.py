"""Weights stored in e4m3, int8 or int4 with scales, as kernels of products take them: values are widened in registers.

A sum of one scale's inputs is multiplied by that scale in float32, never a value, so that widening is exact.
Legend: O output features, D input features, R and C blocks of them.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.plugins.kernels.triton_activations import widened
from hookline.plugins.kernels.triton_launch import cdiv, next_power_of_2

CONVERTS = (8, 9)
"""From this compute capability on, cards have instructions that widen e4m3. Others take the bits apart."""
HALF_INT4 = 8
"""The zero point of int4 where a weight has no zero points of its own: code 0 is -8."""
COLUMNS = 1024
"""Values of a row that a program of `dequantised` takes."""


@dataclass(frozen=True, eq=False)
class Scales:
    """Factors of a weight (O, D): one for each block of `rows` outputs by `columns` inputs, 0 for all inputs.

    factors_RC: (ceil(O / rows), ceil(D / columns)) float32, contiguous; of experts, which are (X, O, D), with a first
    dimension X. Columns are a power of 2. packed: how many values a byte has: 2 of int4, 0 to 15, the even input in its
    low half. zeros_RC: zero points of int4, of the shape of the factors; None: HALF_INT4.
    """

    factors_RC: Tensor
    rows: int = 1
    columns: int = 0
    packed: int = 1
    zeros_RC: Tensor | None = None


def scaling_arguments(scales: Scales | None) -> tuple[Tensor | None, Tensor | None, int | None]:
    """A kernel's arguments `scale_ptr, zero_ptr, scale_stride`."""
    return (None, None, None) if scales is None else (scales.factors_RC, scales.zeros_RC, scales.factors_RC.stride(0))


def expert_scaling_arguments(scales: Scales | None) -> tuple[Tensor | None, Tensor | None, int | None, int | None]:
    """The same for weights of experts, and `expert_scale_stride`."""
    if scales is None:
        return None, None, None, None
    return scales.factors_RC, scales.zeros_RC, scales.factors_RC.stride(1), scales.factors_RC.stride(0)


def scaling_constants(scales: Scales | None) -> dict[str, Any]:
    """A kernel's compile-time constants for scales: SCALE_ROWS 0 means no scales, SCALE_COLUMNS 0 all inputs."""
    if scales is None:
        return {"SCALE_ROWS": 0, "SCALE_COLUMNS": 0, "PACKED": 1}
    return {"SCALE_ROWS": scales.rows, "SCALE_COLUMNS": scales.columns, "PACKED": scales.packed}


@cache
def converts(device: torch.device) -> bool:
    """Whether kernels may take e4m3 as such; else they take its bits, as uint8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= CONVERTS


def loadable(data_OD: Tensor) -> Tensor:
    """A weight as this card's kernels take it: e4m3 as its bits where `converts` is False."""
    if data_OD.dtype is not torch.float8_e4m3fn or converts(data_OD.device):
        return data_OD
    return data_OD.view(torch.uint8)


@triton.jit
def rounded(x):
    """Each row of x in e4m3, and its scale, the factor to multiply it by. A row of zeros stays zero."""
    largest = tl.maximum(tl.max(tl.abs(x).to(tl.float32), axis=1), 1e-20)
    return (x.to(tl.float32) * (448.0 / largest)[:, None]).to(tl.float8e4nv), largest * (1.0 / 448.0)


@triton.jit
def add_step(
    acc, weight, x, unit, scale_ptr, zero_ptr, scale_stride, out, outs, first, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The accumulator with the product of one step, from input `first` on, times its scales if it has any.

    unit: with UNIT, a further factor of the product.
    """
    if SCALE_ROWS:
        block = out // SCALE_ROWS * scale_stride + (first // SCALE_COLUMNS if SCALE_COLUMNS else 0)
    if PACKED == 2:
        zero = 8.0  # HALF_INT4
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + block, mask=outs, other=0.0)[:, None].to(x.dtype)
        values = (tl.interleave(weight & 15, weight >> 4).to(x.dtype) - zero).to(x.dtype)
    else:
        values = widened(weight, x.dtype)
    if UNIT or SCALE_COLUMNS:
        part = tl.dot(values, x.T, input_precision=PRECISION)
        if UNIT:
            part *= unit
        if SCALE_COLUMNS:
            part *= tl.load(scale_ptr + block, mask=outs, other=0.0)[:, None]
        acc += part
    else:
        acc = tl.dot(values, x.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def blocks_of(
    scale_ptr, zero_ptr, scale_stride, out, outs, width, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of these outputs, of all blocks of inputs: (outputs, blocks) each."""
    block = tl.arange(0, BLOCKS)
    there = outs[:, None] & (block * SCALE_COLUMNS < width)[None, :]
    at = (out // SCALE_ROWS * scale_stride)[:, None] + block[None, :]
    zero = tl.zeros([out.shape[0], BLOCKS], tl.float32) + 8.0  # HALF_INT4
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + at, mask=there, other=0.0)
    return tl.load(scale_ptr + at, mask=there, other=0.0), zero


@triton.jit
def scaled_sums(stored, x, scale, zero, PACKED: tl.constexpr, BLOCKS: tl.constexpr):
    """The sums of a weight's rows times x, block by block times its scale: (outputs,).

    stored: whole rows (outputs, inputs / PACKED). x: (outputs, inputs) or (1, inputs) float32. scale, zero: as of
    `blocks_of`.
    """
    if PACKED == 2:
        values = tl.interleave(stored & 15, stored >> 4).to(tl.float32)
    else:
        values = widened(stored, tl.float32)
    depth: tl.constexpr = values.shape[1] // BLOCKS
    values = tl.reshape(values, [values.shape[0], BLOCKS, depth])
    if PACKED == 2:
        values -= zero[:, :, None]
    return tl.sum(tl.sum(values * tl.reshape(x, [x.shape[0], BLOCKS, depth]), axis=2) * scale, axis=1)


@triton.jit
def _dequantise_kernel(
    data_ptr, scale_ptr, zero_ptr, scale_stride, out_ptr, width, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    block = row // SCALE_ROWS * scale_stride + (column // SCALE_COLUMNS if SCALE_COLUMNS else column * 0)
    scale = tl.load(scale_ptr + block, mask=inside, other=0.0)
    stored = tl.load(data_ptr + row * (width // PACKED) + column // PACKED, mask=inside, other=0.0)
    if PACKED == 2:
        zero = 8.0  # HALF_INT4
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + block, mask=inside, other=0.0)
        value = (stored >> (column % 2 * 4).to(tl.uint8) & 15).to(tl.float32) - zero
    else:
        value = widened(stored, tl.float32)
    tl.store(out_ptr + row * width + column, (value * scale).to(out_ptr.dtype.element_ty), mask=inside)


def dequantised(data_OD: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """The weight in this dtype: (O, D), contiguous.

    Device: one launch, no host sync.
    """
    num_out, width = data_OD.shape[0], data_OD.shape[1] * scales.packed
    out_OD = torch.empty((num_out, width), dtype=dtype, device=data_OD.device)
    block = min(COLUMNS, next_power_of_2(width))
    _dequantise_kernel[(num_out, cdiv(width, block))](
        loadable(data_OD), *scaling_arguments(scales), out_OD, width, **scaling_constants(scales), BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out_OD
