"""kernels=torch in batch-invariant mode: products of a fixed number of rows, and attention by tiles of positions.

torch and its libraries choose the order of a sum by the sizes of their operands, and compute the end of a loop by other
instructions than its body. So the sizes of operations here depend only on weights and positions, and computations with
several roundings consist of operations that are exact, or the same at every place (exp, tanh, rsqrt).
Legend: T tokens, D hidden, O output features, F half of gate and up, H heads, K kv heads, G = H / K, E head dim,
Q queries of a tile, L positions up to a tile's end, N blocks, S block size, P pairs of a token and an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch, QKNorm
from hookline.plugins.kernels.attention.torch_attention import keys_and_values
from hookline.plugins.kernels.torch_reference import RopeRows, TorchKernels

BLOCK_ROWS = 16
"""Rows of every product."""
NARROW = 64
"""With fewer outputs, each row is multiplied separately: in a block, a row's bits would depend on its place."""
TILE = 16
"""Positions of the queries that are attended with together; a query's place among them is its position's."""


@dataclass(frozen=True)
class _Tile:
    """Queries [first, stop) of the step, which lie at `place` and on in the tile whose last position is L - 1.

    slots: where the keys lie that there are so far, at most L of them. hidden: the first of them, which lie before the
    window of every query and may hold anything.
    """

    first: int
    stop: int
    place: int
    length: int
    slots: Tensor
    hidden: int


