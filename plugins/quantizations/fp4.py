"""Reads floats in small groups with a scale: NVFP4, MXFP4 and MXFP8.

NVFP4 has groups of 16 inputs with a scale in e4m3, and one further scale for the whole tensor; MXFP4 and MXFP8 have
groups of 32 with a power of two (e8m0). Values are e2m1, or e4m3 in MXFP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import FP4, FP8, Scheme
from hookline.plugins.quantizations.loading import StoredPart, blocks_read, inverse_of, plain_read, scalar_read
from hookline.plugins.quantizations.packing import PackedRead

NVFP4, MXFP4, MXFP8 = Scheme(FP4, 1, 16), Scheme(FP4, 1, 32), Scheme(FP8, 1, 32)
BYTES, POWERS = ("U8", "I8"), ("U8", "F8_E8M0")
_BIAS = 127
"""The bias of e8m0's exponent."""


def nvfp4_parts(
    num_rows: int, num_columns: int, weight: str, whole_scale: str, *, divides: bool = False
) -> list[StoredPart]:
    """The tensors of a linear, whose values are `weight` * weight_scale * whole_scale; divides: / whole_scale."""
    read = inverse_of(scalar_read) if divides else scalar_read
    return [
        StoredPart(weight, "data", (num_rows, -(-num_columns // 2)), _nibbles(), BYTES),
        StoredPart("weight_scale", "scales", (num_rows, -(-num_columns // 16)), blocks_read, ("F8_E4M3",)),
        StoredPart(whole_scale, "row_scales", (), read),
    ]


def mxfp4_parts(num_rows: int, num_columns: int, weight: str) -> list[StoredPart]:
    """The tensors of a linear, whose values are `weight` * 2^(weight_scale - 127)."""
    return [
        StoredPart(weight, "data", (num_rows, -(-num_columns // 2)), _nibbles(), BYTES),
        StoredPart("weight_scale", "scales", (num_rows, -(-num_columns // 32)), powers_read, POWERS),
    ]


def mxfp8_parts(num_rows: int, num_columns: int) -> list[StoredPart]:
    """The tensors of a linear with values in e4m3, weight * 2^(weight_scale - 127)."""
    return [
        StoredPart("weight", "data", (num_rows, num_columns), plain_read, ("F8_E4M3",)),
        StoredPart("weight_scale", "scales", (num_rows, -(-num_columns // 32)), powers_read, POWERS),
    ]


def powers_read(whole: Any, rows: slice, columns: slice) -> Tensor:
    """Powers of two from stored exponents (outputs, groups) in e8m0, of which 255 means NaN."""
    stored = blocks_read(whole, rows, columns).view(torch.uint8)
    found = torch.exp2(stored.float() - _BIAS)
    return found.masked_fill_(stored == 255, torch.nan)


def _nibbles() -> PackedRead:
    return PackedRead(4, "columns", word_bits=8)
