"""Products with quantised weights behind the Kernels contract, for kernels=triton: weights in e4m3.

Legend: T tokens, O output features, D input features, F half of gate and up.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.core.contracts import QuantizedMatrix, ScaledMatrix, Scheme
from hookline.plugins.kernels.products.scaled_products import E4m3Weight, ScaledProducts
from hookline.plugins.kernels.products.triton_product import Kind
from hookline.plugins.kernels.products.triton_scales import Scales, dequantised
from hookline.plugins.kernels.triton_attention import TritonAttention

FP8 = "fp8"
LEAST_COLUMNS = 128
"""Fewest inputs of a scale's block: a step of a product then lies in one block."""


class TritonQuantized(TritonAttention):
    """What TritonKernels computes with weights in e4m3; for it to extend."""

    _scaled_products: ScaledProducts | None = None

    def computes(self, scheme: Scheme, num_rows: int, num_columns: int) -> bool:
        """See Kernels.computes: e4m3 with any outputs to a scale, and all inputs or 128, 256, 512 and so on."""
        columns = scheme.columns
        has_whole_steps = columns % LEAST_COLUMNS == 0 and columns & (columns - 1) == 0
        return scheme.values == FP8 and not scheme.has_zeros and not scheme.is_reordered and has_whole_steps

    def prepare_weight(self, weight: QuantizedMatrix) -> Any:
        """See Kernels.prepare_weight."""
        assert isinstance(weight, ScaledMatrix) and weight.scheme.values == FP8, weight.scheme
        if self._scaled_products is None:  # before any graph is captured
            self._scaled_products = ScaledProducts(self.spec.device, self.spec.dtype)
        scheme, factors_RC = weight.scheme, weight.scales_RC
        if not scheme.rows:  # a scale of all outputs is as many equal ones
            factors_RC = factors_RC.expand(weight.num_rows, -1).contiguous()
        scales = Scales(factors_RC, scheme.rows or 1, scheme.columns)
        return E4m3Weight(weight.data, scales, may_round=bool(scheme.activations))

    def quantized_linear(self, x_TD: Tensor, weight: Any, bias_O: Tensor | None) -> Tensor:
        """See Kernels.quantized_linear."""
        out_TO = self._scaled_product(Kind.PLAIN, x_TD, weight, bias_O)
        if out_TO is None:
            return self.linear(x_TD, dequantised(weight.data_OD, weight.scales, x_TD.dtype), bias_O)
        return out_TO

    def quantized_linear_silu_mul(self, x_TD: Tensor, weight: Any) -> Tensor:
        """See Kernels.quantized_linear_silu_mul; one launch for few rows, besides that which rounds them."""
        out_TF = self._scaled_product(Kind.SILU, x_TD, weight, None)
        return self.silu_mul(self.quantized_linear(x_TD, weight, None)) if out_TF is None else out_TF

    def _scaled_product(self, kind: Kind, x_TD: Tensor, weight: E4m3Weight, bias_O: Tensor | None) -> Tensor | None:
        """The product; None where the weight is to be dequantised, or gate and up are to be multiplied first."""
        assert self._scaled_products is not None
        return self._scaled_products.product(kind, x_TD, weight, bias_O)
