"""Kernels that declare batch-invariant mode with one planted fault each. Legend: as in core/contracts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec, Batch
from hookline.core.testing.plain_kernels import PlainKernels

NUDGE = 1 + 2**-7
"""The least that shows in bfloat16."""


class InvariantKernels(PlainKernels):
    """No fault: in float64, rounded once, the order of a sum does not show."""

    batch_invariant = True

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self.is_on = spec.batch_invariant


class IgnoresTheMode(InvariantKernels):
    """As any kernels without the mode: few rows take another way."""

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return super().linear(x_TD, weight_OD, bias_O) * (NUDGE if len(x_TD) < 4 else 1)


class MultipliesManyRowsInParts(InvariantKernels):
    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        return super().linear_silu_mul(x_TD, gate_up_weight_FD) * (NUDGE if self.is_on and len(x_TD) > 64 else 1)


class RoundsTheEndOfALoopOtherwise(InvariantKernels):
    """The last numbers of all rows, whichever these are."""

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        out_TF = super().silu_mul(gate_up_TF)
        if self.is_on:
            out_TF.view(-1)[-3:] *= NUDGE
        return out_TF


class NormalisesAllRowsTogether(InvariantKernels):
    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed_TD, sum_TD = super().add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return (normed_TD * (1 + 0.02 * len(x_TD) / 70) if self.is_on else normed_TD), sum_TD


class ComputesCrowdedExpertsOtherwise(InvariantKernels):
    def expert_mlp(self, x_TD: Tensor, expert_TA: Tensor, *rest: Tensor) -> Tensor:
        crowded = self.is_on and int(torch.bincount(expert_TA.flatten()).max()) > 30
        return super().expert_mlp(x_TD, expert_TA, *rest) * (NUDGE if crowded else 1)


class AttendsWithDecodesOtherwise(InvariantKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: Any) -> Tensor:
        out_THE = super().attend(q_THE, kv_2NSKE, batch, *form)
        if self.is_on:
            out_THE[: batch.num_decodes] *= NUDGE
        return out_THE


class CutsByTheLongestContext(InvariantKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: Any) -> Tensor:
        is_cut = self.is_on and batch.num_requests > 1
        return super().attend(q_THE, kv_2NSKE, batch, *form) * (NUDGE if is_cut else 1)


class CutsFewDecodesOfLongContexts(InvariantKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: Any) -> Tensor:
        is_cut = self.is_on and batch.max_context_len > 1024 and batch.num_requests == batch.num_decodes == 1
        return super().attend(q_THE, kv_2NSKE, batch, *form) * (NUDGE if is_cut else 1)


class CutsFromTheFirstQuery(InvariantKernels):
    """A chunk's tiles begin at its first token."""

    def attend_row(self, q_QHE: Tensor, k_LKE: Tensor, *rest: Any) -> Tensor:
        is_odd = self.is_on and (len(k_LKE) - len(q_QHE)) % 16
        return super().attend_row(q_QHE, k_LKE, *rest) * (NUDGE if is_odd else 1)


class LooksAtWhereBlocksLie(InvariantKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, *form: Any) -> Tensor:
        out_THE = super().attend(q_THE, kv_2NSKE, batch, *form)
        first, second = batch.block_table_BM[0, :2].tolist() if batch.block_table_BM.shape[1] > 1 else (0, 0)
        return out_THE * (NUDGE if self.is_on and first < second else 1)


FAULTS = {
    IgnoresTheMode: "test_a_row_has_the_same_bits_in_every_batch: linear of 64 to 102 features gives row",
    MultipliesManyRowsInParts: "test_a_row_has_the_same_bits_in_every_batch: "
    "linear_silu_mul of 64 to 102 features gives row",
    RoundsTheEndOfALoopOtherwise: "test_a_row_has_the_same_bits_in_every_batch: silu_mul gives row",
    NormalisesAllRowsTogether: "test_a_row_has_the_same_bits_in_every_batch: add_rms_norm gives row",
    ComputesCrowdedExpertsOtherwise: "test_a_row_has_the_same_bits_in_every_batch: expert_mlp gives row",
    AttendsWithDecodesOtherwise: "test_a_token_attends_with_the_same_bits_in_every_chunk: "
    "attend gives other bits than in the whole prompt to token 0 as a decode",
    CutsByTheLongestContext: "test_a_token_attends_with_the_same_bits_in_every_chunk: "
    "token 0 as a decode beside other rows",
    CutsFewDecodesOfLongContexts: "test_the_last_tokens_of_a_long_context_attend_with_the_same_bits_in_every_chunk: "
    "token 1024 as a decode of 1100",
    CutsFromTheFirstQuery: "test_a_token_attends_with_the_same_bits_in_every_chunk: the chunk of tokens 1 to 7 of",
    LooksAtWhereBlocksLie: "test_the_last_tokens_of_a_long_context_attend_with_the_same_bits_in_every_chunk: "
    "all its tokens in other blocks of",
}
