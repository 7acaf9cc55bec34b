"""Weights stored in e4m3 with scales, as kernels of products take them: each value is widened in registers.

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

from hookline.plugins.kernels.triton_launch import cdiv, next_power_of_2

CONVERTS = (8, 9)
"""From this compute capability on, cards have instructions that widen e4m3. Others take the bits apart."""
COLUMNS = 1024
"""Values of a row that a program of `dequantised` takes."""


@dataclass(frozen=True, eq=False)
class Scales:
    """Factors of a weight (O, D): one for each block of `rows` outputs by `columns` inputs, 0 for all inputs.

    factors_RC: (ceil(O / rows), ceil(D / columns)) float32, contiguous. Columns are a power of 2.
    """

    factors_RC: Tensor
    rows: int = 1
    columns: int = 0


def scaling_arguments(scales: Scales | None) -> tuple[Tensor | None, int | None]:
    """A kernel's arguments `scale_ptr, scale_stride`."""
    return (None, None) if scales is None else (scales.factors_RC, scales.factors_RC.stride(0))


def scaling_constants(scales: Scales | None) -> dict[str, Any]:
    """What a kernel is compiled with for them: SCALE_ROWS 0 means no scales, SCALE_COLUMNS 0 all inputs."""
    if scales is None:
        return {"SCALE_ROWS": 0, "SCALE_COLUMNS": 0}
    return {"SCALE_ROWS": scales.rows, "SCALE_COLUMNS": scales.columns}


@cache
def converts(device: torch.device) -> bool:
    """Whether kernels may take e4m3 as such; else they take its bits, as uint8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= CONVERTS


def loadable(data_OD: Tensor) -> Tensor:
    """A weight in e4m3 as this card's kernels take it."""
    return data_OD if converts(data_OD.device) else data_OD.view(torch.uint8)


@triton.jit
def widened(values, dtype: tl.constexpr):
    """Values of e4m3, or its bits, in another dtype; values of that dtype as they are.

    The bits of e4m3 in the place of float16's are the value times 2^-8, its denormal values too.
    """
    if values.dtype == tl.uint8:
        bits = values.to(tl.uint16)
        half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        wide = (half.to(tl.float32) * 256.0).to(dtype)
    else:
        wide = values.to(dtype)
    return wide


@triton.jit
def rounded(x):
    """Each row of x in e4m3, and what to multiply it by. A row of zeros stays so."""
    largest = tl.maximum(tl.max(tl.abs(x).to(tl.float32), axis=1), 1e-20)
    return (x.to(tl.float32) * (448.0 / largest)[:, None]).to(tl.float8e4nv), largest * (1.0 / 448.0)


@triton.jit
def add_step(
    acc, weight, x, unit, scale_ptr, scale_stride, out, outs, first, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The accumulator with the product of one step, from input `first` on, times its scales if it has any.

    unit: with UNIT, what else to multiply by.
    """
    if UNIT or SCALE_COLUMNS:
        part = tl.dot(widened(weight, x.dtype), x.T, input_precision=PRECISION)
        if UNIT:
            part *= unit
        if SCALE_COLUMNS:
            scale_at = scale_ptr + out // SCALE_ROWS * scale_stride + first // SCALE_COLUMNS
            part *= tl.load(scale_at, mask=outs, other=0.0)[:, None]
        acc += part
    else:
        acc = tl.dot(widened(weight, x.dtype), x.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _dequantise_kernel(
    data_ptr, scale_ptr, scale_stride, out_ptr, width, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    scale_at = scale_ptr + row // SCALE_ROWS * scale_stride
    if SCALE_COLUMNS:
        scale = tl.load(scale_at + column // SCALE_COLUMNS, mask=inside, other=0.0)
    else:
        scale = tl.load(scale_at)
    value = widened(tl.load(data_ptr + row * width + column, mask=inside, other=0.0), tl.float32)
    tl.store(out_ptr + row * width + column, (value * scale).to(out_ptr.dtype.element_ty), mask=inside)


def dequantised(data_OD: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """The weight in this dtype: (O, D), contiguous.

    Device: one launch, no host sync.
    """
    out_OD = torch.empty(data_OD.shape, dtype=dtype, device=data_OD.device)
    num_out, width = data_OD.shape
    block = min(COLUMNS, next_power_of_2(width))
    _dequantise_kernel[(num_out, cdiv(width, block))](
        loadable(data_OD), *scaling_arguments(scales), out_OD, width, **scaling_constants(scales), BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out_OD
