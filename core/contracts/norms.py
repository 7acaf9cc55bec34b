"""The part of Kernels that is about norms and gates: operations that read their input once and write their output once.

Each costs a kernel launch unless it is fused with its neighbours. The fused operations have plain versions here, which
a class overrides to save launches.
Legend: T tokens, D hidden, F half of gate and up or head dim, H heads, E head dim, P parts, N numbers of all heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hookline.core.contracts.optional import optional

if TYPE_CHECKING:
    from torch import Tensor


class NormsAndGates(Protocol):
    """Norms and gates of a rank's kernels; `Kernels` extends it."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Root mean square norm: x / sqrt(mean(x²) + eps) * weight, computed in float32, returned in x's dtype.

        A norm's weight, here and below, may be float32 whatever the dtype of x is.
        """
        ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). May overwrite both inputs."""
        ...

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """silu(first half) * second half along the last dimension: (T, 2F) -> (T, F)."""
        ...

    # ------------------------------------------------------------------------------------ what a class may leave out

    @optional
    def add_parts_rms_norm(
        self, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor
    ) -> None:
        """add_rms_norm of the sum of P parts and the residual. The new residual overwrites residual_TD.

        Shapes: parts_PTD (P, T, D), each part contiguous, in the dtype of the others; residual_TD and out_TD (T, D),
        contiguous. out_TD receives the norm; it shares no memory with the others.
        Device: may be called on another stream than the rest of the step.
        """
        normed_TD, sum_TD = self.add_rms_norm(parts_PTD.sum(0), residual_TD, weight_D, eps)
        out_TD.copy_(normed_TD)
        if sum_TD.data_ptr() != residual_TD.data_ptr():
            residual_TD.copy_(sum_TD)

    @optional
    def gelu_tanh_mul(self, gate_up_TF: Tensor) -> Tensor:
        """gelu(first half) * second half along the last dimension, GELU in its tanh form: (T, 2F) -> (T, F).

        If it is left out, `hookline.core.layers` computes it in plain torch.
        """
        raise AssertionError("left out")

    @optional
    def norm_add_rms_norm(
        self,
        x_TD: Tensor,
        inner_weight_D: Tensor,
        residual_TD: Tensor,
        weight_D: Tensor,
        eps: float,
        scale_1: Tensor | None = None,
        beside: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """add_rms_norm of n = rms_norm(x, inner weight) and the residual: (rms_norm(n + residual), n + residual).

        scale_1: (1,), by which the sum is multiplied before it is normalised and returned. beside: (y_TD, y_weight_D,
        outer_weight_D), for n = rms_norm(rms_norm(x, inner weight) + rms_norm(y, y weight), outer weight). Both are
        left out by a model that has none. weight_D: or (W, D), for W norms of the one sum: the first result is then
        (W, T, D).
        Shapes: x_TD, y_TD, residual_TD and both results (T, D). n may stay in float32. May overwrite x, y and the
        residual.
        """
        inner_TD = self.rms_norm(x_TD, inner_weight_D, eps)
        if beside is not None:
            y_TD, y_weight_D, outer_weight_D = beside
            inner_TD = self.rms_norm(inner_TD.add_(self.rms_norm(y_TD, y_weight_D, eps)), outer_weight_D, eps)
        if scale_1 is None and weight_D.dim() == 1:
            return self.add_rms_norm(inner_TD, residual_TD, weight_D, eps)
        sum_TD = inner_TD.add_(residual_TD)
        if scale_1 is not None:
            sum_TD.mul_(scale_1)
        if weight_D.dim() == 1:
            return self.rms_norm(sum_TD, weight_D, eps), sum_TD
        normed_WTD = sum_TD.new_empty(len(weight_D), *sum_TD.shape)
        for normed_TD, one_D in zip(normed_WTD, weight_D, strict=True):
            normed_TD.copy_(self.rms_norm(sum_TD, one_D, eps))
        return normed_WTD, sum_TD

    @optional
    def norm_heads(
        self, x_TN: Tensor, head_dim: int, eps: float, places_C: Tensor, scale_C: Tensor, width: int
    ) -> Tensor:
        """RMS norm of each head without a weight, then a permutation of its numbers with scales: (T, C).

        Number c is scale_C[c] times number places_C[c] of the normalised heads, and 0 where that place is negative.
        head_dim: numbers of a head of x. width: C is cut into blocks of `width` numbers; a block has all numbers of a
        few heads that follow each other in x, in any order, and of no other heads.
        Shapes: x_TN (T, N), N a multiple of head_dim; places_C (C,) int32; scale_C (C,) in x's dtype.
        Device: no host sync; graph-safe. Writes to none of its inputs.
        """
        heads_XF = x_TN.reshape(-1, head_dim)
        normed_TN = self.rms_norm(heads_XF, heads_XF.new_ones(head_dim), eps).view(len(x_TN), -1)
        chosen_TC = normed_TN.index_select(1, places_C.clamp(min=0))
        return chosen_TC.mul_(scale_C).masked_fill_(places_C < 0, 0)

    @optional
    def take_columns(self, x_TD: Tensor, places_N: Tensor) -> Tensor:
        """The columns of x at these places, in their order: (T, D) -> (T, N).

        Shapes: places_N (N,) int32, the same in every call of a layer. Writes to none of its inputs.
        """
        return x_TD.index_select(1, places_N)

    @optional
    def rms_norm_silu_mul(self, x_THE: Tensor, weight_E: Tensor, eps: float, gate_THE: Tensor) -> Tensor:
        """rms_norm(x) * silu(gate), head by head: (T, H, E). The norm may stay in float32 in between.

        The heads of a token are adjacent in memory; the gate's heads may be columns of a wider matrix.
        """
        gate = gate_THE.float()
        return (self.rms_norm(x_THE, weight_E, eps) * (gate * gate.sigmoid())).to(x_THE.dtype)

    @optional
    def sigmoid_mul(self, x_TD: Tensor, gate_TG: Tensor, added_TD: Tensor | None = None) -> Tensor:
        """The product x * sigmoid(gate), plus `added` if any: (T, D). The product may stay in float32 in between.

        Writes to none of its inputs. Shapes: gate_TG (T, D), or (T, 1) for one gate a token; its rows need not be
        adjacent in memory.
        """
        gated_TD = x_TD * gate_TG.sigmoid()
        return gated_TD if added_TD is None else gated_TD + added_TD

    @optional
    def delta_gates(
        self, beta_TH: Tensor, decay_TH: Tensor, log_rate_H: Tensor, decay_bias_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Decay and write strength of `gated_delta_rule`: (-exp(log_rate) * softplus(decay + bias), sigmoid(beta)).

        Shapes: beta_TH, decay_TH (T, H), whose rows need not be adjacent in memory; log_rate_H, decay_bias_H (H,)
        float32; returns log_decay_TH and beta_TH (T, H) float32.
        """
        shifted_TH = decay_TH.float() + decay_bias_H
        softplus_TH = shifted_TH.clamp(min=0) + (-shifted_TH.abs()).exp().log1p()
        return -log_rate_H.exp() * softplus_TH, beta_TH.float().sigmoid()
