"""Matrices of a GGUF file as integers with scales and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from hookline.core.contracts import (
    OFFSETS,
    MatrixPiece,
    MatrixPlace,
    OffsetMatrix,
    QuantizedMatrix,
    ScaledMatrix,
)
from hookline.plugins.quantizations.gguf_blocks import Parts, codes_read, offsets_read, scales_read
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
