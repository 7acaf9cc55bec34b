"""NVIDIA modelopt's checkpoints: FP8 with one scale, and NVFP4; by config.json or by hf_quant_config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hookline.core.contracts import FP8, Scheme, StoredForm
from hookline.plugins.quantizations.fp4 import NVFP4, nvfp4_parts
from hookline.plugins.quantizations.fp8 import CACHE_SCALES, E4M3
from hookline.plugins.quantizations.loading import ScaledQuantization, StoredPart, plain_read, scalar_read
from hookline.plugins.quantizations.names import HEADS
from hookline.plugins.quantizations.values import Stated


class Modelopt(ScaledQuantization):
    """Reads quant_method modelopt."""

    surplus = CACHE_SCALES

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        outer = Stated(form.stated or {})
        stated = outer.inner("quantization") or outer
        algorithm = stated.one_of("quant_algo", "FP8", "NVFP4")
        if algorithm == "NVFP4":
            stated.one_of("group_size", 16, default=16)
        self.is_fp4 = algorithm == "NVFP4"
        self.scheme = replace(NVFP4, activations="static") if self.is_fp4 else Scheme(FP8, 0, 0, activations="static")
        self.left = [*stated.texts("exclude_modules", "ignore"), *outer.texts("ignore"), *HEADS]
        self.dtypes = form.dtypes

    def parts(self, name: str, num_rows: int, num_columns: int) -> list[StoredPart]:
        """See ScaledQuantization."""
        if self.is_fp4:
            parts = nvfp4_parts(num_rows, num_columns, "weight", "weight_scale_2")
        else:
            parts = [
                StoredPart("weight", "data", (num_rows, num_columns), plain_read, E4M3),
                StoredPart("weight_scale", "scales", (), scalar_read),
            ]
        if f"{name}.input_scale" in self.dtypes or not self.dtypes:
            parts.append(StoredPart("input_scale", "input_scale", (), scalar_read))
        return parts
