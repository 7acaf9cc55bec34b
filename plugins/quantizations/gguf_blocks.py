"""The blocks of a GGUF file's matrices: read as they are stored, dequantised, or taken apart into integers and scales.

Legend: O outputs, D inputs, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL
from torch import Tensor

from hookline.core.contracts import INT4, INT8, Scheme
from hookline.plugins.quantizations.gguf_checkpoint import dequantised

GROUP = 32
"""Values that share a scale, of all types that are taken apart."""
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


@dataclass(frozen=True)
class Parts:
    """How blocks of a type are taken apart.

    values: INT8 or INT4, of the integers. codes: blocks (N, bytes) -> a block's integers (N, values), as a ScaledMatrix
    has them. scales: blocks -> scale of each GROUP of a block (N, groups), float32.
    """

    values: str
    codes: Callable[[np.ndarray], np.ndarray]
    scales: Callable[[np.ndarray], np.ndarray]

    @property
    def scheme(self) -> Scheme:
        """The scheme of a matrix in this type; what kernels do not compute of a file becomes plain."""
        return Scheme(self.values, 1, GROUP, else_plain=True)


def _halves(blocks: np.ndarray) -> np.ndarray:
    """Bytes of each 16 low and then 16 high halves -> values of four bits, in uint8."""
    return np.concatenate((blocks & 15, blocks >> 4), axis=1)


def _first_scale(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)


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


EXACT = {
    "Q8_0": Parts(INT8, lambda blocks: blocks[:, 2:].view(np.int8), _first_scale),
    "Q5_0": Parts(INT8, _q5_0, _first_scale),
    "Q4_0": Parts(INT4, lambda blocks: _halves(blocks[:, 2:]), _first_scale),
    "IQ4_NL": Parts(INT8, lambda blocks: _CODEBOOK[_halves(blocks[:, 2:])], _first_scale),
    "IQ4_XS": Parts(INT8, _iq4_xs, _iq4_xs_scales),
}
"""The types whose values are those of integers times a scale of each GROUP."""


def codes_read(whole: StoredMatrix, rows: slice, columns: slice) -> Tensor:
    """See `loading.Read`: the integers. Where a scale is zero they stand for zero, whatever is stored."""
    parts, (raw, left) = EXACT[whole.kind.name], whole.blocks(rows, columns)
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[whole.kind][1])
    codes, lost = parts.codes(blocks), parts.scales(blocks) == 0
    if lost.any():
        codes = np.where(lost.repeat(GROUP, axis=1), np.array(8 if parts.values == INT4 else 0, codes.dtype), codes)
    return torch.from_numpy(np.ascontiguousarray(codes)).view(len(raw), -1)[
        :, left : left + columns.stop - columns.start
    ]


def scales_read(whole: StoredMatrix, rows: slice, columns: slice) -> Tensor:
    """The same of the scales; columns: a range of groups."""
    inputs = slice(columns.start * GROUP, min(columns.stop * GROUP, whole.shape[1]))
    raw, left = whole.blocks(rows, inputs)
    scales = EXACT[whole.kind.name].scales(raw.reshape(-1, GGML_QUANT_SIZES[whole.kind][1]))
    first = left // GROUP
    return torch.from_numpy(scales).view(len(raw), -1)[:, first : first + columns.stop - columns.start]
