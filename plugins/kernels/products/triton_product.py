"""Triton products of up to 256 rows with the weight matrices of a small model, for its decode steps.

Such a product costs more for its launch and the weight's way from memory than for its arithmetic. So a program asks for
its part of the weight before it waits for the launch before it, and a product that a norm follows is cut along the
input features too, its parts added up by the norm. Accumulation is float32.
Legend: T rows, D input features, O output features, F half of gate and up, P parts.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.products.operands import has_aligned_rows
from hookline.plugins.kernels.triton_card import Card, Room, first_fitting
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, launches_early

MAX_WEIGHT = 6 << 20
"""Most elements of a weight: beside the time to read a larger weight, a launch hardly counts."""
MIN_PROGRAMS = 64
"""Fewest programs: fewer leave half of an H200 idle, and the general product then cuts finer."""
MOST_WIDTH = 1024
"""Most input features of a plain product of more than 128 rows: deeper ones keep few programs busy for long."""
DTYPES = (torch.bfloat16, torch.float16)


class Kind(Enum):
    """The last operation of a kernel on its product."""

    PLAIN = "plain"
    SILU = "silu"
    """silu(first half) * second half."""
    PARTS = "parts"
    """Stored as float32 parts, which a norm adds up."""


@dataclass(frozen=True)
class ProductTiling:
    """How a product is cut: rows and output features of a program, input features of a step, parts, pipelining."""

    block_t: int
    block_o: int
    block_d: int
    num_stages: int
    num_warps: int = 4
    parts: int = 1


def product_tiling(kind: Kind, num_rows: int, width: int) -> ProductTiling | None:
    """The fastest tiling on an H200 at Qwen3-0.6B's shapes (docs/log); None if the general product is faster."""
    if num_rows <= 64 and kind is Kind.PARTS:
        block_t = 16 if num_rows <= 16 and width > 2048 else 64
        all_at_once = cdiv(width // 4, 128) + 1
        return ProductTiling(block_t, 32, 128, num_stages=min(all_at_once, 8), parts=4)
    if num_rows <= 16:
        return ProductTiling(16, 32, 128, num_stages=4)
    if num_rows <= 32:
        return ProductTiling(32, 32, 128, 4) if kind is Kind.PLAIN else ProductTiling(64, 32, 64, 5)
    if num_rows <= 64:
        return ProductTiling(64, 32, 128 if kind is Kind.PLAIN else 64, num_stages=8)
    if num_rows <= 128:
        if kind is Kind.PARTS and width <= 2048:
            return ProductTiling(64, 32, 128, num_stages=4, parts=2)
        return ProductTiling(
            64, 64, 64, num_stages=5 if kind is Kind.PLAIN else 4, parts=4 if kind is Kind.PARTS else 1
        )
    if num_rows <= 256 and (kind is Kind.PARTS or (kind is Kind.PLAIN and width <= MOST_WIDTH)):
        return ProductTiling(128, 64, 64, num_stages=4, num_warps=8, parts=4 if kind is Kind.PARTS else 1)
    return None


def fitting_tiling(kind: Kind, x_TD: Tensor, weight_OD: Tensor) -> ProductTiling | None:
    """The tiling for these rows and weight, or None if the general product takes them.

    Device: looks at shapes, strides, addresses and dtypes only, so a captured graph keeps its answer.
    """
    if x_TD.dim() != 2 or x_TD.dtype not in DTYPES or x_TD.dtype != weight_OD.dtype or not len(x_TD):
        return None
    if x_TD.stride(1) != 1 or not has_aligned_rows(weight_OD) or weight_OD.numel() > MAX_WEIGHT:
        return None
    if x_TD.device.type == "cuda" and not launches_early(x_TD.device):
        return None
    num_out, width = weight_OD.shape[0] // (2 if kind is Kind.SILU else 1), weight_OD.shape[1]
    tiling = _tiling(kind, len(x_TD), width, Card.of(x_TD.device))
    if tiling is None or width % (tiling.parts * tiling.block_d) or num_out % tiling.block_o:
        return None
    num_programs = num_out // tiling.block_o * cdiv(len(x_TD), tiling.block_t) * tiling.parts
    return tiling if num_programs >= MIN_PROGRAMS else None


@cache
def _tiling(kind: Kind, num_rows: int, width: int, card: Card) -> ProductTiling | None:
    """`product_tiling` with as many stages as the card has room for; None if it has none, too."""

    def room(one: ProductTiling) -> Room:
        return Room((one.block_t + one.block_o * (2 if kind is Kind.SILU else 1)) * one.block_d * 2)

    tiling = product_tiling(kind, num_rows, width)
    return None if tiling is None else first_fitting([tiling], room, card)


@triton.jit
def _ask_for(address, NUM_BYTES: tl.constexpr, used):
    """Fetch NUM_BYTES (a multiple of 16) from each address where `used` into the L2."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,n", [address.to(tl.int64, bitcast=True), used.to(tl.int32), NUM_BYTES],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_out, x_stride, weight_stride, part_stride,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    part = tl.program_id(2)
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = part * WIDTH + tl.arange(0, BLOCK_D)
    up_offset = num_out.to(tl.int64) * weight_stride
    if BIAS:
        bias = tl.load(bias_ptr + out).to(tl.float32)
    if PDL:
        piece = tl.arange(0, BLOCK_O * PIECES)  # of a row of the weight; one for each thread
        piece_out = (tl.program_id(0) * BLOCK_O + piece // PIECES).to(tl.int64)
        piece_ptr = weight_ptr + piece_out * weight_stride + part * WIDTH + piece % PIECES * (WIDTH // PIECES)
        first = (piece >= 0) & (tl.program_id(1) == 0)
        _ask_for(piece_ptr, WIDTH // PIECES * 2, first)
        if SILU:
            _ask_for(piece_ptr + up_offset, WIDTH // PIECES * 2, first)
        gdc_wait()
    inside = row < num_rows
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    weight_at = weight_ptr + out.to(tl.int64)[:, None] * weight_stride + column[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    up_acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        x = tl.load(x_at + start, mask=inside[:, None], other=0.0)
        weight = tl.load(weight_at + start)
        acc = tl.dot(x, tl.trans(weight), acc)
        if SILU:
            up = tl.load(weight_at + up_offset + start)
            up_acc = tl.dot(x, tl.trans(up), up_acc)
    if BIAS:
        acc += tl.where(part == 0, bias, 0.0)[None, :]
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    to_out = out_ptr + part.to(tl.int64) * part_stride + row.to(tl.int64)[:, None] * num_out + out[None, :]
    tl.store(to_out, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def product(kind: Kind, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, tiling: ProductTiling) -> Tensor:
    """x @ W.T + b of what `fitting_tiling` takes; SILU takes no bias.

    Shapes: (T, D) -> (T, O) for PLAIN, (T, O / 2) for SILU, (P, T, O) float32 for PARTS, whose sum is the product.
    Device: one launch, no host sync. The weight is read before the launch before has finished: it must not write it.
    """
    assert bias_O is None or kind is not Kind.SILU
    (num_rows, width), num_out = x_TD.shape, weight_OD.shape[0] // (2 if kind is Kind.SILU else 1)
    if kind is Kind.PARTS:
        out = torch.empty((tiling.parts, num_rows, num_out), dtype=torch.float32, device=x_TD.device)
    else:
        out = torch.empty((num_rows, num_out), dtype=x_TD.dtype, device=x_TD.device)
    grid = (num_out // tiling.block_o, cdiv(num_rows, tiling.block_t), tiling.parts)
    _product_kernel[grid](
        x_TD, weight_OD, weight_OD if bias_O is None else bias_O, out, num_rows, num_out,
        x_TD.stride(0), weight_OD.stride(0), num_rows * num_out,
        WIDTH=width // tiling.parts, BIAS=bias_O is not None, SILU=kind is Kind.SILU,
        BLOCK_T=tiling.block_t, BLOCK_O=tiling.block_o, BLOCK_D=tiling.block_d,
        PIECES=max(1, 32 * tiling.num_warps // tiling.block_o),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **launch_options(x_TD.device),
    )  # fmt: skip
    return out
