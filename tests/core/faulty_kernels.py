"""Kernels with one planted fault each, and what the conformance suite must say. Legend: as in core/contracts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import (
    ATTENTION_FEATURES,
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Batch,
    DecodeInputs,
    DraftingRows,
    Kernels,
    QKNorm,
    RequestRows,
    Rope,
)
from hookline.core.layers import every_expert
from hookline.core.testing.plain_kernels import PlainKernels


class DenseKernels(PlainKernels):
    """No fault, and graph-safe: every query looks at the whole of its table row, and a mask says what it sees."""

    graph_safe = graph_prefill = sizes_alike = True
    attention = ATTENTION_FEATURES

    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        for half_NSKE, values_TKE in zip(kv_2NSKE, (k_TKE, v_TKE), strict=False):
            half_NSKE.flatten(0, 1).index_copy_(0, slot_mapping_T, values_TKE)

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        row_T = torch.searchsorted(batch.query_starts_B1[1:], torch.arange(len(q_THE), dtype=torch.int32), right=True)
        halves = [half_NSKE[batch.block_table_BM[row_T]].flatten(1, 2).double() for half_NSKE in kv_2NSKE]
        k_TLKE, v_TLKE = halves[0], halves[-1][..., self.spec.head_dim - self.spec.out_dim :]
        repeats = q_THE.shape[1] // k_TLKE.shape[2]
        scores_THL = torch.einsum("the,tlhe->thl", q_THE.double(), k_TLKE.repeat_interleave(repeats, 2))
        scores_THL *= form.scale or self.spec.scale
        if form.softcap is not None:
            scores_THL = form.softcap * (scores_THL / form.softcap).tanh()
        position_L, position_T1 = torch.arange(k_TLKE.shape[1]), batch.positions_T.unsqueeze(1)
        is_unseen_TL = position_L > position_T1
        if batch.window is not None:
            is_unseen_TL |= position_L <= position_T1 - batch.window
        scores_THL = scores_THL.masked_fill(is_unseen_TL.unsqueeze(1), -torch.inf)
        sinks_H = torch.full(scores_THL.shape[1:2], -torch.inf) if form.sinks_H is None else form.sinks_H.double()
        scores_THL = torch.cat((scores_THL, sinks_H[:, None].expand(len(q_THE), -1, 1)), -1)
        weight_THL = scores_THL.softmax(-1)[..., :-1]
        return torch.einsum("thl,tlhe->the", weight_THL, v_TLKE.repeat_interleave(repeats, 2)).to(q_THE.dtype)

    def expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        weights = gate_up_XFD.double(), down_XDF.double()
        return every_expert(x_TD.double(), expert_TA, weight_TA.double(), *weights).to(x_TD.dtype)


class AsksForTheLongestContext(DenseKernels):
    def prepare(self, batch: Batch) -> None:
        batch.scratch["longest"] = int(batch.context_lens_B.max())


class KeepsAMaskForEachSize(DenseKernels):
    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self.ones = dict[int, Tensor]()

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        rows = len(gate_up_TF)
        if rows not in self.ones:
            self.ones[rows] = gate_up_TF.new_ones(rows, 1)
        return super().silu_mul(gate_up_TF) * self.ones[rows]


class AttendsRowByRow(DenseKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        return PlainKernels.attend(self, q_THE, kv_2NSKE, batch)


class NormalisesOnTheHost(DenseKernels):
    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x_TD.cpu(), weight_D.cpu(), eps).to(x_TD.device)


class CountsTheTokensOfAnExpert(DenseKernels):
    def expert_mlp(self, x_TD: Tensor, expert_TA: Tensor, *rest: Tensor) -> Tensor:
        torch.bincount(expert_TA.flatten())
        return super().expert_mlp(x_TD, expert_TA, *rest)


class NeedsChunksOnTheHost(DenseKernels):
    def prepare(self, batch: Batch) -> None:
        assert batch.num_decodes or batch.query_starts_host is not None, "the chunks are not on the host"


class NeedsMixedStepsOnTheHost(DenseKernels):
    def prepare(self, batch: Batch) -> None:
        is_mixed = 0 < batch.num_decodes < batch.num_requests
        assert not is_mixed or batch.query_starts_host is not None, "the mixed step is not on the host"


class SkipsTheLastExpert(PlainKernels):
    def expert_mlp(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, *weights: Tensor) -> Tensor:
        return super().expert_mlp(x_TD, expert_TA[:, :-1], weight_TA[:, :-1], *weights)


class GatesGeluExpertsBySilu(PlainKernels):
    def gelu_expert_mlp(self, x_TD: Tensor, *rest: Tensor) -> Tensor:
        return super().expert_mlp(x_TD, *rest)


class RoutesByTheFirstToken(PlainKernels):
    def expert_mlp(self, x_TD: Tensor, expert_TA: Tensor, *rest: Tensor) -> Tensor:
        return super().expert_mlp(x_TD, expert_TA[:1].expand_as(expert_TA), *rest)


class NeverNormalisesTheRouting(PlainKernels):
    def route_experts(self, logits_TX: Tensor, top_k: int, normalise: bool, *others: Any) -> tuple[Tensor, Tensor]:
        return super().route_experts(logits_TX, top_k, False, *others)


class RoutesToTheWorst(PlainKernels):
    def route_experts(self, logits_TX: Tensor, top_k: int, normalise: bool, *others: Any) -> tuple[Tensor, Tensor]:
        return super().route_experts(-logits_TX, top_k, normalise, *others)


class ScalesExpertsByTheirPlace(PlainKernels):
    def route_experts(
        self, logits_TX: Tensor, top_k: int, normalise: bool, scale_X: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        expert_TA, weight_TA = super().route_experts(logits_TX, top_k, normalise)
        return expert_TA, weight_TA if scale_X is None else weight_TA * scale_X[:top_k].float()


class WeighsSharedExpertsLikeOthers(PlainKernels):
    def route_experts(
        self, logits_TX: Tensor, top_k: int, normalise: bool, scale_X: Tensor | None = None, num_shared: int = 0
    ) -> tuple[Tensor, Tensor]:
        expert_TA, weight_TA = super().route_experts(logits_TX, top_k, normalise, scale_X, num_shared)
        return expert_TA, weight_TA if not num_shared else weight_TA / weight_TA.sum(-1, keepdim=True)


class RoundsTheRouter(PlainKernels):
    def router_logits(self, x_TD: Tensor, weight_XD: Tensor) -> Tensor:
        return super().router_logits(x_TD, weight_XD.bfloat16().float())


class LeavesPairsApart(DenseKernels):
    def latent_queries_keys(self, *given: Any) -> Tensor:
        return super().latent_queries_keys(*given[:-1], False)


class GivesAllHeadsTheFirstMatrix(DenseKernels):
    def heads_linear(self, x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
        return super().heads_linear(x_THI, weight_HOI[:1].expand_as(weight_HOI))


class IsOffByOneAtBlockBoundaries(PlainKernels):
    """The last token of a block is looked for in the next one."""

    def read_row(self, kv_2NSKE: Tensor, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        position_L, size = torch.arange(int(batch.context_lens_B[row])), self.spec.block_size
        column_L = ((position_L + 1) // size).clamp(max=batch.block_table_BM.shape[1] - 1)
        k_LKE, v_LKE = kv_2NSKE[:, batch.block_table_BM[row][column_L].long(), position_L % size].double()
        return k_LKE, v_LKE


class DependsOnTheCall(PlainKernels):
    """Within the tolerance, as sums by atomics are."""

    num_calls = 0

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        self.num_calls += 1
        return super().attend(q_THE, kv_2NSKE, batch) * (1 + 0.004 * self.num_calls % 0.009)


class ReadsTheNextBlock(PlainKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        return super().attend(q_THE, kv_2NSKE, replace(batch, block_table_BM=batch.block_table_BM.roll(-1, 1)))


class SeesOneTokenTooFew(PlainKernels):
    def attend_row(self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *rest: Any) -> Tensor:
        return (
            super().attend_row(q_QHE, k_LKE, v_LKE, *rest)
            if len(q_QHE) > 1
            else self._shorter(q_QHE, k_LKE, v_LKE, *rest)
        )

    def _shorter(self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *rest: Any) -> Tensor:
        length = max(1, len(k_LKE) - 1)
        return super().attend_row(q_QHE, k_LKE[:length], v_LKE[:length], *rest)


class SeesOneTokenTooMany(PlainKernels):
    def read_row(self, kv_2NSKE: Tensor, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        longest = batch.block_table_BM.shape[1] * self.spec.block_size
        context_B = (batch.context_lens_B + 1).clamp(max=longest)
        return super().read_row(kv_2NSKE, replace(batch, context_lens_B=context_B), row)


class IgnoresCausality(PlainKernels):
    def attend_row(self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *rest: Any) -> Tensor:
        return torch.cat([super(IgnoresCausality, self).attend_row(q_HE[None], k_LKE, v_LKE, *rest) for q_HE in q_QHE])


class CountsPositionsFromTheChunk(PlainKernels):
    def attend_row(self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *rest: Any) -> Tensor:
        if len(q_QHE) == 1:
            return super().attend_row(q_QHE, k_LKE, v_LKE, *rest)
        return super().attend_row(q_QHE, k_LKE[: len(q_QHE)], v_LKE[: len(q_QHE)], *rest)


class MapsHeadsRoundRobin(PlainKernels):
    def attend_row(self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *rest: Any) -> Tensor:
        repeats = q_QHE.shape[1] // k_LKE.shape[1]
        return super().attend_row(q_QHE, k_LKE.repeat(1, repeats, 1), v_LKE.repeat(1, repeats, 1), *rest)


class WritesValuesAsKeys(PlainKernels):
    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        super().write_kv(v_TKE, k_TKE, kv_2NSKE, slot_mapping_T)


class WritesBesideItsSlots(PlainKernels):
    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        kv_2NSKE[:, -1] = 0
        super().write_kv(k_TKE, v_TKE, kv_2NSKE, slot_mapping_T)


class ForgetsTheScale(PlainKernels):
    def attend_row(self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *rest: Any) -> Tensor:
        return super().attend_row(q_QHE / self.spec.scale, k_LKE, v_LKE, *rest)


class WeighsUnseenBlocks(PlainKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        return super().attend(q_THE, kv_2NSKE, batch) + 1e-3 * kv_2NSKE[1, -1].mean()


class FlattensTheHeads(PlainKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        return super().attend(q_THE, kv_2NSKE, batch).flatten(1)


class LeavesPrefillUnwritten(PlainKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        out_THE, computed_THE = torch.empty_like(q_THE), super().attend(q_THE, kv_2NSKE, batch)
        num_written = max(1, q_THE.shape[0] // 4 * 4)
        out_THE[:num_written] = computed_THE[:num_written]
        return out_THE


class SharesThePrefixWithAll(PlainKernels):
    def read_row(self, kv_2NSKE: Tensor, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        k_LKE, v_LKE = super().read_row(kv_2NSKE, batch, row)
        if batch.shared_lens_B is not None and row:
            num_shared = min(len(k_LKE), int(batch.shared_lens_B.max()))
            first_k_LKE, first_v_LKE = super().read_row(kv_2NSKE, batch, 0)
            k_LKE[:num_shared], v_LKE[:num_shared] = first_k_LKE[:num_shared], first_v_LKE[:num_shared]
        return k_LKE, v_LKE


class OverflowsInSoftmax(PlainKernels):
    def attend_row(self, q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *rest: Any) -> Tensor:
        repeats = q_QHE.shape[1] // k_LKE.shape[1]
        k_LHE = k_LKE.repeat_interleave(repeats, 1)
        scores_HQL = torch.einsum("qhe,lhe->hql", q_QHE.float(), k_LHE.float()) * self.spec.scale
        out_QHE = super().attend_row(q_QHE, k_LKE, v_LKE, *rest)
        return out_QHE * (scores_HQL.exp().sum() / scores_HQL.exp().sum())


class MixesNeighbouringRows(PlainKernels):
    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        out_THE = super().attend(q_THE, kv_2NSKE, batch)
        return out_THE + 0.1 * out_THE.mean(0)


class NeedsLengthsOnTheHost(PlainKernels):
    def prepare(self, batch: Batch) -> None:
        assert batch.context_lens_host is not None, "the lengths are not on the host"
        batch.scratch["longest"] = int(batch.context_lens_host.max())


class ForgetsEps(PlainKernels):
    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x_TD, weight_D, 0.0)


class ReturnsTheNormLast(PlainKernels):
    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed_TD, sum_TD = super().add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return sum_TD, normed_TD


class GatesWithTheSecondHalf(PlainKernels):
    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        return super().silu_mul(gate_up_TF.roll(gate_up_TF.shape[-1] // 2, -1))


class ForgetsTheBias(PlainKernels):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return super().linear(x_TD, weight_OD, None)


class ComputesOneRowOnly(PlainKernels):
    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        return super().linear_silu_mul(x_TD[:1].expand_as(x_TD), gate_up_weight_FD)


class ForgetsTheResidual(PlainKernels):
    def linear_add_rms_norm(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        product_TO = self.linear(x_TD, weight_OD, bias_O)
        return self.add_rms_norm(product_TO, torch.zeros_like(residual_TO), norm_weight_O, eps)


class ForgetsTheResidualOfExperts(PlainKernels):
    def expert_mlp_add_rms_norm(self, *given: Any) -> tuple[Tensor, Tensor]:
        *experts, residual_TD, norm_weight_D, eps = given
        return self.add_rms_norm(self.expert_mlp(*experts), torch.zeros_like(residual_TD), norm_weight_D, eps)


class GatesNoSharedExpert(PlainKernels):
    def shared_expert_mlp(self, *given: Any) -> Tensor:
        *others, gate_T1 = given
        return super().shared_expert_mlp(*others, torch.full_like(gate_T1, 20.0))


class ForgetsTheLastPart(PlainKernels):
    def add_parts_rms_norm(
        self, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor
    ) -> None:
        normed_TD, sum_TD = self.add_rms_norm(parts_PTD[:-1].sum(0), residual_TD, weight_D, eps)
        out_TD.copy_(normed_TD)
        residual_TD.copy_(sum_TD)


class KeepsTheResidual(PlainKernels):
    def add_parts_rms_norm(
        self, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor
    ) -> None:
        out_TD.copy_(self.add_rms_norm(parts_PTD.sum(0), residual_TD.clone(), weight_D, eps)[0])


class ForgetsTheHeadsZeros(PlainKernels):
    def norm_heads(
        self, x_TN: Tensor, head_dim: int, eps: float, places_C: Tensor, scale_C: Tensor, width: int
    ) -> Tensor:
        return super().norm_heads(x_TN, head_dim, eps, places_C.clamp(min=0), scale_C, width)


class TakesColumnsInOrder(PlainKernels):
    def take_columns(self, x_TD: Tensor, places_N: Tensor) -> Tensor:
        return super().take_columns(x_TD, places_N.sort().values)


class ForgetsTheInnerNorm(PlainKernels):
    def norm_add_rms_norm(
        self, x_TD: Tensor, inner_weight_D: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *others: Any
    ) -> tuple[Tensor, Tensor]:
        return self.add_rms_norm(x_TD, residual_TD, weight_D, eps)


class ForgetsTheOuterNorm(PlainKernels):
    def norm_add_rms_norm(
        self, x_TD: Tensor, inner_weight_D: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float,
        scale_1: Tensor | None = None, beside: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if beside is not None:
            residual_TD = residual_TD + self.rms_norm(*beside[:2], eps)
        return super().norm_add_rms_norm(x_TD, inner_weight_D, residual_TD, weight_D, eps, scale_1)


class NormsTwiceWithTheFirstWeight(PlainKernels):
    def norm_add_rms_norm(
        self, x_TD: Tensor, inner_weight_D: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *others: Any
    ) -> tuple[Tensor, Tensor]:
        weight_D = weight_D[:1].expand_as(weight_D) if weight_D.dim() == 2 else weight_D
        return super().norm_add_rms_norm(x_TD, inner_weight_D, residual_TD, weight_D, eps, *others)


class GatesProductsBySilu(PlainKernels):
    def linear_gelu_tanh_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        return self.linear_silu_mul(x_TD, gate_up_weight_FD)


class AddsBeforeItGates(PlainKernels):
    def sigmoid_mul(self, x_TD: Tensor, gate_TG: Tensor, added_TD: Tensor | None = None) -> Tensor:
        return super().sigmoid_mul(x_TD if added_TD is None else x_TD + added_TD, gate_TG)


class ForgetsTheRate(PlainKernels):
    def delta_gates(
        self, beta_TH: Tensor, decay_TH: Tensor, log_rate_H: Tensor, decay_bias_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super().delta_gates(beta_TH, decay_TH, torch.zeros_like(log_rate_H), decay_bias_H)


class TakesMasksInOrder(PlainKernels):
    def mask_logits(self, logits_NV: Tensor, masks_RW: Tensor, index_N: Tensor) -> Tensor:
        return super().mask_logits(logits_NV, masks_RW, torch.arange(len(index_N)))


class CountsTheNewestTokenTwice(PlainKernels):
    def gather_decodes(self, rows_N: Tensor, requests: RequestRows) -> DecodeInputs:
        given = super().gather_decodes(rows_N, requests)
        return given._replace(position_N=given.position_N + 1)


class TakesNoLastTokens(PlainKernels):
    def gather_tokens(self, inputs_3N: Tensor, requests: RequestRows) -> DecodeInputs:
        return super().gather_tokens(inputs_3N, requests)._replace(token_ids_N=inputs_3N[0].clone())


class KeepsNoToken(PlainKernels):
    def keep_tokens(self, rows_N: Tensor, tokens_N: Tensor, draw_position_N: Tensor, requests: RequestRows) -> None:
        super().keep_tokens(rows_N, tokens_N, draw_position_N, requests)
        requests.last_token_R[rows_N] = tokens_N


class LengthensThePaddingRow(PlainKernels):
    def keep_tokens(self, rows_N: Tensor, tokens_N: Tensor, draw_position_N: Tensor, requests: RequestRows) -> None:
        super().keep_tokens(rows_N, tokens_N, draw_position_N, requests)
        requests.length_R[requests.padding_row] = 2


class DraftsBehindTheEnd(PlainKernels):
    def lay_out_drafts(
        self, rows_B: Tensor, drafts_BK: Tensor, drafting: DraftingRows, requests: RequestRows, inputs_3G: Tensor
    ) -> None:
        further = replace(drafting, limit_R=drafting.limit_R + 100)
        super().lay_out_drafts(rows_B, drafts_BK, further, requests, inputs_3G)


class KeepsDraftsBehindAWrongOne(PlainKernels):
    def keep_drafts(
        self,
        rows_B: Tensor,
        inputs_3G: Tensor,
        drawn_G: Tensor,
        num_drafts: int,
        drafting: DraftingRows,
        requests: RequestRows,
    ) -> Tensor:
        drawn_G = inputs_3G[0].roll(-1) if drafting.pretended_length is None else drawn_G
        return super().keep_drafts(rows_B, inputs_3G, drawn_G, num_drafts, drafting, requests)


class AttendsToAnothersBlocks(PlainKernels):
    def prepare_alike(self, batch: Batch, prepared: Batch) -> None:
        batch.block_table_BM.copy_(prepared.block_table_BM)


class AttendsBeforeItWrites(PlainKernels):
    def qkv_attend(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        before = kv_2NSKE.clone()
        return self.attend(self.qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, rope, norm), before, batch)


class WritesNoKeys(PlainKernels):
    def qkv_attend(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        copy = kv_2NSKE.clone()
        return self.attend(self.qk_norm_rope_write(qkv_TC, copy, batch, rope, norm), copy, batch)


class RotatesBeforeTheNorm(PlainKernels):
    def qk_norm_rope(
        self, q_THE: Tensor, k_TKE: Tensor, positions_T: Tensor, rope: Rope | None, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor]:
        q_THE, k_TKE = super().qk_norm_rope(q_THE, k_TKE, positions_T, rope, None)
        return super().qk_norm_rope(q_THE, k_TKE, positions_T, None, norm)


class KeepsFloat32(PlainKernels):
    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        return super().silu_mul(gate_up_TF.float())


class RemembersTheFirstBatch(PlainKernels):
    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self.first: Batch | None = None

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        self.first = self.first or batch
        same = self.first.context_lens_B.shape == batch.context_lens_B.shape
        return super().attend(
            q_THE, kv_2NSKE, replace(batch, context_lens_B=self.first.context_lens_B) if same else batch
        )


class KeepsItsBatch(PlainKernels):
    """Right for a step of one batch; of several it attends with the one that was prepared last."""

    def prepare(self, batch: Batch) -> None:
        self.batch = batch

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch) -> Tensor:
        return super().attend(q_THE, kv_2NSKE, self.batch)


class ZeroesItsRows(PlainKernels):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        found_TO = super().linear(x_TD, weight_OD, bias_O)
        x_TD.zero_()
        return found_TO


class ZeroesItsWeight(PlainKernels):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        found_TO = super().linear(x_TD, weight_OD, bias_O)
        weight_OD.zero_()
        return found_TO


class SetsItsMethodsLate(Kernels):
    """Hands on by attributes of the object, which an engine does not see when it looks at the class."""

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        inner = PlainKernels(config, spec)
        for name in dir(Kernels):
            if not name.startswith("_"):
                setattr(self, name, getattr(inner, name))


FAULTS = {
    KeepsAMaskForEachSize: "test_another_number_of_rows_leaves_nothing_behind: a step of 1 rows (",
    AsksForTheLongestContext: "test_what_a_graph_captures_never_waits_for_the_host: "
    "waits for the device: Tensor.__int__ in faulty_kernels.py:",
    AttendsRowByRow: "test_what_a_graph_captures_never_waits_for_the_host: attend of a captured decode",
    NormalisesOnTheHost: "test_what_a_graph_captures_never_waits_for_the_host: "
    "waits for the device: Tensor.cpu in faulty_kernels.py:",
    CountsTheTokensOfAnExpert: "test_experts_never_wait_for_the_host: "
    "waits for the device: torch's bincount in faulty_kernels.py:",
    NeedsChunksOnTheHost: "test_attend_prefills_as_a_captured_graph_lays_them_out: the chunks are not on the host",
    NeedsMixedStepsOnTheHost: "test_attend_computes_mixed_steps_as_a_captured_graph_lays_them_out: "
    "the mixed step is not on the host",
    GatesGeluExpertsBySilu: "test_expert_mlp: gelu_expert_mlp of 1 tokens by any experts, 1 of 4",
    SkipsTheLastExpert: "test_expert_mlp: expert_mlp of 1 tokens by any experts, 1 of 4",
    RoutesByTheFirstToken: "test_expert_mlp: expert_mlp of 17 tokens by any experts, 3 of 5",
    NeverNormalisesTheRouting: "test_route_experts: the weights of route_experts, 1 of 4 for 7 tokens, normalise=True",
    RoutesToTheWorst: "test_route_experts: are not the most probable ones",
    ScalesExpertsByTheirPlace: "test_route_experts: the weights of route_experts, 1 of 4 for 7 tokens, normalise=False,"
    " scaled",
    WeighsSharedExpertsLikeOthers: "test_route_experts: the weights of route_experts, 1 of 4 for 7 tokens, "
    "normalise=False, 2 shared",
    RoundsTheRouter: "test_router_logits: router_logits of 1 x 48 to 5",
    LeavesPairsApart: "test_latent_queries_keys: latent_queries_keys of 1 tokens, interleaved=True",
    GivesAllHeadsTheFirstMatrix: "test_heads_linear: heads_linear of 1 tokens to 24 features",
    IsOffByOneAtBlockBoundaries: "test_attend_decodes: AssertionError: attend, decodes",
    DependsOnTheCall: "test_the_same_step_gives_the_same_bits: "
    "attend gives other bits for the same step computed again",
    ReadsTheNextBlock: "test_attend_decodes: AssertionError: attend, decodes",
    SeesOneTokenTooFew: "test_attend_decodes: AssertionError: attend, decodes",
    SeesOneTokenTooMany: "test_attend_ignores_unseen_slots: AssertionError: attend with garbage in slots",
    IgnoresCausality: "test_attend_whole_prompts: AssertionError: attend, whole prompts",
    CountsPositionsFromTheChunk: "test_attend_chunks_after_a_prefix: AssertionError: attend, chunks after a prefix",
    MapsHeadsRoundRobin: "test_attend_decodes: AssertionError: attend, decodes",
    WritesValuesAsKeys: "test_write_kv_writes_its_slots_and_nothing_else: "
    "the keys that write_kv of 11 tokens leaves in the cache",
    WritesBesideItsSlots: "test_write_kv_writes_its_slots_and_nothing_else: "
    "the keys that write_kv of 11 tokens leaves in the cache",
    ForgetsTheScale: "test_attend_decodes: AssertionError: attend, decodes",
    WeighsUnseenBlocks: "test_attend_ignores_unseen_slots: attend with garbage in slots no query may see",
    FlattensTheHeads: "test_a_row_alone_gets_what_it_gets_in_a_crowd: what attend returns has shape",
    LeavesPrefillUnwritten: "test_a_row_alone_gets_what_it_gets_in_a_crowd: holds NaN: part of it was never written",
    SharesThePrefixWithAll: "test_attend_decodes_told_of_a_shared_prefix: attend of decodes told of a shared prefix",
    OverflowsInSoftmax: "test_attend_with_large_scores: holds NaN",
    MixesNeighbouringRows: "test_a_row_alone_gets_what_it_gets_in_a_crowd: "
    "alone, compared with the same row in a batch",
    NeedsLengthsOnTheHost: "test_attend_decodes_as_a_captured_graph_lays_them_out: the lengths are not on the host",
    ForgetsEps: "test_rms_norm: AssertionError: rms_norm",
    ReturnsTheNormLast: "test_add_rms_norm: the norm that add_rms_norm",
    GatesWithTheSecondHalf: "test_linear_silu_mul: silu_mul of",
    ForgetsTheBias: "test_linear: linear of (1, 64) with bias",
    ComputesOneRowOnly: "test_linear_silu_mul: linear_silu_mul of (2, 64)",
    ForgetsTheResidual: "test_linear_add_rms_norm: the norm that linear_add_rms_norm of (1, 64) without bias",
    ForgetsTheResidualOfExperts: "test_expert_mlp_add_rms_norm: "
    "the norm that expert_mlp_add_rms_norm of 1 tokens by any experts, 1 of 4",
    GatesNoSharedExpert: "test_shared_expert_mlp: shared_expert_mlp of 17 tokens by any experts, 3 of 5",
    ForgetsTheLastPart: "test_add_parts_rms_norm: the norm that add_parts_rms_norm of (2, 5, 48) writes",
    KeepsTheResidual: "test_add_parts_rms_norm: the sum that add_parts_rms_norm of (2, 5, 48) leaves",
    ForgetsTheHeadsZeros: "test_norm_heads: norm_heads of 1 tokens, 2 heads of 12 in blocks of 26",
    TakesColumnsInOrder: "test_take_columns: take_columns of 1 x 96 takes others",
    ForgetsTheInnerNorm: "test_norm_add_rms_norm: the norm that norm_add_rms_norm of 1 x 96 returns",
    ForgetsTheOuterNorm: "test_norm_add_rms_norm: the norm that norm_add_rms_norm of 1 x 96 beside another, returns",
    NormsTwiceWithTheFirstWeight: "test_norm_add_rms_norm: the norm that norm_add_rms_norm of 1 x 96, with two norms,",
    GatesProductsBySilu: "test_linear_silu_mul: linear_gelu_tanh_mul of (1, 64)",
    AddsBeforeItGates: "test_sigmoid_mul: sigmoid_mul of 1 x 96 by 96 gates, and a sum",
    ForgetsTheRate: "test_delta_gates: the decays that delta_gates of 1 x 4 returns",
    TakesMasksInOrder: "test_mask_logits: mask_logits of 1 x 33",
    CountsTheNewestTokenTwice: "test_gather_decodes: position_N of gather_decodes of 1 rows of 5 blocks",
    TakesNoLastTokens: "test_gather_tokens: token_ids_N of gather_tokens of 1 tokens of 5 blocks",
    KeepsNoToken: "test_keep_tokens: leaves last_token_R other than it should",
    LengthensThePaddingRow: "test_keep_tokens: leaves length_R other than it should",
    DraftsBehindTheEnd: "test_lay_out_drafts: writes other tokens than it should",
    KeepsDraftsBehindAWrongOne: "test_keep_drafts: returns other results than it should",
    AttendsToAnothersBlocks: "test_a_batch_prepared_like_another_attends_to_its_own_blocks: "
    "attend of a batch that was prepared like another",
    AttendsBeforeItWrites: "test_qkv_attend: what qkv_attend with norm and rope of 4 rows returns",
    WritesNoKeys: "test_qkv_attend: the keys that qkv_attend with norm and rope leaves in the cache",
    RotatesBeforeTheNorm: "test_qk_norm_rope: qk_norm_rope with norm and rope",
    KeepsFloat32: "test_silu_mul: has dtype torch.float32 and must have torch.bfloat16",
    ZeroesItsRows: "test_linear: the rows that linear was given was changed",
    ZeroesItsWeight: "test_linear: the weight that linear was given was changed",
    SetsItsMethodsLate: "test_has_the_methods_of_its_contract: it has no method rms_norm",
    RemembersTheFirstBatch: "test_nothing_is_kept_from_one_step_to_the_next: attend of a batch after another",
    KeepsItsBatch: "test_all_batches_of_a_step_are_prepared_before_one_attends: "
    "attend of batch 1 of a step of 2, all prepared before, decodes",
}