class InvariantTorchKernels(TorchKernels):
    """TorchKernels whose results for a row have the same bits in every batch. Device: waits for it in `prepare`."""

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """See Kernels."""
        return row_product(x_TD, weight_OD, bias_O)

    def router_logits(self, x_TD: Tensor, weight_XD: Tensor) -> Tensor:
        """See Kernels."""
        return row_product(x_TD.float(), weight_XD)

    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """See Kernels."""
        return self.silu_mul(row_product(x_TD, gate_up_weight_FD))

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Kernels."""
        gate_TF, up_TF = gate_up_TF.float().chunk(2, -1)
        return (gate_TF / (1 + torch.exp(-gate_TF)) * up_TF).to(gate_up_TF.dtype)

    def gelu_tanh_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Kernels."""
        gate_TF, up_TF = gate_up_TF.float().chunk(2, -1)
        inner_TF = (gate_TF * gate_TF * gate_TF * 0.044715 + gate_TF) * math.sqrt(2 / math.pi)
        return (gate_TF * 0.5 * (torch.tanh(inner_TF) + 1) * up_TF).to(gate_up_TF.dtype)

    def expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """See Kernels."""
        return self._expert_mlp(self.linear_silu_mul, x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)

    def gelu_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """See Kernels."""
        return self._expert_mlp(self._linear_gelu_mul, x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)

    def _linear_gelu_mul(self, x_TD: Tensor, gate_up_FD: Tensor) -> Tensor:
        return self.gelu_tanh_mul(self.linear(x_TD, gate_up_FD, None))

    def _expert_mlp(
        self, gated: Callable[[Tensor, Tensor], Tensor], x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor,
        gate_up_XFD: Tensor, down_XDF: Tensor,
    ) -> Tensor:  # fmt: skip
        expert_P, num_chosen = expert_TA.flatten(), expert_TA.shape[1]
        out_PD = x_TD.new_empty(len(expert_P), x_TD.shape[1])
        for expert in sorted(set(expert_P.tolist())):
            mine_P = (expert_P == expert).nonzero().squeeze(1)
            hidden_PF = gated(x_TD[mine_P // num_chosen], gate_up_XFD[expert])
            out_PD[mine_P] = row_product(hidden_PF, down_XDF[expert])
        out_TAD = out_PD.view(*expert_TA.shape, -1)
        total_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for place in range(num_chosen):
            total_TD += out_TAD[:, place].float() * weight_TA[:, place, None]
        return total_TD.to(x_TD.dtype)

    def prepare(self, batch: Batch) -> None:
        """See Kernels. Plans the tiles that every layer attends with."""
        batch.scratch["tiles"] = plan_tiles(batch, self.spec)

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """See Kernels."""
        out_THE = q_THE.new_empty(*q_THE.shape[:-1], self.spec.out_dim)
        for tile in batch.scratch["tiles"]:
            q_QHE = q_THE.new_zeros(TILE, *q_THE.shape[1:])
            wanted = slice(tile.place, tile.place + tile.stop - tile.first)
            q_QHE[wanted] = q_THE[tile.first : tile.stop]
            k_LKE, v_LKE = keys_and_values(
                [_positions(blocks_NSKE, tile).to(q_THE.dtype) for blocks_NSKE in kv_2NSKE], self.spec
            )
            attended_QHE = attend_tile(q_QHE, k_LKE, v_LKE, self.spec, form, batch.window)
            out_THE[tile.first : tile.stop] = attended_QHE[wanted]
        return out_THE

    def _normalise(self, x_TD: Tensor, eps: float) -> Tensor:
        length_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True)
        scale_T1: Tensor = (length_T1 * length_T1).mul_(1 / x_TD.shape[-1]).add_(eps).rsqrt_()
        return x_TD * scale_T1

    def _norm_rope(self, qk_TXE: Tensor, num_heads: int, rows: RopeRows | None, norm: QKNorm | None) -> Tensor:
        qk_TXE = super()._norm_rope(qk_TXE, num_heads, None, norm)
        if rows:
            cos_T1R, sin_T1R = rows
            width = cos_T1R.shape[-1]
            rotated_TXR = qk_TXE[..., :width]
            swapped_TXR = rotated_TXR.roll(width // 2, -1)
            rotated_TXR.mul_(cos_T1R).add_(swapped_TXR.mul_(sin_T1R))
        return qk_TXE


def row_product(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x @ W.T + b in blocks of as many rows each, the last one filled up: (T, D) -> (T, O)."""
    num_rows, block = len(x_TD), 1 if len(weight_OD) < NARROW else BLOCK_ROWS
    padded_TD = x_TD.new_zeros(num_rows + -num_rows % block, x_TD.shape[1])
    padded_TD[:num_rows] = x_TD
    products = [functional.linear(rows_RD, weight_OD, bias_O) for rows_RD in torch.split(padded_TD, block)]
    return torch.cat(products)[:num_rows] if num_rows else x_TD.new_empty(0, len(weight_OD))


def plan_tiles(batch: Batch, spec: AttentionSpec) -> list[_Tile]:
    """The tiles of all queries of a step, in their order."""
    starts, contexts = batch.query_starts_B1.tolist(), batch.context_lens_B.tolist()
    tiles = []
    for row, context in enumerate(contexts):
        first, stop = starts[row], starts[row + 1]
        position_L = torch.arange(context, device=spec.device)
        blocks_L = batch.block_table_BM[row].index_select(0, position_L // spec.block_size)
        slots_L = blocks_L.long() * spec.block_size + position_L % spec.block_size
        while first < stop:
            position = context - (stop - first)
            length = (position // TILE + 1) * TILE
            next_first = min(stop, first + length - position)
            hidden = 0 if batch.window is None else max(0, position - batch.window + 1)
            tiles.append(_Tile(first, next_first, position % TILE, length, slots_L[:length], hidden))
            first = next_first
    return tiles


def _positions(blocks_NSKE: Tensor, tile: _Tile) -> Tensor:
    """Keys or values of all positions up to a tile's end, zeros where there are none yet: (L, K, E)."""
    found_LKE = blocks_NSKE.flatten(0, 1).index_select(0, tile.slots)
    found_LKE[: tile.hidden] = 0  # 0 * NaN is NaN
    return functional.pad(found_LKE, (0, 0, 0, 0, 0, tile.length - len(found_LKE)))


def attend_tile(
    q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, spec: AttentionSpec, form: AttentionForm, window: int | None
) -> Tensor:
    """Causal attention of the last Q of L positions, in float32: (Q, H, E), with the head dim of the values."""
    num_queries, num_kv_heads, head_dim = len(q_QHE), k_LKE.shape[1], q_QHE.shape[2]
    scale = spec.scale if form.scale is None else form.scale
    q_KGQE = q_QHE.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    num_groups = q_KGQE.shape[1]
    scores = torch.bmm(q_KGQE.reshape(num_kv_heads, -1, head_dim), k_LKE.float().permute(1, 2, 0)) * scale
    scores_KGQL = scores.view(num_kv_heads, num_groups, num_queries, -1)
    if form.softcap is not None:
        scores_KGQL = torch.tanh(scores_KGQL / form.softcap) * form.softcap
    position_L = torch.arange(len(k_LKE), device=q_QHE.device)
    position_Q1 = position_L[-num_queries:, None]
    is_hidden_QL = position_L > position_Q1
    if window is not None:
        is_hidden_QL |= position_L <= position_Q1 - window
    scores_KGQL = scores_KGQL.masked_fill(is_hidden_QL, -torch.inf)
    if form.sinks_H is not None:
        sinks_KG11 = form.sinks_H.float().view(num_kv_heads, -1, 1, 1)
        scores_KGQL = torch.cat((scores_KGQL, sinks_KG11.expand(-1, -1, num_queries, 1)), -1)
    weights_KGQL = scores_KGQL.softmax(-1)[..., : len(k_LKE)]
    v_KLE = v_LKE.float().transpose(0, 1)
    out_KXE = torch.bmm(weights_KGQL.reshape(num_kv_heads, -1, len(k_LKE)), v_KLE)
    out_QKGE = out_KXE.view(num_kv_heads, num_groups, num_queries, v_LKE.shape[-1]).permute(2, 0, 1, 3)
    return out_QKGE.flatten(1, 2).to(q_QHE.dtype)
