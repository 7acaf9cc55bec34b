"""Products with quantised weights behind the Kernels contract, for kernels=triton: weights in e4m3, int8 and int4.

An offset for each group of inputs is a further, small product, with the sums of the groups.

Legend: T tokens, O output features, D input features, F half of gate and up, A experts of a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from hookline.core.contracts import FP8, INT4, INT8, OFFSETS, OffsetMatrix, QuantizedMatrix, ScaledMatrix, Scheme
from hookline.plugins.kernels.experts import triton_experts, triton_few_experts
from hookline.plugins.kernels.experts.triton_int4_experts import few_int4_experts, fits_few, int4_expert_outputs
from hookline.plugins.kernels.norms import triton_norms
from hookline.plugins.kernels.products.scaled_products import OffsetWeight, ScaledProducts, ScaledWeight
from hookline.plugins.kernels.products.triton_product import Kind
from hookline.plugins.kernels.products.triton_rounding import RoundedRows, empty_rounded
from hookline.plugins.kernels.products.triton_scales import Scales
from hookline.plugins.kernels.products.triton_tiled import OFFSET_GROUPS, STEP, TiledWeight
from hookline.plugins.kernels.triton_attention import TritonAttention
from hookline.plugins.kernels.triton_launch import next_power_of_2

VALUES = (FP8, INT8, INT4)
LEAST_COLUMNS = {FP8: 32, INT8: 16, INT4: 32}
"""Fewest inputs of a scale's block: a step of a product lies in one block. A rank's part may cut through blocks of more
inputs, which are then blocks of fewer."""
TILED_GROUP = 32
"""Inputs of a scale's block for which int8 is stored in tiles, as int4 always is."""
INT4_MULTIPLE = 8
"""The inputs of a weight in int4 are a multiple of this number of values in a word of 32 bits."""


