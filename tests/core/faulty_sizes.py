"""Kernels with one planted fault each that shows beyond some size, at other strides, or with several layers.

What the conformance suite must say of them is below. Legend: as in core/contracts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import AttentionForm, AttentionSpec, Batch, QKNorm, Rope
from hookline.core.testing.plain_kernels import PlainKernels
from tests.core.faulty_attention import PlainForms

FEW = 33
"""Rows that these kernels compute."""
LARGE = 69
"""Tokens of a step that they attend for."""
SHORT = 300
"""Tokens of a context that they attend to."""


def first_rows(found: Tensor) -> Tensor:
    """The first few rows, and zeros."""
    found[FEW:] = 0
    return found


class MultipliesFewRows(PlainKernels):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return first_rows(super().linear(x_TD, weight_OD, bias_O))


class GatesFewProducts(PlainKernels):
    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        return first_rows(super().linear_silu_mul(x_TD, gate_up_weight_FD))


class AddsFewProducts(PlainKernels):
    def linear_add_rms_norm(self, *given: Any) -> tuple[Tensor, Tensor]:
        normed_TO, sum_TO = super().linear_add_rms_norm(*given)
        return first_rows(normed_TO), sum_TO


class NormalisesFewRows(PlainKernels):
    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return first_rows(super().rms_norm(x_TD, weight_D, eps))


class AddsFewRows(PlainKernels):
    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed_TD, sum_TD = super().add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return normed_TD, first_rows(sum_TD)


class GatesFewRows(PlainKernels):
    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        return first_rows(super().silu_mul(gate_up_TF))


class RotatesFewRows(PlainKernels):
    def qk_norm_rope(self, *given: Any) -> tuple[Tensor, Tensor]:
        q_THE, k_TKE = super().qk_norm_rope(*given)
        return first_rows(q_THE), k_TKE


class WritesFewTokens(PlainKernels):
    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        super().write_kv(k_TKE[:FEW], v_TKE[:FEW], kv_2NSKE, slot_mapping_T[:FEW])


class AttendsForFewDecodes(PlainKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        found_THE = super().attend(q_THE, kv_2NSKE, batch)
        return first_rows(found_THE) if batch.num_decodes == batch.num_requests else found_THE


class AttendsForFewTokens(PlainKernels):
    """And gives the others of a large step nothing."""

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        found_THE = super().attend(q_THE, kv_2NSKE, batch)
        found_THE[LARGE:] = 0
        return found_THE


class FusesFewDecodes(PlainKernels):
    def qkv_attend(self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, *rest: Any) -> Tensor:
        found_THE = super().qkv_attend(qkv_TC, kv_2NSKE, batch, *rest)
        return first_rows(found_THE) if batch.num_decodes == batch.num_requests else found_THE


class DropsValuesOfLongContexts(PlainKernels):
    longest = SHORT

    def attend_row(self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *rest: Any) -> Tensor:
        is_seen_L = torch.arange(len(v_LKE)) < self.longest
        return super().attend_row(q_QHE, k_LKE, v_LKE * is_seen_L[:, None, None], *rest)


class DropsValuesOfLongestContexts(DropsValuesOfLongContexts):
    """Not caught at the small limits."""

    longest = 1000


class RoutesFewTokens(PlainKernels):
    def route_experts(self, logits_TX: Tensor, top_k: int, normalise: bool, *others: Any) -> tuple[Tensor, Tensor]:
        expert_TA, weight_TA = super().route_experts(logits_TX, top_k, normalise, *others)
        return expert_TA, first_rows(weight_TA)


class AsksFewExperts(PlainKernels):
    def expert_mlp(self, *given: Tensor) -> Tensor:
        return first_rows(super().expert_mlp(*given))


class MasksFewRows(PlainKernels):
    def mask_logits(self, logits_NV: Tensor, masks_RW: Tensor, index_N: Tensor) -> Tensor:
        return first_rows(super().mask_logits(logits_NV, masks_RW, index_N))


class ReadsWeightsByRows(PlainKernels):
    """At the weight's address, as if it were stored by rows."""

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        num_out, width = weight_OD.shape
        return super().linear(x_TD, weight_OD.as_strided((num_out, width), (width, 1)), bias_O)


