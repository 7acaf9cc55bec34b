"""Weights that kernels do not compute are refused on a GPU, with what the kernels lack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline.core.contracts import INT8, Activation, MatrixPiece, Part, Scheme
from hookline.core.errors import ConfigError
from hookline.core.layers.quantized import QuantizedWeights


@pytest.mark.parametrize(
    ("num_experts", "activation", "told"),
    [
        (4, "gelu_tanh", "quantised experts with a gate of gelu_tanh, which is what mlp.experts.0.down is stored as"),
        (4, "silu", "kernels=fake do not compute what mlp.experts.0.down is stored as"),
        (None, "silu", "kernels=fake do not compute what mlp.experts.0.down is stored as"),
    ],
)
def test_a_matrix_that_no_kernels_compute_on_a_gpu_is_refused_with_what_they_lack(
    num_experts: int | None, activation: Activation, told: str
) -> None:
    scheme = Scheme(INT8, 1, 0)
    quantization: Any = SimpleNamespace(matrix=lambda pieces, place: SimpleNamespace(scheme=scheme))
    kernels = SimpleNamespace(
        quantized_expert_mlp=lambda *given: None, computes=lambda *given: activation == "gelu_tanh"
    )
    runtime: Any = SimpleNamespace(kernels=kernels, device=torch.device("cuda"))
    factory = QuantizedWeights(quantization, {}, from_floats=True, dequantises=False, kernels="fake")
    piece = MatrixPiece("mlp.experts.0.down", 0, Part(8, 0, 8), Part(4, 0, 4))
    with pytest.raises(ConfigError) as error:
        factory.begin(runtime, (8, 4), [piece], num_experts, activation)
    assert told in str(error.value) and "set quantization.dequantize=true" in str(error.value)