class TritonQuantized(TritonAttention):
    """The products of TritonKernels with quantised weights; its base class."""

    tiles_integers = True
    """Whether weights may be stored as `tiled_weight` does; False for kernels without products of that layout."""
    _scaled_products: ScaledProducts | None = None

    def computes(self, scheme: Scheme, num_rows: int, num_columns: int) -> bool:
        """See Kernels.computes: any outputs to a scale, and all inputs or a power of two from LEAST_COLUMNS on."""
        columns, is_int4 = scheme.columns, scheme.values == INT4
        if scheme.values in OFFSETS:
            # Sums of groups by torch are not the same for every number of rows.
            is_whole = bool(columns) and num_columns % columns == 0 and not self.spec.batch_invariant
            return is_whole and self.computes(replace(scheme, values=OFFSETS[scheme.values]), num_rows, num_columns)
        if scheme.is_reordered or (scheme.has_zeros and not is_int4) or (is_int4 and num_columns % INT4_MULTIPLE):
            return False
        is_power = columns & (columns - 1) == 0
        return scheme.values in VALUES and (not columns or (columns >= LEAST_COLUMNS[scheme.values] and is_power))

    def prepare_weight(self, weight: QuantizedMatrix) -> Any:
        """See Kernels.prepare_weight."""
        if isinstance(weight, OffsetMatrix):
            scaled = self.prepare_weight(weight.scaled)
            if isinstance(scaled, TiledWeight) and scaled.groups == STEP // weight.scheme.columns == OFFSET_GROUPS:
                return scaled.with_offsets(weight.offsets_OC)
            return OffsetWeight(scaled, weight.offsets_OC.to(self.spec.dtype))
        assert isinstance(weight, ScaledMatrix) and weight.scheme.values in VALUES, weight.scheme
        if self._scaled_products is None:  # before any graph is captured
            self._scaled_products = ScaledProducts(self.spec.device, self.spec.dtype)
        scheme, factors_RC, zeros_RC = weight.scheme, weight.scales_RC, weight.zeros_RC
        if not scheme.rows:  # a scale of all outputs is repeated for each output
            shape = *factors_RC.shape[:-2], weight.num_rows, -1
            factors_RC = factors_RC.expand(shape).contiguous()
            zeros_RC = None if zeros_RC is None else zeros_RC.expand(shape).contiguous()
        packed = 2 if scheme.values == INT4 else 1
        scales = Scales(factors_RC, scheme.rows or 1, scheme.columns, packed, zeros_RC)
        is_grouped = scheme.values == INT8 and scheme.columns == TILED_GROUP and weight.data.dim() == 2
        is_tiled = (packed == 2 or is_grouped) and self.tiles_integers and self._scaled_products.tiles_integers
        if is_tiled and weight.num_columns % INT4_MULTIPLE == 0:
            return self._scaled_products.tiled_weight(weight.data, scales)
        return ScaledWeight(weight.data, scales, may_round=scheme.values == FP8 and bool(scheme.activations))

    def quantized_linear(self, x_TD: Any, weight: Any, bias_O: Tensor | None) -> Tensor:
        """See Kernels.quantized_linear."""
        scaled = weight.weight if isinstance(weight, OffsetWeight) else weight
        out_TO = self._scaled_product(Kind.PLAIN, x_TD, scaled, bias_O)
        if out_TO is None:
            out_TO = self.linear(x_TD, scaled.dequantised(x_TD.dtype), bias_O)
        if isinstance(weight, OffsetWeight):
            out_TO.add_(self.linear(weight.group_sums(x_TD), weight.offsets_OC, None))
        return out_TO

    def quantized_linear_silu_mul(self, x_TD: Any, weight: Any, then: Any = None) -> Any:
        """See Kernels.quantized_linear_silu_mul; one launch for few rows, and many are rounded for the next product."""
        products = self._products_of_rounded(len(x_TD), then)
        if products is not None:
            rounded = products.rounded_silu(x_TD, weight, then)
            if rounded is not None:
                return rounded
        is_whole = not isinstance(weight, OffsetWeight)  # else gate and up have offsets to add first
        out_TF = self._scaled_product(Kind.SILU, x_TD, weight, None) if is_whole else None
        if out_TF is not None:
            return out_TF
        gate_up_TF = self.quantized_linear(x_TD, weight, None)
        return self.silu_mul(gate_up_TF) if products is None else products.round(gate_up_TF, then, silu=True)

    def quantized_linear_add_rms_norm(
        self, x_TD: Any, weight: Any, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor, eps: float,
        then: Any = None,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        """See Kernels.quantized_linear_add_rms_norm; the norm is rounded to e4m3 if the next product takes that."""
        product_TO = self.quantized_linear(x_TD, weight, bias_O)
        products = self._products_of_rounded(len(x_TD), then)
        if products is None:
            return self.add_rms_norm(product_TO, residual_TO, norm_weight_O, eps)
        num_rows, num_out = product_TO.shape
        columns = products.columns(num_rows, then)
        rounded = empty_rounded(num_rows, num_out, columns, product_TO.device)
        given = rounded.values_TD, rounded.scales_TG.t(), columns or next_power_of_2(num_out)
        _, sum_TO = triton_norms.add_rms_norm(product_TO, residual_TO, norm_weight_O, eps, given)
        return rounded, sum_TO

    def quantized_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up: Any, down: Any
    ) -> Tensor:
        """See Kernels.quantized_expert_mlp; a few tokens as they come, others grouped by expert on the device."""
        given = x_TD, expert_TA, weight_TA
        if isinstance(down, TiledWeight) and fits_few(x_TD, expert_TA, gate_up, down):
            return few_int4_experts(*given, gate_up, down)
        if _fits_few(x_TD, expert_TA, down):
            weights = gate_up.data_OD, down.data_OD
            return triton_few_experts.few_expert_mlp(*given, *weights, scales=(gate_up.scales, down.scales))
        return triton_experts.summed(_expert_outputs(*given, gate_up, down))

    def quantized_expert_mlp_add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up: Any, down: Any, residual_TD: Tensor,
        norm_weight_D: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See Kernels.quantized_expert_mlp_add_rms_norm; the norm adds up the experts of more than a few tokens."""
        given = x_TD, expert_TA, weight_TA
        has_its_own = type(self).quantized_expert_mlp is not TritonQuantized.quantized_expert_mlp
        if has_its_own or _fits_few(x_TD, expert_TA, down):
            return super().quantized_expert_mlp_add_rms_norm(*given, gate_up, down, residual_TD, norm_weight_D, eps)
        parts_ATD = _expert_outputs(*given, gate_up, down).transpose(0, 1)
        return triton_norms.add_parts_rms_norm(parts_ATD, residual_TD.contiguous(), norm_weight_D, eps)

    def _products_of_rounded(self, num_rows: int, then: Any) -> ScaledProducts | None:
        """The ScaledProducts, if products with the next weight take so many rows in e4m3; else None."""
        products = self._scaled_products
        if (
            then is None
            or isinstance(then, OffsetWeight)
            or products is None
            or not products.takes_rounded(num_rows, then)
        ):
            return None
        return products

    def _scaled_product(
        self, kind: Kind, x: Tensor | RoundedRows, weight: ScaledWeight | TiledWeight, bias_O: Tensor | None
    ) -> Tensor | None:
        """The product; None where the weight is to be dequantised, or gate and up are to be multiplied first."""
        assert self._scaled_products is not None
        return self._scaled_products.product(kind, x, weight, bias_O)


def _expert_outputs(x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up: Any, down: Any) -> Tensor:
    """The outputs of each token's experts, times their weights, for the sum over experts: (T, A, D)."""
    if isinstance(gate_up, TiledWeight):
        return int4_expert_outputs(x_TD, expert_TA, weight_TA, gate_up, down)
    return triton_experts.expert_outputs(
        x_TD, expert_TA, weight_TA, gate_up.data_OD, down.data_OD, scales=(gate_up.scales, down.scales),
        may_round=gate_up.may_round and down.may_round,
    )  # fmt: skip


def _fits_few(x_TD: Tensor, expert_TA: Tensor, down: Any) -> bool:
    """Whether tokens are not grouped by expert: few tokens, or one if more are faster rounded to e4m3 and grouped."""
    if isinstance(down, TiledWeight):
        return False
    if len(x_TD) > 1 and down.may_round and triton_experts.rounds_rows(x_TD):
        return False
    return triton_few_experts.fits(expert_TA, len(down.data_OD))
