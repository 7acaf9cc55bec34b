"""GPTQ: outputs of linears change less than by rounding to the nearest, for inputs like those that were seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hookline.core.contracts import FP8, INT4, INT8, MatrixPiece, MatrixPlace, Part, ScaledMatrix, Scheme
from hookline.core.errors import CheckpointError
from hookline.plugins.quantizations.gptq_rounding import BLOCK, gptq
from hookline.plugins.quantizations.loading import ScaledLoading

SCHEMES = {
    "int4 with zero points": Scheme(INT4, 1, 32, has_zeros=True),
    "int4": Scheme(INT4, 1, 64),
    "int8": Scheme(INT8, 1, 0),
    "fp8": Scheme(FP8, 1, 0),
    "fp8 in blocks": Scheme(FP8, 32, 32),
}
NUM_ROWS, NUM_COLUMNS = 48, BLOCK + 64
"""More inputs than one block of errors has."""


def rounded(weight_OD: Tensor, scheme: Scheme) -> ScaledMatrix:
    """To the nearest."""
    rows, columns = weight_OD.shape
    piece = MatrixPiece("layer", 0, Part(rows, 0, rows), Part(columns, 0, columns))
    place = MatrixPlace(rows, columns, torch.device("cpu"), from_floats=True)
    loading = ScaledLoading([piece], place, scheme, lambda *_: ())
    loading.targets()["layer.weight"].fill(weight_OD)
    matrix: Any = loading.loaded()
    return matrix  # type: ignore[no-any-return]


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    """A weight, and rows of inputs that depend on each other and differ in size; the third input never occurs."""
    generator = torch.Generator().manual_seed(seed)
    weight_OD = torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator)
    mixing_DD = torch.randn(NUM_COLUMNS, NUM_COLUMNS, generator=generator) * torch.rand(NUM_COLUMNS) ** 2
    x_TD = torch.randn(600, NUM_COLUMNS, generator=generator) @ mixing_DD
    x_TD[:, 2] = 0
    return weight_OD, x_TD


def error(matrix: ScaledMatrix, weight_OD: Tensor, x_TD: Tensor) -> float:
    return float((x_TD @ (matrix.dequantised(torch.float32) - weight_OD).T).square().mean())


@pytest.mark.parametrize("name", SCHEMES)
def test_outputs_change_less_than_by_rounding_to_the_nearest(name: str) -> None:
    weight_OD, x_TD = inputs(seed=1)
    nearest = rounded(weight_OD, SCHEMES[name])
    found = gptq(nearest, weight_OD, x_TD.T @ x_TD)
    assert error(found, weight_OD, x_TD) < 0.7 * error(nearest, weight_OD, x_TD)
    assert torch.equal(found.scales_RC, nearest.scales_RC)
    assert found.data.dtype == nearest.data.dtype and found.data.shape == nearest.data.shape
    step_OD = nearest.spread(nearest.scales_RC).expand(weight_OD.shape)
    change_O = (found.dequantised(torch.float32) - nearest.dequantised(torch.float32))[:, 2].abs() / step_OD[:, 2]
    assert not change_O.any(), "an input that never occurs is rounded to the nearest"


@pytest.mark.parametrize("name", SCHEMES)
def test_inputs_that_do_not_depend_on_each_other_are_rounded_to_the_nearest(name: str) -> None:
    weight_OD, _ = inputs(seed=2)
    nearest = rounded(weight_OD, SCHEMES[name])
    found = gptq(nearest, weight_OD, torch.diag(torch.rand(NUM_COLUMNS) + 0.1))
    assert torch.equal(found.dequantised(torch.float32), nearest.dequantised(torch.float32))


def test_fewer_rows_than_inputs_and_equal_rows_are_damped() -> None:
    weight_OD, x_TD = inputs(seed=3)
    x_TD = x_TD[:1].repeat(5, 1)
    nearest = rounded(weight_OD, SCHEMES["int4"])
    found = gptq(nearest, weight_OD, x_TD.T @ x_TD)
    assert error(found, weight_OD, x_TD) < 0.1 * error(nearest, weight_OD, x_TD)


def test_inputs_that_are_not_finite_are_an_error() -> None:
    weight_OD, _ = inputs(seed=4)
    moment_DD = torch.eye(NUM_COLUMNS)
    moment_DD[3, 3] = torch.inf
    with pytest.raises(CheckpointError, match="not finite"):
        gptq(rounded(weight_OD, SCHEMES["int8"]), weight_OD, moment_DD)
