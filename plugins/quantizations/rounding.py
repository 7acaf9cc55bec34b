"""Floats into few bits: scales and zero points of blocks by their largest values, and values rounded to the nearest.

Legend: O outputs, D inputs, R and C blocks along them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import FP4, FP4_VALUES, FP8, HALF_INT4, INT4, INT8, Scheme

LARGEST = {FP8: 448.0, INT8: 127.0, INT4: 7.0, FP4: 6.0}
"""The largest value of each kind."""
SMALLEST_SCALE = 1e-12
"""The scale of a block of zeros, so that nothing is divided by zero."""
INT4_CODES = 15
"""The largest code of int4."""


def scales_of(values_OD: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scales (R, C) of float32 values, and zero points if the scheme has them."""
    if not scheme.has_zeros:
        largest = _reduced(values_OD.abs(), scheme)
        return (largest / LARGEST[scheme.values]).clamp_(min=SMALLEST_SCALE), None
    low, high = -_reduced(-values_OD, scheme).clamp(min=0), _reduced(values_OD, scheme).clamp(min=0)
    scales = ((high - low) / INT4_CODES).clamp_(min=SMALLEST_SCALE)
    return scales, (-low / scales).round_().clamp_(0, INT4_CODES)


def codes_of(values_OD: Tensor, scheme: Scheme, scale_OD: Tensor, zero_OD: Tensor | None) -> Tensor:
    """The stored form of float32 values, one element each: e4m3, int8, or codes in uint8."""
    scaled_OD = values_OD / scale_OD
    if scheme.values == FP8:
        return scaled_OD.clamp_(-LARGEST[FP8], LARGEST[FP8]).to(torch.float8_e4m3fn)
    if scheme.values == INT8:
        return scaled_OD.round_().clamp_(-LARGEST[INT8], LARGEST[INT8]).to(torch.int8)
    if scheme.values == FP4:
        return _fp4_codes(scaled_OD)
    return scaled_OD.round_().add_(HALF_INT4 if zero_OD is None else zero_OD).clamp_(0, INT4_CODES).to(torch.uint8)


def packed(codes_OD: Tensor) -> Tensor:
    """Codes of four bits (O, D), two to a byte: (O, ceil(D / 2)), the even one in the low half."""
    if codes_OD.shape[-1] % 2:
        codes_OD = functional.pad(codes_OD, (0, 1))
    return codes_OD[..., ::2] | (codes_OD[..., 1::2] << 4)


def _fp4_codes(scaled_OD: Tensor) -> Tensor:
    """The codes of the nearest e2m1 values; in a tie, the even code."""
    positive = torch.tensor(FP4_VALUES[:8], device=scaled_OD.device)
    middles = (positive[1:] + positive[:-1]) / 2
    size_OD = scaled_OD.abs()
    up_OD, down_OD = (torch.bucketize(size_OD, middles, right=right) for right in (True, False))
    code_OD = torch.where(up_OD % 2 == 0, up_OD, down_OD)
    return (code_OD + 8 * scaled_OD.signbit()).to(torch.uint8)


def _reduced(values_OD: Tensor, scheme: Scheme) -> Tensor:
    """The largest value of each block: (R, C)."""
    num_rows, num_columns = values_OD.shape
    rows, columns = scheme.rows or num_rows, scheme.columns or num_columns
    padding = (0, -num_columns % columns, 0, -num_rows % rows)
    padded = functional.pad(values_OD, padding, value=-torch.inf) if any(padding) else values_OD
    blocks = padded.view(-(-num_rows // rows), rows, -(-num_columns // columns), columns)
    return blocks.amax((1, 3))
