"""The blocks of a GGUF file's matrices: read as they are stored, dequantised, or taken apart into integers and scales.

A type with minimums stands for integers from 0 on, times a scale, less a minimum. Its integers are taken less the one
in the middle, so that what is left of the minimum, the offset, is small.
Legend: O outputs, D inputs, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, Q4_K
from torch import Tensor

from hookline.core.contracts import HALF_INT4, INT4, INT8, Scheme
from hookline.plugins.quantizations.gguf_checkpoint import by_rows, dequantised

_CODEBOOK = np.array(IQ4_NL.kvalues, np.int8)
_EACH = np.arange(8, dtype=np.uint16)


class StoredMatrix:
    """A matrix (O, D) of a file that is indexed like a tensor, by ranges, and reads and dequantises only these.

    raw_OB: its blocks, bytes in the file. order_O: the stored row of each row; None: they are stored in their order.
    """

    def __init__(
        self, raw_OB: np.ndarray, kind: GGMLQuantizationType, num_columns: int, order_O: np.ndarray | None = None
    ) -> None:
        """Keep these; nothing is read yet."""
        self.raw_OB, self.kind, self.order_O = raw_OB, kind, order_O
        self.shape = len(raw_OB), num_columns

    def __getitem__(self, index: Any) -> Tensor:
        """These ranges of the matrix, in float32."""
        given = [one for one in (index if isinstance(index, tuple) else (index,)) if one is not Ellipsis]
        ranges = zip((*given, slice(None), slice(None)), self.shape, strict=False)
        rows, columns = (slice(*one.indices(size)) for one, size in ranges)
        raw, left = self.blocks(rows, columns)
        return torch.from_numpy(dequantised(raw, self.kind)[:, left : left + max(0, columns.stop - columns.start)])

    def blocks(self, rows: slice, columns: slice) -> tuple[np.ndarray, int]:
        """The bytes of these rows' blocks around these columns, and the column within them at which these begin."""
        block, size = GGML_QUANT_SIZES[self.kind]
        first, last = columns.start // block, -(-columns.stop // block)
        raw = self.raw_OB[rows if self.order_O is None else self.order_O[rows], first * size : last * size]
        return np.ascontiguousarray(raw), columns.start - first * block


Read = Callable[[np.ndarray], np.ndarray]
"""A function of blocks (N, bytes)."""


@dataclass(frozen=True)
class Parts:
    """How blocks of a type are taken apart.

    values: INT8 or INT4, of the integers. codes: a block's integers (N, values), as a ScaledMatrix has them. scales: of
    each group of a block (N, groups), float32. group: inputs of a group. offsets: likewise, for a type with minimums.
    """

    values: str
    codes: Read
    scales: Read
    group: int = 32
    offsets: Read | None = None

    @property
    def scheme(self) -> Scheme:
        """The scheme of a matrix in this type, whose zero points are the offsets."""
        return Scheme(self.values, 1, self.group, has_zeros=self.offsets is not None, else_plain=True)


