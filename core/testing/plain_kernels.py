"""Kernels that are obviously right: every formula as the contract states it, in float64, one sequence at a time.

The reference of KernelsSuite, and the kernels of ModelSuite. Slow, and with no other purpose.
Legend: T tokens, Q queries of a row and L tokens that they see, D hidden, O output features, F half of gate and up,
H heads, K kv heads, E head dim, N blocks, S block size, C = (H + 2K) * E.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch, Kernels, QKNorm, Rope


class PlainKernels(Kernels):
    """Implements hookline.core.contracts.Kernels; results are rounded once, to the input's dtype."""

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        self.spec = spec

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        x64_TD = x_TD.double()
        mean_square_T1 = x64_TD.square().mean(-1, keepdim=True)
        return (x64_TD / (mean_square_T1 + eps).sqrt() * weight_D.double()).to(x_TD.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Kernels."""
        sum_TD = x_TD + residual_TD
        return self.rms_norm(sum_TD, weight_D, eps), sum_TD

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """See Kernels."""
        product_TO = x_TD.double() @ weight_OD.double().T
        return (product_TO if bias_O is None else product_TO + bias_O.double()).to(x_TD.dtype)

    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """See Kernels."""
        return self.silu_mul(x_TD.double() @ gate_up_weight_FD.double().T).to(x_TD.dtype)

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Kernels."""
        gate_TF, up_TF = gate_up_TF.double().chunk(2, -1)
        return (gate_TF * torch.sigmoid(gate_TF) * up_TF).to(gate_up_TF.dtype)

    def gelu_tanh_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Kernels."""
        gate_TF, up_TF = gate_up_TF.double().chunk(2, -1)
        inner_TF = math.sqrt(2 / math.pi) * (gate_TF + 0.044715 * gate_TF**3)
        return (0.5 * gate_TF * (1 + inner_TF.tanh()) * up_TF).to(gate_up_TF.dtype)

    def linear_gelu_tanh_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """See Kernels."""
        return self.gelu_tanh_mul(x_TD.double() @ gate_up_weight_FD.double().T).to(x_TD.dtype)

    def router_logits(self, x_TD: Tensor, weight_XD: Tensor) -> Tensor:
        """See Kernels."""
        return (x_TD.double() @ weight_XD.double().T).float()

    def route_experts(
        self, logits_TX: Tensor, top_k: int, normalise: bool, scale_X: Tensor | None = None, num_shared: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See Kernels."""
        weight_TA, expert_TA = logits_TX.double().softmax(-1).topk(top_k)
        if normalise:
            weight_TA = weight_TA / weight_TA.sum(-1, keepdim=True)
        if scale_X is not None:
            weight_TA = weight_TA * scale_X.double()[expert_TA]
        places_TS = torch.ones_like(expert_TA[:, :1]).expand(-1, num_shared).cumsum(1)
        expert_TA = torch.cat((expert_TA, places_TS + logits_TX.shape[1] - 1), 1)
        return expert_TA, torch.cat((weight_TA, torch.ones_like(places_TS)), 1).float()

    def expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """See Kernels."""
        return self._expert_mlp(self.silu_mul, x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)

    def gelu_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """See Kernels."""
        return self._expert_mlp(self.gelu_tanh_mul, x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)

    def _expert_mlp(
        self, gated: Callable[[Tensor], Tensor], x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor,
        gate_up_XFD: Tensor, down_XDF: Tensor,
    ) -> Tensor:  # fmt: skip
        out_TD = torch.zeros_like(x_TD, dtype=torch.float64)
        for token, experts_A in enumerate(expert_TA.tolist()):
            for place, expert in enumerate(experts_A):
                hidden_1F = gated(x_TD[token : token + 1].double() @ gate_up_XFD[expert].double().T)
                out_TD[token] += weight_TA[token, place].double() * (hidden_1F @ down_XDF[expert].double().T)[0]
        return out_TD.to(x_TD.dtype)

    def clamped_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor,
        down_XDF: Tensor, down_bias_XD: Tensor | None, alpha: float, limit: float,
    ) -> Tensor:  # fmt: skip
        """See Kernels."""
        out_TD = torch.zeros_like(x_TD, dtype=torch.float64)
        for token, experts_A in enumerate(expert_TA.tolist()):
            for place, expert in enumerate(experts_A):
                gate_up_F = gate_up_XFD[expert].double() @ x_TD[token].double() + gate_up_bias_XF[expert].double()
                gate_F, up_F = gate_up_F.chunk(2)
                gate_F, up_F = gate_F.clamp(max=limit), up_F.clamp(-limit, limit)
                out_D = down_XDF[expert].double() @ ((up_F + 1) * gate_F * torch.sigmoid(alpha * gate_F))
                if down_bias_XD is not None:
                    out_D = out_D + down_bias_XD[expert].double()
                out_TD[token] += weight_TA[token, place].double() * out_D
        return out_TD.to(x_TD.dtype)

    def qk_norm_rope(
        self, q_THE: Tensor, k_TKE: Tensor, positions_T: Tensor, rope: Rope | None, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor]:
        """See Kernels."""
        dtype, q_THE, k_TKE = q_THE.dtype, q_THE.double(), k_TKE.double()
        if norm is not None:
            q_THE = self.rms_norm(q_THE, norm.q_weight_E, norm.eps)
            k_TKE = self.rms_norm(k_TKE, norm.k_weight_E, norm.eps)
        if rope is not None:
            q_THE, k_TKE = _rotate(q_THE, positions_T, rope), _rotate(k_TKE, positions_T, rope)
        return q_THE.to(dtype), k_TKE.to(dtype)

    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        """See Kernels."""
        block_T, offset_T = slot_mapping_T // self.spec.block_size, slot_mapping_T % self.spec.block_size
        for half_NSKE, new_TKE in zip(kv_2NSKE, (k_TKE, v_TKE), strict=False):  # of keys alone there is one half
            half_NSKE[block_T, offset_T] = new_TKE.to(kv_2NSKE.dtype)

    def qk_norm_rope_write(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        """See Kernels."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        heads_TXE = qkv_TC.reshape(qkv_TC.shape[0], heads + self.spec.num_cached * kv_heads, self.spec.head_dim)
        v_TKE = heads_TXE[:, heads + kv_heads :]
        q_and_k = heads_TXE[:, :heads], heads_TXE[:, heads : heads + kv_heads]
        q_THE, k_TKE = self.qk_norm_rope(*q_and_k, batch.positions_T, rope, norm)
        self.write_kv(k_TKE, v_TKE, kv_2NSKE, batch.slot_mapping_T)
        return q_THE

    def prepare(self, batch: Batch) -> None:
        """See Kernels."""

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """See Kernels."""
        starts = batch.query_starts_B1.tolist()
        rows = []
        for row in range(batch.num_requests):
            q_QHE = q_THE[starts[row] : starts[row + 1]]
            rows.append(self.attend_row(q_QHE, *self.read_row(kv_2NSKE, batch, row), batch.window, form))
        return torch.cat(rows).to(q_THE.dtype)

    def read_row(self, kv_2NSKE: Tensor, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values (L, K, E) of the tokens that a row's first query sees, and of all after them."""
        context, first = int(batch.context_lens_B[row]), 0
        if batch.window is not None:
            num_queries = int(batch.query_starts_B1[row + 1] - batch.query_starts_B1[row])
            first = max(0, context - num_queries - batch.window + 1)
        position_L = torch.arange(first, context, device=kv_2NSKE.device)
        block_L = batch.block_table_BM[row][position_L // self.spec.block_size].long()
        halves_2LKE = kv_2NSKE[:, block_L, position_L % self.spec.block_size].double()
        return halves_2LKE[0], halves_2LKE[-1, ..., self.spec.head_dim - self.spec.out_dim :]

    def attend_row(
        self,
        q_QHE: Tensor,
        k_LKE: Tensor,
        v_LKE: Tensor,
        window: int | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """Causal attention of the last Q of L tokens: (Q, H, E)."""
        num_groups, (num_queries, context) = q_QHE.shape[1] // k_LKE.shape[1], (len(q_QHE), len(k_LKE))
        k_LHE, v_LHE = k_LKE.repeat_interleave(num_groups, 1), v_LKE.repeat_interleave(num_groups, 1)
        scale = self.spec.scale if form.scale is None else form.scale
        score_HQL = torch.einsum("qhe,lhe->hql", q_QHE.double(), k_LHE) * scale
        if form.softcap is not None:
            score_HQL = form.softcap * (score_HQL / form.softcap).tanh()
        position_L = torch.arange(context, device=k_LKE.device)
        position_Q1 = position_L[context - num_queries :, None]
        is_hidden_QL = position_L > position_Q1
        if window is not None:
            is_hidden_QL |= position_L <= position_Q1 - window
        score_HQL = score_HQL.masked_fill(is_hidden_QL, -torch.inf)
        if form.sinks_H is not None:
            sink_HQ1 = form.sinks_H.double()[:, None, None].expand(-1, num_queries, 1)
            score_HQL = torch.cat((score_HQL, sink_HQ1), -1)
        weight_HQL = score_HQL.softmax(-1)[..., :context]
        return torch.einsum("hql,lhe->qhe", weight_HQL, v_LHE)


def _rotate(x_TXE: Tensor, positions_T: Tensor, rope: Rope) -> Tensor:
    cos_T1F, sin_T1F = rope.table_PE[positions_T].double().unsqueeze(1).chunk(2, -1)
    num_rotated = rope.table_PE.shape[1]
    (first_TXF, second_TXF), rest_TXE = x_TXE[..., :num_rotated].chunk(2, -1), x_TXE[..., num_rotated:]
    rotated = first_TXF * cos_T1F - second_TXF * sin_T1F, second_TXF * cos_T1F + first_TXF * sin_T1F
    return torch.cat((*rotated, rest_TXE), -1)
