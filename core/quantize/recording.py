"""A quantization that quantises nothing: its matrices are plain, and record the inputs that they are multiplied with.

So an engine records the inputs of each linear, on any device, with any kernels and for any model.
Legend: T tokens, O outputs, D inputs, X experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import (
    MatrixPiece,
    MatrixPlace,
    Quantization,
    QuantizationConfig,
    QuantizedMatrix,
    Scheme,
    StoredForm,
    WeightTarget,
)
from hookline.core.layers.weights import plain_targets

RECORDED = Scheme("recorded", multiplies=True)
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of matrices, by safetensors' name of the stored dtype; matrices stored otherwise are kept in float32."""


class Moments:
    """Sums of x.T @ x over the inputs x of linears.

    max_bytes: most bytes of all sums of a pass; the first sum always fits. of: the sums by linear, float32 (D, D);
    linears with the same inputs share a sum. num_left: calls of linears that the last pass had no memory for.
    """

    def __init__(self, max_bytes: int) -> None:
        """Record nothing until a pass begins."""
        self.max_bytes, self.num_left = max_bytes, 0
        self.of: dict[str, Tensor] = {}
        self._done: set[str] = set()
        self._is_recording = False

    def begin_pass(self) -> None:
        """Forget the sums of the last pass, whose linears are done, and record the sums of further linears."""
        self._done |= self.of.keys()
        self.of.clear()
        self.num_left, self._is_recording = 0, True

    def end_pass(self) -> None:
        """Stop recording."""
        self._is_recording = False

    def add(self, names: Sequence[str], x_TD: Tensor) -> None:
        """Add rows of inputs that these linears got."""
        if not self._is_recording or names[0] in self._done or not len(x_TD):
            return
        moment_DD = self.of.get(names[0])
        if moment_DD is None:
            size = x_TD.shape[1]
            taken = sum(one.nbytes for one in {id(one): one for one in self.of.values()}.values())
            if self.of and taken + 4 * size * size > self.max_bytes:
                self.num_left += 1
                return
            moment_DD = torch.zeros(size, size, device=x_TD.device)
            self.of |= dict.fromkeys(names, moment_DD)
        rows_TD = x_TD.float()
        moment_DD.addmm_(rows_TD.T, rows_TD)


@dataclass
class RecordingConfig(QuantizationConfig):
    """moments: where inputs are recorded. quantization: its `stores` says of which linears."""

    moments: Any = None
    quantization: Any = None


@dataclass(frozen=True, eq=False)
class RecordedMatrix(QuantizedMatrix):
    """A plain matrix (O, D), or a matrix of each expert (X, O, D).

    names: of its linears, by expert; by None without experts.
    """

    matrix: Tensor
    moments: Moments
    names: Mapping[int | None, Sequence[str]]
    num_rows: int
    num_columns: int
    expert: int | None = None
    scheme: Scheme = RECORDED

    @property
    def num_experts(self) -> int | None:
        """See QuantizedMatrix."""
        return len(self.matrix) if self.matrix.ndim == 3 else None

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """See QuantizedMatrix."""
        return self.matrix.to(dtype, copy=True)

    def of_expert(self, index: int) -> RecordedMatrix:
        """See QuantizedMatrix."""
        return RecordedMatrix(self.matrix[index], self.moments, self.names, self.num_rows, self.num_columns, index)

    def linear(self, x_TD: Tensor) -> Tensor:
        """See QuantizedMatrix."""
        self.moments.add(self.names[self.expert], x_TD)
        return functional.linear(x_TD, self.matrix.to(x_TD.dtype))


class _Loading:
    """Implements LoadingMatrix."""

    scheme = RECORDED

    def __init__(self, pieces: Sequence[MatrixPiece], place: MatrixPlace, moments: Moments, dtype: torch.dtype) -> None:
        """Allocate the matrix. Rows that no piece has are zero."""
        self.pieces, self.place, self.moments = pieces, place, moments
        front = () if place.num_experts is None else (place.num_experts,)
        shape = *front, place.num_rows, place.num_columns
        self.matrix = torch.zeros(shape, device=place.device, dtype=dtype)

    def targets(self) -> Mapping[str, WeightTarget]:
        """See LoadingMatrix."""
        return plain_targets(self.matrix, self.pieces)

    def loaded(self) -> RecordedMatrix:
        """See LoadingMatrix."""
        names: dict[int | None, list[str]] = {}
        for piece in self.pieces:
            names.setdefault(piece.expert, []).append(piece.name)
        return RecordedMatrix(self.matrix, self.moments, names, self.place.num_rows, self.place.num_columns)


class Recording(Quantization):
    """See above."""

    def __init__(self, config: RecordingConfig, form: StoredForm) -> None:
        """See Quantization."""
        self.config, self.form = config, form

    def stores(self, name: str) -> Hashable:
        """See Quantization."""
        return None if self.config.quantization.stores(name) is None else RECORDED

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> _Loading:
        """See Quantization."""
        stored = self.form.dtypes.get(f"{pieces[0].name}.weight", "F32")
        return _Loading(pieces, place, self.config.moments, DTYPES.get(stored, torch.float32))
