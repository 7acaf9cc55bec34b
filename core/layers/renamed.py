"""A quantization that is asked by a model's names of linears, where the checkpoint has other names for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from hookline.core.contracts import (
    LoadingMatrix,
    MatrixPiece,
    MatrixPlace,
    Quantization,
    QuantizedMatrix,
    WeightTarget,
)


class RenamedQuantization(Quantization):
    """Implements hookline.core.contracts.Quantization around another one, which knows only the checkpoint's names.

    dtypes: safetensors' dtypes of the stored tensors: the argument by the checkpoint's names, the attribute by the
    model's.
    """

    def __init__(
        self, quantization: Quantization, dtypes: Mapping[str, str], tensor_name: Callable[[str], str | None]
    ) -> None:
        """Find out which modules have another name in the model. tensor_name: see RenamesTensors."""
        self.quantization, self.tensor_name = quantization, tensor_name
        self.dtypes: dict[str, str] = {}
        self._stored: dict[str, str] = {}
        """The checkpoint's name of a module, by the model's."""
        for name, dtype in dtypes.items():
            renamed = tensor_name(name)
            if renamed is not None:
                self.dtypes[renamed] = dtype
                (module, _, last), (new, _, new_last) = name.rpartition("."), renamed.rpartition(".")
                if last == new_last:
                    self._stored[new] = module

    def stores(self, name: str) -> Hashable:
        """See Quantization."""
        return self.quantization.stores(self._stored.get(name, name))

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> LoadingMatrix:
        """See Quantization."""
        stored = [replace(piece, name=self._stored.get(piece.name, piece.name)) for piece in pieces]
        return RenamedMatrix(self.quantization.matrix(stored, place), self.tensor_name)

    def ignores(self, name: str) -> bool:
        """See Quantization."""
        module, dot, last = name.rpartition(".")
        return self.quantization.ignores(f"{self._stored.get(module, module)}{dot}{last}")


class RenamedMatrix:
    """Implements hookline.core.contracts.LoadingMatrix, with the model's names of tensors."""

    def __init__(self, matrix: LoadingMatrix, tensor_name: Callable[[str], str | None]) -> None:
        """Keep the matrix, which has the checkpoint's names."""
        self._matrix, self._tensor_name, self.scheme = matrix, tensor_name, matrix.scheme

    def targets(self) -> Mapping[str, WeightTarget]:
        """See LoadingMatrix."""
        return {self._tensor_name(name) or name: target for name, target in self._matrix.targets().items()}

    def loaded(self) -> QuantizedMatrix:
        """See LoadingMatrix."""
        return self._matrix.loaded()