def _halves(blocks: np.ndarray) -> np.ndarray:
    """Bytes of each 16 low and then 16 high halves -> values of four bits, in uint8."""
    return np.concatenate((blocks & 15, blocks >> 4), axis=1)


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a byte of each block: (N, 1) float32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _first_scale(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    codes: np.ndarray = (_halves(blocks[:, 6:]) | high << 4).astype(np.int8) - np.int8(16)
    return codes


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    codes: np.ndarray = _CODEBOOK[_halves(blocks[:, 8:].reshape(-1, 16))].reshape(len(blocks), -1)
    return codes


def _iq4_xs_scales(blocks: np.ndarray) -> np.ndarray:
    """A scale of the block times six bits for each group: four of scales_l and two of scales_h, less 32."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> 2 * _EACH & 3
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(len(blocks), 8)
    scales: np.ndarray = _first_scale(blocks) * ((low | high << 4).astype(np.float32) - 32)
    return scales


def _k_halves(packed: np.ndarray) -> np.ndarray:
    """Bytes of k-quants, the low halves of each 32 before the high ones -> values of four bits, in uint8."""
    return _halves(packed.reshape(-1, 32)).reshape(len(packed), -1)


def _k_scales(blocks: np.ndarray) -> np.ndarray:
    scales: np.ndarray = _half(blocks, 0) * Q4_K.get_scale_min(blocks[:, 4:16])[0].astype(np.float32)
    return scales


def _k_minimums(blocks: np.ndarray) -> np.ndarray:
    minimums: np.ndarray = _half(blocks, 2) * Q4_K.get_scale_min(blocks[:, 4:16])[1].astype(np.float32)
    return minimums


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    high = np.unpackbits(blocks[:, 4:8], axis=1, bitorder="little")
    codes: np.ndarray = (_halves(blocks[:, 8:]) | high << 4).astype(np.int8) - np.int8(16)
    return codes


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    high = (blocks[:, None, 16:48] >> _EACH[:, None].astype(np.uint8) & 1).reshape(len(blocks), -1)
    codes: np.ndarray = (_k_halves(blocks[:, 48:]) | high << 4).astype(np.int8) - np.int8(16)
    return codes


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = blocks[:, :128].reshape(-1, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    high = blocks[:, 128:192].reshape(-1, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    codes: np.ndarray = (low.reshape(len(blocks), -1) | high.reshape(len(blocks), -1) << 4).astype(np.int8) - np.int8(
        32
    )
    return codes


def _q6_k_scales(blocks: np.ndarray) -> np.ndarray:
    scales: np.ndarray = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scales


def _offsets(scales: Read, minimums: Read, middle: int) -> Read:
    """A group's offset: its scale times the integer in the middle, less its minimum."""
    return lambda blocks: scales(blocks) * np.float32(middle) - minimums(blocks)


def _after_scale(blocks: np.ndarray) -> np.ndarray:
    """The minimum of Q4_1 and Q5_1, which is added."""
    return -_half(blocks, 2)


PARTS = {
    "Q8_0": Parts(INT8, lambda blocks: blocks[:, 2:].view(np.int8), _first_scale),
    "Q4_0": Parts(INT4, lambda blocks: _halves(blocks[:, 2:]), _first_scale),
    "Q5_0": Parts(INT8, _q5_0, _first_scale),
    "IQ4_NL": Parts(INT8, lambda blocks: _CODEBOOK[_halves(blocks[:, 2:])], _first_scale),
    "IQ4_XS": Parts(INT8, _iq4_xs, _iq4_xs_scales),
    "Q6_K": Parts(INT8, _q6_k, _q6_k_scales, group=16),
    "Q4_1": Parts(
        INT4, lambda blocks: _halves(blocks[:, 4:]), _first_scale, offsets=_offsets(_first_scale, _after_scale, 8)
    ),
    "Q5_1": Parts(INT8, _q5_1, _first_scale, offsets=_offsets(_first_scale, _after_scale, 16)),
    "Q4_K": Parts(
        INT4, lambda blocks: _k_halves(blocks[:, 16:]), _k_scales, offsets=_offsets(_k_scales, _k_minimums, 8)
    ),
    "Q5_K": Parts(INT8, _q5_k, _k_scales, offsets=_offsets(_k_scales, _k_minimums, 16)),
}
"""The types whose values are those of integers times scales of groups, or these less minimums."""


def codes_read(whole: StoredMatrix, rows: slice, columns: slice) -> Tensor:
    """See `loading.Read`: the integers. Where a scale is zero they stand for zero, whatever is stored."""
    parts, (raw, left) = PARTS[whole.kind.name], whole.blocks(rows, columns)
    block, size = GGML_QUANT_SIZES[whole.kind]
    width = raw.shape[1] // size * block
    found = np.empty((len(raw), width), np.uint8 if parts.values == INT4 else np.int8)
    zero = found.dtype.type(HALF_INT4 if parts.values == INT4 else 0)

    def convert(part: slice) -> None:
        blocks = raw[part].reshape(-1, size)
        codes = parts.codes(blocks)
        with np.errstate(all="ignore"):  # scales that are not finite are refused when they are read
            lost = parts.scales(blocks) == 0
        if lost.any():
            codes = np.where(lost.repeat(parts.group, axis=1), zero, codes)
        found[part] = codes.reshape(-1, width)

    by_rows(len(raw), width, convert)
    return torch.from_numpy(found)[:, left : left + columns.stop - columns.start]


def scales_read(whole: StoredMatrix, rows: slice, columns: slice) -> Tensor:
    """The same of the scales; columns: a range of groups."""
    return _of_groups(whole, rows, columns, PARTS[whole.kind.name].scales)


def offsets_read(whole: StoredMatrix, rows: slice, columns: slice) -> Tensor:
    """The same of the offsets."""
    offsets = PARTS[whole.kind.name].offsets
    assert offsets is not None
    return _of_groups(whole, rows, columns, offsets)


def _of_groups(whole: StoredMatrix, rows: slice, columns: slice, read: Read) -> Tensor:
    group = PARTS[whole.kind.name].group
    raw, left = whole.blocks(rows, slice(columns.start * group, min(columns.stop * group, whole.shape[1])))
    with np.errstate(all="ignore"):  # what is not finite is refused by the caller
        found = read(raw.reshape(-1, GGML_QUANT_SIZES[whole.kind][1]))
    first = left // group
    return torch.from_numpy(found).view(len(raw), -1)[:, first : first + columns.stop - columns.start]
