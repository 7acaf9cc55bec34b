"""Rounds activations to e4m3 with scales, for products of two operands in e4m3.

The largest value that shares a scale becomes e4m3's largest. Legend: T rows, D features, F half of gate and up, G
groups of a row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.products.triton_scales import rounded
from hookline.plugins.kernels.products.triton_wide import empty_with_room
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, next_power_of_2

ALIGNED_ROWS = 4
"""The number of rows with scales of groups is a multiple of this: torch's product of blocks needs it."""


@dataclass(frozen=True, eq=False)
class RoundedRows:
    """Rows in e4m3 with scales, each about values * scales; padding rows may follow the last row.

    values_TD: (T, D) float8_e4m3fn. scales_TG: (T, 1), or (T, G) for G groups of columns, float32, the scales of a
    group one after the other in memory. num_rows: rows without padding.
    """

    values_TD: Tensor
    scales_TG: Tensor
    num_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        """(T, D) of the rows without padding."""
        return self.num_rows, self.values_TD.shape[1]

    def __len__(self) -> int:
        """The number of rows without padding."""
        return self.num_rows


@triton.jit(do_not_specialize=["scale_stride"])
def _round_rows_kernel(
    x_ptr, out_ptr, scale_ptr, order_ptr, row_stride, scale_stride, width, num_chosen,
    SILU: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    of_row = row
    if order_ptr is not None:
        of_row = (tl.load(order_ptr + row) // num_chosen).to(tl.int64)
    group = tl.arange(0, BLOCK // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    x = tl.load(x_ptr + of_row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(x_ptr + of_row * row_stride + width + column, mask=inside, other=0.0).to(tl.float32)
        x = x / (1.0 + tl.exp(-x)) * up
    values, scale = rounded(x)
    tl.store(out_ptr + row * width + column, values, mask=inside)
    tl.store(scale_ptr + group * scale_stride + row, scale, mask=group * GROUP < width)


def empty_rounded(num_rows: int, width: int, columns: int, device: torch.device) -> RoundedRows:
    """Memory for rows in e4m3 with scales of groups of this many columns, 0 for all; uninitialised."""
    aligned_rows = cdiv(num_rows, ALIGNED_ROWS) * ALIGNED_ROWS if columns else num_rows
    like = torch.empty(0, dtype=torch.float8_e4m3fn, device=device)
    values_TD = empty_with_room(aligned_rows, width, like=like)
    scales_GT = torch.empty((cdiv(width, columns or width), aligned_rows), dtype=torch.float32, device=device)
    return RoundedRows(values_TD, scales_GT.t(), num_rows)


def round_rows(
    x_TD: Tensor, columns: int = 0, *, silu: bool = False, order_P: Tensor | None = None, num_chosen: int = 1
) -> RoundedRows:
    """x in e4m3; with `silu`, silu(first half of x) * second half. columns: of a group, a power of 2; 0 for all.

    order_P: pair numbers (token * num_chosen + place) in an order; each pair's row is then its token's.
    Shapes: (T, D), or (T, 2F) with silu; of the result (T, D), or (P, D) with order_P.
    Device: one launch, no host sync.
    """
    num_rows, width = len(x_TD if order_P is None else order_P), x_TD.shape[1] // (2 if silu else 1)
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    rounded = empty_rounded(num_rows, width, columns, x_TD.device)
    block = next_power_of_2(width)
    if num_rows:
        _round_rows_kernel[(num_rows,)](
            x_TD, rounded.values_TD, rounded.scales_TG, order_P, x_TD.stride(0), rounded.scales_TG.stride(1), width,
            num_chosen, SILU=silu, BLOCK=block, GROUP=min(columns or block, block),
            num_warps=max(1, min(16, block // 512)), **launch_options(x_TD.device),
        )  # fmt: skip
    return rounded
