"""Matrices of a GGUF file: as integers with scales and offsets, or as they are stored.

Legend: X experts, O outputs, D inputs, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor, dtype

from hookline.core.contracts import (
    OFFSETS,
    MatrixPiece,
    MatrixPlace,
    OffsetMatrix,
    QuantizedMatrix,
    ScaledMatrix,
    Scheme,
    WeightTarget,
)
from hookline.core.errors import CheckpointError
from hookline.plugins.quantizations.gguf_blocks import Parts, codes_read, offsets_read, scales_read
from hookline.plugins.quantizations.gguf_checkpoint import dequantised
from hookline.plugins.quantizations.loading import Read, Role, ScaledLoading, StoredPart


class PartsLoading(ScaledLoading):
    """Linears of one type of PARTS: a ScaledMatrix, or an OffsetMatrix for a type with minimums."""

    def __init__(self, pieces: Sequence[MatrixPiece], place: MatrixPlace, parts: Parts) -> None:
        """See ScaledLoading. The zero points that it reads are the offsets."""
        reads: list[tuple[Role, Read]] = [("data", codes_read), ("scales", scales_read)]
        reads += [("zeros", offsets_read)] * (parts.offsets is not None)
        super().__init__(
            pieces,
            place,
            parts.scheme,
            lambda name, *shape: [StoredPart("weight", role, shape, read) for role, read in reads],
        )
        self.scaled = replace(self.scheme, has_zeros=False)
        if parts.offsets is not None:
            self.scheme = replace(self.scaled, values=next(name for name in OFFSETS if OFFSETS[name] == parts.values))

    def loaded(self) -> QuantizedMatrix:
        """See LoadingMatrix."""
        found = super().loaded()
        assert isinstance(found, ScaledMatrix)
        if found.zeros_RC is None:
            return found
        return OffsetMatrix(self.scheme, replace(found, scheme=self.scaled, zeros_RC=None), found.zeros_RC)

    def _check_signs(self, name: str, piece: MatrixPiece, scales: Tensor) -> None:
        """Scales may be below zero, and zero: `codes_read` has zeros there."""


SCHEME = Scheme("gguf", 1, 256, else_plain=True)
"""Of blocks as they are stored; no kernels compute them."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a matrix with values of one type, from the matrix row `row` on.

    raw: their blocks, bytes (O, B), or (X, O, B). left: the column within the first block that is the matrix's first.
    """

    row: int
    kind: GGMLQuantizationType
    raw: np.ndarray
    left: int


@dataclass(frozen=True, eq=False)
class BlocksMatrix(QuantizedMatrix):
    """A matrix (O, D), or one for each of X experts, on the CPU. Rows that no part has are zero."""

    num_rows: int
    num_columns: int
    parts: tuple[Rows, ...]
    experts: int | None = None
    scheme: Scheme = SCHEME

    @property
    def num_experts(self) -> int | None:
        """See QuantizedMatrix."""
        return self.experts

    def dequantised(self, dtype: dtype) -> Tensor:
        """See QuantizedMatrix."""
        lead = () if self.experts is None else (self.experts,)
        found = torch.zeros(*lead, self.num_rows, self.num_columns, dtype=dtype)
        for part in self.parts:
            values = torch.from_numpy(dequantised(part.raw.reshape(-1, part.raw.shape[-1]), part.kind))
            values = values[:, part.left : part.left + self.num_columns].view(*part.raw.shape[:-1], self.num_columns)
            found[..., part.row : part.row + part.raw.shape[-2], :] = values
        return found

    def of_expert(self, index: int) -> BlocksMatrix:
        """See QuantizedMatrix."""
        parts = tuple(replace(part, raw=part.raw[index]) for part in self.parts)
        return replace(self, parts=parts, experts=None)


class BlocksLoading:
    """Implements hookline.core.contracts.LoadingMatrix for BlocksMatrix."""

    scheme = SCHEME

    def __init__(self, pieces: Sequence[MatrixPiece], place: MatrixPlace, kinds: Mapping[str, str]) -> None:
        """Note what is to be read. kinds: the type of each linear's values."""
        self.pieces, self.place, self.kinds = pieces, place, kinds
        self.parts: dict[tuple[int, str], Rows] = {}

    def targets(self) -> dict[str, WeightTarget]:
        """See LoadingMatrix. Allocates the memory, since a matrix that nothing computes is not kept."""
        by_name: dict[str, list[tuple[MatrixPiece, np.ndarray]]] = {}
        for piece in self.pieces:
            by_name.setdefault(f"{piece.name}.weight", []).append((piece, self._raw(piece)))
        return {name: _target(name, given) for name, given in by_name.items()}

    def loaded(self) -> BlocksMatrix:
        """See LoadingMatrix."""
        place, parts = self.place, tuple(self.parts.values())
        return BlocksMatrix(place.num_rows, place.num_columns, parts, place.num_experts)

    def _raw(self, piece: MatrixPiece) -> np.ndarray:
        """The memory of a piece's blocks: its own, or its expert's in that of all experts' pieces of this type."""
        columns, place = piece.columns, self.place
        kind = GGMLQuantizationType[self.kinds[piece.name]]
        block, size = GGML_QUANT_SIZES[kind]
        first, last = columns.start // block, -(-columns.stop // block)
        shape = piece.rows.size, (last - first) * size
        lead = () if place.num_experts is None else (place.num_experts,)
        part = self.parts.get((piece.row, kind.name))
        if part is None:
            part = Rows(piece.row, kind, np.zeros((*lead, *shape), np.uint8), columns.start - first * block)
            self.parts[piece.row, kind.name] = part
        raw: np.ndarray = part.raw if piece.expert is None else part.raw[piece.expert]
        return raw


def _target(name: str, given: Sequence[tuple[MatrixPiece, np.ndarray]]) -> WeightTarget:
    """Where the bytes of a linear go. given: its pieces, with the memory of each."""
    views = [WeightTarget(torch.from_numpy(raw)) for _, raw in given]

    def write(whole: Any) -> None:
        for piece, raw in given:
            rows, columns = slice(piece.rows.start, piece.rows.stop), slice(piece.columns.start, piece.columns.stop)
            found, _ = whole.blocks(rows, columns)
            if not np.isfinite(dequantised(found, whole.kind)).all():
                raise CheckpointError(
                    f"tensor {name} has NaN or infinity among its values; download or copy the checkpoint again"
                )
            raw[:] = found

    first = given[0][0]
    return replace(views[0], shape=(first.rows.total, first.columns.total), write=write, more=tuple(views[1:]))
