"""Triton products of one row with a weight in e4m3 whose width is no power of two: it is read in chunks.

Where triton_thin.py reads whole rows, a width of 5,120 takes the instructions of 8,192. A thread adds up its products
of all chunks, so that threads exchange their sums once; a program whose outputs lie in one block of scales loads each
scale once. Accumulation is float32.
Legend: D input features, O output features, F half of gate and up.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.products.triton_scales import Scales, loadable
from hookline.plugins.kernels.products.triton_thin import DTYPES
from hookline.plugins.kernels.triton_activations import widened
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, launches_early

LEAST_WIDTH = 4096
"""More input features than this have been measured."""
MAX_WIDTH = 32768
"""Most input features: a program holds its outputs' rows of the weight in registers."""
MAX_WIDTH_OF_OWN_SCALES = 8192
"""Most input features of a weight whose outputs have their own scales for blocks of inputs: a wider weight is faster
read in whole rows, since a thread loads scales for each output (docs/log)."""
MOST_OUTPUTS = 4
"""Most outputs of a program."""
PIECE = 8
"""Columns of a chunk that a thread adds up at once: they share a scale."""


@dataclass(frozen=True)
class RowCut:
    """Outputs of a program, of gate and up together, columns of a chunk, and warps."""

    block_o: int
    block_c: int
    num_warps: int


def row_cut(width: int) -> RowCut:
    """The fastest of three to five on an H200 at the shapes of Qwen3-8B and 32B (docs/log)."""
    if width <= 8192:
        return RowCut(MOST_OUTPUTS, 1024, 4)
    return RowCut(MOST_OUTPUTS, 2048, 8) if width <= 16384 else RowCut(2, 1024, 4)


@triton.jit
def load_chunk(weight_ptr, row, first, width, weight_stride, BLOCK_C: tl.constexpr, EVEN: tl.constexpr):
    """Columns of these rows of a weight, from `first` on: (rows, columns)."""
    column = first + tl.arange(0, BLOCK_C)[None, :]
    at = weight_ptr + row[:, None].to(tl.int64) * weight_stride + column
    if EVEN:
        weight = tl.load(at)
    else:
        weight = tl.load(at, mask=column < width, other=0.0)
    return weight


