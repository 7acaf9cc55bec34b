"""Triton products of very few rows with a weight matrix: limited by reading the weight once, not by arithmetic.

A program reads whole rows of the weight into registers before it waits for the launch before it (programmatic dependent
launch), so that the weight streams in while the previous kernel still runs; accumulation is float32. A weight in e4m3
is widened in registers; the sum of each of its scale's blocks is multiplied by that scale.
Legend: T rows, D input features, O output features, F half of gate and up.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.peer_memory.triton_slots import Sends, send_tile, sending_arguments, sending_constants
from hookline.plugins.kernels.products.triton_scales import (
    Scales,
    loadable,
    scaling_arguments,
    scaling_constants,
)
from hookline.plugins.kernels.triton_activations import gelu_tanh, widened
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, launches_early, next_power_of_2

MAX_ROWS = 4
"""Most rows a thin product takes."""
MAX_WIDTH = 4096
"""Most input features: a program holds whole rows of the weight in registers."""
MAX_WIDTH_OF_ONE_ROW = 16384
"""Most input features for a single row, which leaves registers for a wider weight (docs/log, several GPUs)."""
MOST_PRODUCTS = 24 << 20
"""Most rows times elements of the weight, of two or more rows in 16 bits. Rows are multiplied one after the other,
which takes longer than to read a larger weight (docs/log, 2026-11-28)."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _scales(
    scale_ptr, scale_stride, out, outs, width, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The scales of these outputs, of all blocks of inputs: (outputs, blocks)."""
    block = tl.arange(0, BLOCKS)
    there = outs[:, None] & (block * SCALE_COLUMNS < width)[None, :]
    return tl.load(scale_ptr + out[:, None] // SCALE_ROWS * scale_stride + block[None, :], mask=there, other=0.0)


@triton.jit
def _scaled_sum(products, scale, BLOCKS: tl.constexpr):
    """The sums of each row, block by block times its scale."""
    outs: tl.constexpr = products.shape[0]
    return tl.sum(tl.sum(tl.reshape(products, [outs, BLOCKS, products.shape[1] // BLOCKS]), axis=2) * scale, axis=1)


@triton.jit(do_not_specialize=["rank"])
def _thin_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, addresses, counts, rank, x_stride, weight_stride, width, num_out,
    scale_ptr, zero_ptr, scale_stride, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SEND: tl.constexpr,
    SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    if PDL and not SEND:
        gdc_launch_dependents()
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.arange(0, BLOCK_D)
    columns, outs = column < width, out < num_out
    inside = outs[:, None] & columns[None, :]
    weight_at = weight_ptr + out.to(tl.int64)[:, None] * weight_stride + column[None, :]
    weight = tl.load(weight_at, mask=inside, other=0.0)
    up = weight
    if GATED:
        up_at = weight_ptr + (out.to(tl.int64) + num_out)[:, None] * weight_stride + column[None, :]
        up = tl.load(up_at, mask=inside, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + out, mask=outs, other=0.0).to(tl.float32)
    if SCALE_ROWS:
        BLOCKS: tl.constexpr = BLOCK_D // SCALE_COLUMNS if SCALE_COLUMNS else 1
        scale = _scales(scale_ptr, scale_stride, out, outs, width, SCALE_ROWS, SCALE_COLUMNS, BLOCKS)
        if GATED:
            up_scale = _scales(scale_ptr, scale_stride, out + num_out, outs, width, SCALE_ROWS, SCALE_COLUMNS, BLOCKS)
    if PDL:
        gdc_wait()
    if PDL and SEND:
        gdc_launch_dependents()  # the sum after it relies on all before it being done
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * x_stride + column, mask=columns, other=0.0).to(tl.float32)[None, :]
        if SCALE_ROWS:
            y = _scaled_sum(widened(weight, tl.float32) * x, scale, BLOCKS)
        else:
            y = tl.sum(weight.to(tl.float32) * x, axis=1)
        if BIAS:
            y += bias
        if GATED:
            y = gelu_tanh(y) if GELU else y / (1.0 + tl.exp(-y))
            if SCALE_ROWS:
                y *= _scaled_sum(widened(up, tl.float32) * x, up_scale, BLOCKS)
            else:
                y *= tl.sum(up.to(tl.float32) * x, axis=1)
        dtype = out_ptr.dtype.element_ty
        if SEND:
            of_rows = row + tl.arange(0, 1)
            first_out = tl.program_id(0) * BLOCK_O
            send_tile(
                y[None, :], first_out, of_rows, ROWS, addresses, counts, rank, dtype, SIZE, SLOT_BYTES, PART, 1, BLOCK_O
            )
        else:
            tl.store(out_ptr + row * num_out + out, y.to(dtype), mask=outs)


def fits(x_TD: Tensor, weight_OD: Tensor) -> bool:
    """Whether the thin products take these rows, and are known to be faster than the general products on this card.

    Device: looks at shapes, strides and dtypes only, so a captured graph keeps its answer.
    """
    return (
        x_TD.dim() == 2
        and 1 <= x_TD.shape[0] <= MAX_ROWS
        and weight_OD.shape[1] <= (MAX_WIDTH_OF_ONE_ROW if x_TD.shape[0] == 1 else MAX_WIDTH)
        and (len(x_TD) == 1 or len(x_TD) * weight_OD.numel() <= MOST_PRODUCTS or x_TD.dtype == torch.float32)
        and x_TD.dtype in DTYPES
        and x_TD.dtype == weight_OD.dtype
        and x_TD.stride(1) == 1
        and weight_OD.stride(1) == 1
        and (x_TD.device.type == "cpu" or launches_early(x_TD.device))
    )


def fits_scaled(x_TD: Tensor, weight_OD: Tensor) -> bool:
    """As `fits`, for a weight in e4m3 or int8: one row, since widening takes as long as reading does.

    Device: as `fits`.
    """
    return (
        x_TD.dim() == 2
        and x_TD.shape[0] == 1
        and weight_OD.shape[1] <= MAX_WIDTH_OF_ONE_ROW
        and x_TD.dtype in DTYPES
        and x_TD.stride(1) == 1
        and (x_TD.device.type == "cpu" or launches_early(x_TD.device))
    )


def _tiling(block_d: int, gated: bool) -> tuple[int, int]:
    """Output rows and warps of a program: the fastest on an H200 at Qwen3-0.6B's shapes (docs/log)."""
    block_o, num_warps = (4, 1) if block_d <= 1024 else (4, 4) if block_d <= 2048 else (2, 8)
    return (block_o // 2 if gated else block_o), num_warps


def _scaled_tiling(block_d: int, gated: bool) -> tuple[int, int]:
    """Output rows and warps for a weight in e4m3: the fastest on an H100 at Qwen3-8B's shapes (docs/log.md)."""
    return (2, max(1, min(8, block_d // 1024))) if gated else (4, max(1, min(8, block_d // 512)))


def thin_linear(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, silu: bool = False, scales: Scales | None = None,
    *, gelu: bool = False,
) -> Tensor:  # fmt: skip
    """x @ W.T + b of rows that `fits`, or with scales `fits_scaled`; with `silu`, silu(first half) * second half.

    gelu: gelu in its tanh form of the first half in place of silu.
    Shapes: (T, D) -> (T, O), or (T, O / 2) with silu or gelu, which take no bias.
    Device: one launch, no host sync. The weight is read before the launch before has finished: it must not write it.
    """
    gated = silu or gelu
    assert bias_O is None or not gated
    out_TO = torch.empty((len(x_TD), len(weight_OD) // (2 if gated else 1)), dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, weight_OD, bias_O, out_TO, None, gated=gated, gelu=gelu, scales=scales)
    return out_TO


def fits_float32(x_TD: Tensor, weight_OD: Tensor) -> bool:
    """As `fits`, for a product in float32 of rows in 16 bits.

    Device: as `fits`.
    """
    return (
        x_TD.dim() == 2
        and 1 <= x_TD.shape[0] <= MAX_ROWS
        and weight_OD.shape[1] <= MAX_WIDTH_OF_ONE_ROW
        and x_TD.element_size() == 2
        and weight_OD.dtype == torch.float32
        and x_TD.stride(1) == weight_OD.stride(1) == 1
        and (x_TD.device.type == "cpu" or launches_early(x_TD.device))
    )


def thin_linear_float32(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
    """`thin_linear` of rows that `fits_float32`, in float32. Device: as `thin_linear`."""
    out_TO = torch.empty((len(x_TD), len(weight_OD)), dtype=torch.float32, device=x_TD.device)
    tiling = 1, max(1, min(8, _block_d(x_TD.shape[1]) // 512))
    _launch(x_TD, weight_OD, None, out_TO, None, gated=False, tiling=tiling)
    return out_TO


def sends_thin(x_TD: Tensor, weight_OD: Tensor, sends: Sends) -> bool:
    """Whether `send_thin_linear` takes these rows, which must be accepted by `fits`."""
    block_o, _ = _tiling(_block_d(x_TD.shape[1]), gated=False)
    return x_TD.element_size() == 2 and sends.takes(weight_OD.shape[0], block_o)


def send_thin_linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, sends: Sends) -> None:
    """`thin_linear`, its outputs sent to the ranks that sum them up, for rows that `sends_thin` accepts.

    Device: one launch, no host sync, waits for no rank. Weight: see thin_linear.
    """
    _launch(x_TD, weight_OD, bias_O, x_TD, sends, gated=False)


def _block_d(width: int) -> int:
    return int(max(16, next_power_of_2(width)))


def _launch(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, out_TO: Tensor, sends: Sends | None, *, gated: bool,
    gelu: bool = False, scales: Scales | None = None, tiling: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    (num_rows, width), num_out = x_TD.shape, weight_OD.shape[0] // (2 if gated else 1)
    block_d = max(_block_d(width), scales.columns if scales else 0)
    block_o, num_warps = tiling or (_tiling if scales is None else _scaled_tiling)(block_d, gated)
    _thin_linear_kernel[(cdiv(num_out, block_o),)](
        x_TD, loadable(weight_OD), weight_OD if bias_O is None else bias_O, out_TO, *sending_arguments(sends, x_TD),
        x_TD.stride(0), weight_OD.stride(0), width, num_out,
        *scaling_arguments(scales), **scaling_constants(scales),
        ROWS=num_rows, BIAS=bias_O is not None, GATED=gated, GELU=gelu,
        **sending_constants(sends, num_out), BLOCK_O=block_o, BLOCK_D=block_d, num_warps=num_warps,
        **launch_options(x_TD.device),
    )  # fmt: skip
