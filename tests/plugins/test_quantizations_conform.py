"""The quantizations that ship pass their conformance suite, each with tensors written by the tests' own code."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hookline.core.contracts import QuantizationConfig, StoredForm
from hookline.core.testing.quantization_suite import QuantizationSuite
from hookline.core.testing.running import failures
from hookline.plugins.quantizations.auto_round import AutoRound
from hookline.plugins.quantizations.awq import Awq
from hookline.plugins.quantizations.compressed_tensors import CompressedTensors
from hookline.plugins.quantizations.fp8 import FbgemmFp8, Fp8
from hookline.plugins.quantizations.gptq import Gptq
from hookline.plugins.quantizations.modelopt import Modelopt
from tests.quantised_layouts import FURTHER, LAYOUTS

CLASSES: dict[str, Any] = {
    "fp8": Fp8,
    "fbgemm_fp8": FbgemmFp8,
    "compressed-tensors": CompressedTensors,
    "auto-round": AutoRound,
    "awq": Awq,
    "gptq": Gptq,
    "modelopt": Modelopt,
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *FURTHER])
def test_each_layout_passes_the_suite(layout: str) -> None:
    given = (LAYOUTS | FURTHER)[layout]
    plugin = CLASSES[given.config["quant_method"]]

    class Suite(QuantizationSuite):
        stated = given.config
        name = "model.layers.1.mlp.down_proj"

        def make(self, form: StoredForm) -> Any:
            return plugin(QuantizationConfig(), form)

        def write(self, values_OD: Tensor) -> Any:
            return given.write(values_OD)

    assert failures(Suite) == []