class ReadsGatedWeightsByRows(PlainKernels):
    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        num_out, width = gate_up_weight_FD.shape
        return super().linear_silu_mul(x_TD, gate_up_weight_FD.as_strided((num_out, width), (width, 1)))


class ReadsAddedWeightsByRows(PlainKernels):
    def linear_add_rms_norm(self, x_TD: Tensor, weight_OD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        num_out, width = weight_OD.shape
        return super().linear_add_rms_norm(x_TD, weight_OD.as_strided((num_out, width), (width, 1)), *rest)


class NormalisesAdjacentRows(PlainKernels):
    """Reads rows as if they followed one another."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x_TD.as_strided(x_TD.shape, torch.empty(x_TD.shape).stride()), weight_D, eps)


class ReusesItsMemory(PlainKernels):
    """Returns the same tensor for all results of a size."""

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self.memory: dict[tuple[int, ...], Tensor] = {}

    def reuse(self, found: Tensor) -> Tensor:
        return self.memory.setdefault(found.shape, torch.empty_like(found)).copy_(found)


class ReusesItsProducts(ReusesItsMemory):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.reuse(super().linear(x_TD, weight_OD, bias_O))


class ReusesItsNorms(ReusesItsMemory):
    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return self.reuse(super().rms_norm(x_TD, weight_D, eps))


class ReusesItsGates(ReusesItsMemory):
    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        return self.reuse(super().silu_mul(gate_up_TF))


class ReusesItsAttention(ReusesItsMemory):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        return self.reuse(super().attend(q_THE, kv_2NSKE, batch))


class NormalisesOverItsProducts(PlainKernels):
    """Products are right until a norm is computed, as if both had the same scratch space."""

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self.products: list[Tensor] = []

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        self.products.append(super().linear(x_TD, weight_OD, bias_O))
        return self.products[-1]

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        found_TD = super().rms_norm(x_TD, weight_D, eps)
        for product_TO in self.products:
            product_TO.zero_()
        return found_TD


class KeepsFirst(PlainKernels):
    """Goes on with what it was given first, of each size."""

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self.firsts: dict[Any, Any] = {}

    def first(self, key: Any, given: Any) -> Any:
        return given if given is None else self.firsts.setdefault(key, given)


class KeepsTheFirstWeight(KeepsFirst):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return super().linear(x_TD, self.first(weight_OD.shape, weight_OD), bias_O)


class KeepsTheFirstBias(KeepsFirst):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return super().linear(x_TD, weight_OD, self.first(weight_OD.shape, bias_O))


class KeepsTheFirstGatedWeight(KeepsFirst):
    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        return super().linear_silu_mul(x_TD, self.first(gate_up_weight_FD.shape, gate_up_weight_FD))


class KeepsTheFirstWeightOfANorm(KeepsFirst):
    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x_TD, self.first(weight_D.shape, weight_D), eps)


class KeepsTheFirstExperts(KeepsFirst):
    def expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        return super().expert_mlp(x_TD, expert_TA, weight_TA, self.first(gate_up_XFD.shape, gate_up_XFD), down_XDF)


class KeepsTheFirstRope(KeepsFirst):
    def qk_norm_rope(
        self, q_THE: Tensor, k_TKE: Tensor, positions_T: Tensor, rope: Rope | None, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor]:
        rope = rope if rope is None else self.first(rope.table_PE.shape, rope)
        return super().qk_norm_rope(q_THE, k_TKE, positions_T, rope, norm)


class KeepsTheFirstQKNorm(KeepsFirst):
    def qk_norm_rope(
        self, q_THE: Tensor, k_TKE: Tensor, positions_T: Tensor, rope: Rope | None, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor]:
        return super().qk_norm_rope(q_THE, k_TKE, positions_T, rope, self.first("norm", norm))


class WritesByTheFirstRope(KeepsFirst):
    def qk_norm_rope_write(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        rope = rope if rope is None else self.first(rope.table_PE.shape, rope)
        return super().qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, rope, norm)


class FusesWithTheFirstQKNorm(KeepsFirst):
    def qkv_attend(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        return super().qkv_attend(qkv_TC, kv_2NSKE, batch, rope, self.first("norm", norm))


class KeepsTheFirstSinks(PlainForms):
    first: AttentionForm | None = None

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: AttentionForm) -> Tensor:
        if form and form[0].sinks_H is not None:
            self.first = self.first or form[0]
            form = (replace(form[0], sinks_H=self.first.sinks_H),)
        return super().attend(q_THE, kv_2NSKE, batch, *form)


class WritesTwoKvHeads(PlainKernels):
    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        super().write_kv(k_TKE[:, :2], v_TKE[:, :2], kv_2NSKE[..., :2, :], slot_mapping_T)


class AttendsToTwoKvHeads(PlainKernels):
    def attend_row(self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *rest: Any) -> Tensor:
        v_LKE = v_LKE.clone()
        v_LKE[:, 2:] = 0
        return super().attend_row(q_QHE, k_LKE, v_LKE, *rest)


class NormalisesTwoKvHeads(PlainKernels):
    def qk_norm_rope(
        self, q_THE: Tensor, k_TKE: Tensor, positions_T: Tensor, rope: Rope | None, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor]:
        q_THE, done_TKE = super().qk_norm_rope(q_THE, k_TKE, positions_T, rope, norm)
        return q_THE, torch.cat((done_TKE[:, :2], k_TKE[:, 2:]), 1)


class WritesTwoKvHeadsWhenItFuses(PlainKernels):
    def qk_norm_rope_write(self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, *rest: Any) -> Tensor:
        before = kv_2NSKE[..., 2:, :].clone()
        q_THE = super().qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, *rest)
        kv_2NSKE[..., 2:, :] = before
        return q_THE


class TakesTheSecondKvHeadAlways(PlainKernels):
    """Right for two kv heads, and of one head reads no further."""

    def qkv_attend(self, qkv_TC: Tensor, *rest: Any) -> Tensor:
        found_THE = super().qkv_attend(qkv_TC, *rest)
        return found_THE if self.spec.num_kv_heads > 1 else found_THE * 0.5


FAULTS = {
    MultipliesFewRows: "test_linear: AssertionError: linear of (71, 64) without bias",
    GatesFewProducts: "test_linear_silu_mul: AssertionError: linear_silu_mul of (71, 64)",
    AddsFewProducts: "test_linear_add_rms_norm: AssertionError: the norm that linear_add_rms_norm of (71, 64)",
    NormalisesFewRows: "test_rms_norm: AssertionError: rms_norm of (71, 64)",
    AddsFewRows: "test_add_rms_norm: AssertionError: the sum that add_rms_norm of (71, 64)",
    GatesFewRows: "test_silu_mul: AssertionError: silu_mul of (71, 64)",
    RotatesFewRows: "test_qk_norm_rope: AssertionError: q of qk_norm_rope with norm and rope of 71 tokens",
    WritesFewTokens: "test_write_kv_writes_its_slots_and_nothing_else: AssertionError: "
    "the keys that write_kv of 71 tokens leaves",
    AttendsForFewDecodes: "test_attend_at_the_limits_of_the_spec: AssertionError: "
    "attend, as many decodes as there may be",
    AttendsForFewTokens: "test_attend_at_the_limits_of_the_spec: AssertionError: "
    "attend, as many tokens as there may be",
    FusesFewDecodes: "test_qkv_attend: AssertionError: what qkv_attend with norm and rope of 36 rows returns",
    DropsValuesOfLongContexts: "test_attend_at_the_limits_of_the_spec: AssertionError: "
    "attend, as many decodes as there may be",
    RoutesFewTokens: "test_route_experts: AssertionError: the weights of route_experts, 1 of 4 for 71 tokens",
    AsksFewExperts: "test_expert_mlp: AssertionError: expert_mlp of 71 tokens by any experts",
    MasksFewRows: "test_mask_logits: AssertionError: mask_logits of 36 x 70",
    ReadsWeightsByRows: "test_linear: AssertionError: linear of (1, 64) without bias and a transposed weight",
    ReadsGatedWeightsByRows: "test_linear_silu_mul: AssertionError: linear_silu_mul of (1, 64) and a transposed weight",
    ReadsAddedWeightsByRows: "test_linear_add_rms_norm: AssertionError: "
    "the norm that linear_add_rms_norm of (1, 64) without bias and a transposed weight",
    NormalisesAdjacentRows: "test_rms_norm: AssertionError: rms_norm of (5, 64) that are not adjacent in memory",
    ReusesItsProducts: "test_later_calls_overwrite_no_result_of_norms_and_products: AssertionError: "
    "what linear of 2 rows",
    ReusesItsNorms: "test_later_calls_overwrite_no_result_of_norms_and_products: AssertionError: "
    "what rms_norm of 2 rows",
    ReusesItsGates: "test_later_calls_overwrite_no_result_of_norms_and_products: AssertionError: "
    "what silu_mul of 2 rows",
    ReusesItsAttention: "test_later_calls_overwrite_no_result_of_attention_experts_and_states: AssertionError: "
    "what attend of a step of 3 rows",
    NormalisesOverItsProducts: "test_later_calls_overwrite_no_result_of_norms_and_products: AssertionError: "
    "what linear of 2 rows",
    KeepsTheFirstWeight: "test_linear: AssertionError: linear of (1, 64) without bias and a transposed weight",
    KeepsTheFirstBias: "test_linear: AssertionError: linear of (2, 64) with bias",
    KeepsTheFirstGatedWeight: "test_linear_silu_mul: AssertionError: "
    "linear_silu_mul of (1, 64) and a transposed weight",
    KeepsTheFirstWeightOfANorm: "test_rms_norm: AssertionError: rms_norm of (5, 64)",
    KeepsTheFirstExperts: "test_expert_mlp: AssertionError: expert_mlp of 1 tokens by the same experts",
    KeepsTheFirstRope: "test_qk_norm_rope: AssertionError: q of qk_norm_rope with another layer's rope",
    KeepsTheFirstQKNorm: "test_qk_norm_rope: AssertionError: q of qk_norm_rope with another layer's norm",
    WritesByTheFirstRope: "test_qk_norm_rope_write: AssertionError: q of qk_norm_rope_write with another layer's rope",
    FusesWithTheFirstQKNorm: "test_qkv_attend: AssertionError: what qkv_attend with another layer's norm of 4 rows",
    KeepsTheFirstSinks: "test_attend_in_forms_that_differ_from_layer_to_layer: AssertionError: "
    "attend with scale, sinks, softcap of layer 1",
    WritesTwoKvHeads: "test_write_kv_writes_its_slots_and_nothing_else: AssertionError: "
    "the keys that write_kv of 11 tokens leaves in the cache (bfloat16, block size 16, 10 heads",
    AttendsToTwoKvHeads: "test_attend_with_other_numbers_of_kv_heads: AssertionError: "
    "attend, decodes (bfloat16, block size 16, 10 heads over 5 kv heads",
    NormalisesTwoKvHeads: "test_qk_norm_rope: AssertionError: "
    "k of qk_norm_rope with norm and rope of 9 tokens (bfloat16, block size 16, 10 heads",
    WritesTwoKvHeadsWhenItFuses: "test_qk_norm_rope_write: AssertionError: "
    "the keys that qk_norm_rope_write with norm and rope of 5 tokens leaves",
    TakesTheSecondKvHeadAlways: "test_qkv_attend: AssertionError: "
    "what qkv_attend with norm and rope of 2 rows returns (bfloat16, block size 16, 2 heads",
}