@triton.jit
def load_piece_scales(scale_ptr, row, first, width, scale_stride, SCALE_COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The scales of each piece of a chunk, of these rows of scales: (rows, pieces)."""
    piece = first + tl.arange(0, BLOCK_C // 8)[None, :] * 8  # PIECE
    at = scale_ptr + row[:, None] * scale_stride + piece // SCALE_COLUMNS
    return tl.load(at, mask=piece < width, other=0.0)


@triton.jit
def piece_sums(weight, x):
    """The sums of each piece of a chunk of the weight times a row of x: (rows, pieces)."""
    rows: tl.constexpr = weight.shape[0]
    pieces: tl.constexpr = weight.shape[1] // 8  # PIECE
    return tl.sum(tl.reshape(widened(weight, tl.float32) * x.to(tl.float32), [rows, pieces, 8]), axis=2)


@triton.jit
def _row_chunks_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, scale_ptr, width, weight_stride, scale_stride, num_out,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, SHARED: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SHARED: the outputs of a program, of gate and of up each, lie in the same blocks of scales."""
    if PDL:
        gdc_launch_dependents()
    OWN: tl.constexpr = BLOCK_O // 2 if SILU else BLOCK_O
    lane = tl.arange(0, BLOCK_O)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    out = tl.program_id(0) * OWN + lane % OWN
    row = tl.where(out < num_out, out, 0) + lane // OWN * num_out  # gate's rows, then up's
    first_row = tl.program_id(0) * OWN + tl.arange(0, 1)
    chunks = ()
    scales = ()
    for chunk in tl.static_range(CHUNKS):
        weight = load_chunk(weight_ptr, row, chunk * BLOCK_C, width, weight_stride, BLOCK_C, EVEN)
        chunks = chunks + (weight,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
        if SCALE_COLUMNS:
            if SHARED:
                scale = load_piece_scales(
                    scale_ptr, first_row // SCALE_ROWS, chunk * BLOCK_C, width, scale_stride, SCALE_COLUMNS, BLOCK_C
                )  # fmt: skip
                if SILU:
                    up_scale = load_piece_scales(
                        scale_ptr, (first_row + num_out) // SCALE_ROWS, chunk * BLOCK_C, width, scale_stride,
                        SCALE_COLUMNS, BLOCK_C,
                    )  # fmt: skip
                    scale = tl.where(lane[:, None] < OWN, scale, up_scale)
            else:
                scale = load_piece_scales(
                    scale_ptr, row // SCALE_ROWS, chunk * BLOCK_C, width, scale_stride, SCALE_COLUMNS, BLOCK_C
                )  # fmt: skip
            scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    if not SCALE_COLUMNS:
        row_scale = tl.load(scale_ptr + row // SCALE_ROWS * scale_stride)
    if BIAS:
        bias = tl.load(bias_ptr + own, mask=own < num_out, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    sums = tl.zeros([BLOCK_O, BLOCK_C // 8], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        column = chunk * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        if EVEN:
            x = tl.load(x_ptr + column)
        else:
            x = tl.load(x_ptr + column, mask=column < width, other=0.0)
        part = piece_sums(chunks[chunk], x)
        if SCALE_COLUMNS:
            part *= scales[chunk]
        sums += part
    y = tl.sum(sums, axis=1)
    if not SCALE_COLUMNS:
        y *= row_scale
    if SILU:
        gate, up = tl.split(tl.trans(tl.reshape(y, [2, OWN])))
        y = gate / (1.0 + tl.exp(-gate)) * up
    if BIAS:
        y += bias
    tl.store(out_ptr + own, y.to(out_ptr.dtype.element_ty), mask=own < num_out)


def fits_chunks(x_TD: Tensor, weight_OD: Tensor, scales: Scales) -> bool:
    """Whether `chunked_row` takes these, and is faster than the thin product.

    Device: looks at shapes, strides and dtypes only, so a captured graph keeps its answer.
    """
    width = weight_OD.shape[1]
    has_own = scales.columns != 0 and scales.rows % MOST_OUTPUTS != 0
    return (
        x_TD.dim() == 2
        and x_TD.shape[0] == 1
        and LEAST_WIDTH < width <= (MAX_WIDTH_OF_OWN_SCALES if has_own else MAX_WIDTH)
        and width & (width - 1) != 0
        and width % PIECE == 0
        and weight_OD.dtype is torch.float8_e4m3fn
        and x_TD.dtype in DTYPES
        and x_TD.stride(1) == 1
        and weight_OD.stride(1) == 1
        and (x_TD.device.type == "cpu" or launches_early(x_TD.device))
    )


def chunked_row(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, scales: Scales, *, silu: bool = False
) -> Tensor:
    """x @ W.T + b of what `fits_chunks`; with `silu`, silu(first half of it) * second half, which takes no bias.

    Shapes: (1, D) -> (1, O), or (1, O / 2) with silu.
    Device: one launch, no host sync. The weight is read before the launch before has finished: it must not write it.
    """
    assert bias_O is None or not silu
    width, num_out = x_TD.shape[1], len(weight_OD) // (2 if silu else 1)
    cut = row_cut(width)
    own, chunks = cut.block_o // (2 if silu else 1), cdiv(width, cut.block_c)
    is_shared = scales.rows % own == 0 and (not silu or num_out % own == 0)
    out_TO = torch.empty((1, num_out), dtype=x_TD.dtype, device=x_TD.device)
    _row_chunks_kernel[(cdiv(num_out, own),)](
        x_TD, loadable(weight_OD), x_TD if bias_O is None else bias_O, out_TO, scales.factors_RC, width,
        weight_OD.stride(0), scales.factors_RC.stride(0), num_out, SCALE_ROWS=scales.rows,
        SCALE_COLUMNS=scales.columns, SHARED=is_shared, BIAS=bias_O is not None, SILU=silu, BLOCK_O=cut.block_o,
        BLOCK_C=cut.block_c, CHUNKS=chunks, EVEN=chunks * cut.block_c == width, num_warps=cut.num_warps,
        **launch_options(x_TD.device),
    )  # fmt: skip
    return out_TO
