"""Unquantised checkpoints, and random weights, quantised while they are loaded: rounded to the nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from hookline.core.contracts import (
    FP8,
    INT4,
    INT8,
    MatrixPiece,
    MatrixPlace,
    Quantization,
    ScaledMatrix,
    Scheme,
    StoredForm,
)
from hookline.core.errors import ConfigError
from hookline.plugins.quantizations.compressed_writing import config_of, tensors_of
from hookline.plugins.quantizations.gptq_rounding import gptq
from hookline.plugins.quantizations.loading import ScaledLoading, StoredPart
from hookline.plugins.quantizations.names import is_named


class Rounded(Quantization):
    """Quantises weights that are floats. option: the name of the option."""

    option: ClassVar[str]
    scheme: Scheme

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        if form.stated is not None:
            raise ConfigError(
                f"quantization={self.option} quantises while loading, and this checkpoint is quantised; leave out "
                "quantization="
            )
        if config.dequantize:
            raise ConfigError(
                f"quantization.dequantize=true makes plain what quantization={self.option} quantises; leave one out"
            )
        self.skip: Sequence[str] = config.skip

    def stores(self, name: str) -> Scheme | None:
        """See Quantization."""
        return None if is_named(name, self.skip) else self.scheme

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> ScaledLoading:
        """See Quantization."""
        return ScaledLoading(pieces, place, self.scheme, _no_parts)

    def calibrated(self, matrix: ScaledMatrix, weight_OD: Tensor, moment_DD: Tensor) -> ScaledMatrix:  # type: ignore[override]
        """See Quantization."""
        return gptq(matrix, weight_OD, moment_DD)

    def written(self, name: str, matrix: ScaledMatrix) -> Mapping[str, Tensor]:  # type: ignore[override]
        """See Quantization: compressed-tensors' layout."""
        return tensors_of(matrix)

    def states(self, left: Sequence[str]) -> Mapping[str, Any]:
        """See Quantization."""
        return config_of(self.scheme, {*left, *self.skip})  # a tied head is not stored, so `left` lacks it


class RoundedFp8(Rounded):
    """A scale for each output."""

    option, scheme = "fp8", Scheme(FP8, 1, 0, activations="dynamic")


class RoundedFp8Blocks(Rounded):
    """A scale for each block of 128 outputs and 128 inputs."""

    option, scheme = "fp8_block", Scheme(FP8, 128, 128, activations="dynamic")


class RoundedInt8(Rounded):
    """A scale for each output."""

    option, scheme = "int8", Scheme(INT8, 1, 0)


class RoundedInt4(Rounded):
    """A scale and a zero point for each group of inputs."""

    option = "int4"

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        super().__init__(config, form)
        self.scheme = Scheme(INT4, 1, config.group_size, has_zeros=config.zero_points)


def _no_parts(name: str, num_rows: int, num_columns: int) -> Sequence[StoredPart]:
    raise AssertionError(f"{name} is made of floats")
