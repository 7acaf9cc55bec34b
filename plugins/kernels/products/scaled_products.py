"""Chooses the kernel that multiplies rows by a weight in e4m3, int8 or int4, by their number.

One row: the thin products, which widen the weight in registers, or triton_row_chunks.py for a width in e4m3 between
powers of two. Up to 128 rows on a Hopper card: the wide product, whose matrix units take e4m3 on both sides if rows may
be rounded. More rows: torch's product of two operands in e4m3. For all other cases (other cards, unaligned weights,
int8, more rows), the product of batch-invariant mode widens the weight, or the weight is dequantised first. For int4,
and int8 in groups of 32 inputs, if a Hopper card's kernels have room and rows are in bfloat16: triton_tiled_row.py for
one row, triton_tiled_rows.py up to 512, and a dequantised weight beyond.
Legend: T rows, D input features, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hookline.plugins.kernels.products import triton_thin
from hookline.plugins.kernels.products.operands import has_aligned_rows
from hookline.plugins.kernels.products.triton_product import DTYPES, Kind
from hookline.plugins.kernels.products.triton_rounding import RoundedRows, empty_rounded, round_rows
from hookline.plugins.kernels.products.triton_row_chunks import chunked_row, fits_chunks
from hookline.plugins.kernels.products.triton_row_product import row_product
from hookline.plugins.kernels.products.triton_scales import Scales, dequantised
from hookline.plugins.kernels.products.triton_thin_int4 import fits_int4, thin_int4
from hookline.plugins.kernels.products.triton_tiled import TiledWeight, tiled_weight
from hookline.plugins.kernels.products.triton_tiled_row import fits_row, one_row
from hookline.plugins.kernels.products.triton_tiled_rows import TiledScratch, fits_rows, fuses_silu, tiled_product
from hookline.plugins.kernels.products.triton_wide import (
    MAX_ROWS,
    MOST_ROUNDED,
    ScaledScratch,
    has_room,
    rounded_silu_tiling,
    scaled_wide_product,
    scaled_wide_tiling,
)

MOST_WIDENED = 256
"""Most rows for which widening a weight for every tile of rows is faster than dequantising it first."""
LEAST_WIDENED = 32
"""Fewest inputs of a scale's block for which this is so: with fewer, a step of the product is too small."""
BLOCK = 128
"""Outputs and inputs of a scale's block that torch's product takes."""


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """A weight in e4m3, int8 or int4, or the weights of X experts, whose tensors have a first dimension X.

    data_OD: float8_e4m3fn or int8 (O, D), or uint8 (O, D / 2), contiguous. may_round: whether rows may be rounded to
    e4m3 before they are multiplied with e4m3.
    """

    data_OD: Tensor
    scales: Scales
    may_round: bool

    @property
    def num_rows(self) -> int:
        """The number of outputs, O."""
        return self.data_OD.shape[-2]

    @property
    def num_columns(self) -> int:
        """The number of inputs, D."""
        return self.data_OD.shape[-1] * self.scales.packed

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight in this dtype: (O, D), contiguous. Device: one launch, no host sync."""
        return dequantised(self.data_OD, self.scales, dtype)


@dataclass(frozen=True, eq=False)
class OffsetWeight:
    """A weight (O, D) in int4 or int8 plus an offset for each group of inputs.

    offsets_OC: in the dtype of rows, contiguous; their product with the sums of groups of inputs is added to the
    weight's.
    """

    weight: ScaledWeight | TiledWeight
    offsets_OC: Tensor

    @property
    def num_rows(self) -> int:
        """The number of outputs, O."""
        return self.weight.num_rows

    @property
    def num_columns(self) -> int:
        """The number of inputs, D."""
        return self.weight.num_columns

    def group_sums(self, x_TD: Tensor) -> Tensor:
        """The sum of each group's inputs: (T, D) -> (T, C), summed in float32. Device: one launch."""
        num_groups = self.offsets_OC.shape[1]
        return x_TD.view(len(x_TD), num_groups, self.num_columns // num_groups).sum(-1)


class ScaledProducts:
    """The products of one device, with their scratch space. dtype: of rows and results."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._scratch, self._dtype = ScaledScratch.make(device), dtype
        self._is_wide = has_room(device) and dtype in DTYPES
        self._has_torchs = _has_scaled_mm(device) and dtype is torch.bfloat16
        self._device = device
        self._tiled_scratch: TiledScratch | None = None

    @property
    def tiles_integers(self) -> bool:
        """Whether `product` takes weights as `tiled_weight` stores them, and is fastest with them."""
        return self._is_wide and self._dtype is torch.bfloat16

    def tiled_weight(self, data_OW: Tensor, scales: Scales) -> TiledWeight:
        """See `tiled_weight`; the first call allocates the scratch memory of its products."""
        if self._tiled_scratch is None:
            self._tiled_scratch = TiledScratch.make(self._device)
        return tiled_weight(data_OW, scales)

    def product(
        self, kind: Kind, x: Tensor | RoundedRows, weight: ScaledWeight | TiledWeight, bias_O: Tensor | None
    ) -> Tensor | None:
        """x @ W.T + b of any rows, PLAIN or SILU; None where another way is faster: see `rounds_many`.

        Shapes: (T, D) -> (T, O), or (T, O / 2) for SILU, which takes no bias.
        Device: one launch, and another to round rows beforehand; no host sync. The weight is read before the launch
        before has finished: it must not write it.
        """
        is_silu = kind is Kind.SILU
        if isinstance(weight, TiledWeight):
            assert isinstance(x, Tensor) and self._tiled_scratch is not None
            if fits_row(x):
                return one_row(x, weight, bias_O, silu=is_silu)
            if not has_aligned_rows(x):
                x = x.clone(memory_format=torch.contiguous_format)
            if not fits_rows(x) or (is_silu and not fuses_silu(len(x), weight)):
                return None
            return tiled_product(x, weight, bias_O, self._tiled_scratch, silu=is_silu)
        data_OD, scales = weight.data_OD, weight.scales
        if isinstance(x, RoundedRows):
            return self._product_of_rounded(kind, x, weight, bias_O)
        is_int4 = scales.packed == 2
        if is_int4 and fits_int4(x, data_OD, scales):
            return thin_int4(x, data_OD, scales, bias_O, is_silu)
        if not is_int4 and fits_chunks(x, data_OD, scales):
            return chunked_row(x, data_OD, bias_O, scales, silu=is_silu)
        if not is_int4 and triton_thin.fits_scaled(x, data_OD):
            return triton_thin.thin_linear(x, data_OD, bias_O, silu=is_silu, scales=scales)
        is_aligned = x.dim() == 2 and has_aligned_rows(data_OD) and has_aligned_rows(x)
        if is_aligned and self._fits_wide(weight) and 0 < len(x) <= MAX_ROWS:
            if weight.may_round and len(x) > MOST_ROUNDED:
                return self._product_of_rounded(kind, round_rows(x), weight, bias_O)
            return self._wide_product(kind, x, None, weight, bias_O)
        if is_aligned and self.rounds_many(len(x), weight):
            return None if is_silu else self._product_of_rounded(kind, self.round(x, weight), weight, bias_O)
        if len(x) <= MOST_WIDENED and (not scales.columns or scales.columns >= LEAST_WIDENED):
            return row_product(x, data_OD, bias_O, silu=is_silu, scales=scales)
        return None

    def rounds_many(self, num_rows: int, weight: ScaledWeight) -> bool:
        """Whether so many rows are rounded for torch's product, with groups of the scales' columns.

        Torch has no product with SiLU, so `product` returns None. If it does and this is False, dequantise the weight.
        """
        scales, num_out, width = weight.scales, weight.num_rows, weight.num_columns
        if num_rows <= MAX_ROWS or not self._has_torchs or not weight.may_round or num_out % 16 or width % 16:
            return False
        if not scales.columns:
            return scales.rows == 1
        return scales.rows == scales.columns == BLOCK and num_out % BLOCK == 0 and width % (4 * BLOCK) == 0

    def takes_rounded(self, num_rows: int, weight: ScaledWeight | TiledWeight) -> bool:
        """Whether products of so many rows with this weight take the rows in e4m3, which their maker may then store."""
        if isinstance(weight, TiledWeight):
            return False
        is_aligned = weight.num_columns % 16 == 0 and has_aligned_rows(weight.data_OD)
        if num_rows <= MAX_ROWS:
            return num_rows > 1 and weight.may_round and is_aligned and self._fits_wide(weight)
        return is_aligned and self.rounds_many(num_rows, weight)

    def columns(self, num_rows: int, weight: ScaledWeight) -> int:
        """Columns that share a scale in so many rows in e4m3, as this weight's products take them; 0: all columns."""
        return 0 if num_rows <= MAX_ROWS else weight.scales.columns

    def round(self, x_TD: Tensor, weight: ScaledWeight, *, silu: bool = False) -> RoundedRows:
        """The rows in e4m3 for products with this weight, which `takes_rounded`; see `round_rows`."""
        return round_rows(x_TD, self.columns(len(x_TD), weight), silu=silu)

    def rounded_silu(self, x: Any, weight: Any, then: ScaledWeight) -> RoundedRows | None:
        """`product` with SiLU in e4m3, for products with a weight that `takes_rounded`; None: `round` its result.

        A scale has the outputs of a program of the product. Device: one launch.
        """
        if not isinstance(x, RoundedRows) or not 1 < len(x) <= MAX_ROWS or not isinstance(weight, ScaledWeight):
            return None
        tiling = rounded_silu_tiling(len(x), weight.num_rows // 2, weight.scales)
        if tiling is None or not self.takes_rounded(len(x), weight):
            return None
        rounded = empty_rounded(len(x), weight.num_rows // 2, tiling.block_o, self._device)
        scaled_wide_product(
            Kind.SILU, x.values_TD[: len(x)], x.scales_TG, weight.data_OD, weight.scales, None, tiling, self._scratch,
            self._dtype, (rounded.values_TD, rounded.scales_TG),
        )  # fmt: skip
        return rounded

    def _fits_wide(self, weight: ScaledWeight) -> bool:
        """Whether the wide product takes this weight: a scale's block in e4m3 has at least as many inputs as a step."""
        dtype, columns = weight.data_OD.dtype, weight.scales.columns
        is_fit = dtype is torch.uint8 or (dtype is torch.float8_e4m3fn and (not columns or columns >= BLOCK))
        return self._is_wide and is_fit

    def _wide_product(
        self, kind: Kind, x_TD: Tensor, x_scale_TG: Tensor | None, weight: ScaledWeight, bias_O: Tensor | None
    ) -> Tensor:
        num_out = weight.num_rows // (2 if kind is Kind.SILU else 1)
        tiling = scaled_wide_tiling(
            kind, len(x_TD), num_out, weight.num_columns, weight.scales,
            x_groups=0 if x_scale_TG is None else x_scale_TG.shape[1], may_round=weight.may_round,
        )  # fmt: skip
        return scaled_wide_product(
            kind, x_TD, x_scale_TG, weight.data_OD, weight.scales, bias_O, tiling, self._scratch, self._dtype
        )

    def _product_of_rounded(
        self, kind: Kind, x: RoundedRows, weight: ScaledWeight, bias_O: Tensor | None
    ) -> Tensor | None:
        """The product of rows that are in e4m3; see `product`."""
        if x.num_rows <= MAX_ROWS:
            return self._wide_product(kind, x.values_TD[: x.num_rows], x.scales_TG, weight, bias_O)
        if kind is Kind.SILU:
            return None
        data_DO, factors = weight.data_OD.t(), weight.scales.factors_RC.t()
        is_fast = not weight.scales.columns  # scales of blocks have only slow accumulation
        out_TO = torch._scaled_mm(
            x.values_TD, data_DO, x.scales_TG, factors, out_dtype=self._dtype, use_fast_accum=is_fast
        )[: x.num_rows]
        return out_TO if bias_O is None else out_TO.add_(bias_O)


@cache
def _has_scaled_mm(device: torch.device) -> bool:
    """Whether torch has products of two operands in e4m3, with a scale for each row or block, on this card."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    version = tuple(map(int, torch.version.cuda.split(".")[:2]))
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)
