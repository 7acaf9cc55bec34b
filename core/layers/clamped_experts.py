"""Experts with biases and a clamped gate (gpt-oss): feed-forwards of which every token takes a few.

As core/layers/experts.py, whose router goes with them. Kernels may offer `clamped_expert_mlp`; where they do not, the
plain one here is used. Legend: T tokens, D hidden, F intermediate features of this rank, X experts, A experts of a
token.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import WeightTarget, is_offered
from hookline.core.distributed.partition import even_part
from hookline.core.layers.expert_products import sum_experts
from hookline.core.layers.weights import empty_parameter

if TYPE_CHECKING:
    from hookline.core.contracts import Runtime


class ClampedExperts:
    """Experts whose intermediate features are split over the ranks; rank 0 alone adds the biases of the second product.

    alpha: the gate's slope in its sigmoid. limit: the gate is at most this, the other factor within it on both sides.
    num_experts: X. hidden: D. inner: intermediate features of the whole expert, over all ranks.
    Shapes: x_TD (T, D), expert_TA (T, A) int64, weight_TA (T, A) float32 -> (T, D), the same on every rank.
    Raises: ConfigError, naming `what`, if the ranks do not divide the intermediate features.
    """

    def __init__(
        self, num_experts: int, hidden: int, inner: int, runtime: Runtime, *, alpha: float, limit: float, what: str
    ) -> None:
        """Allocate this rank's parts, uninitialised, on runtime.device."""
        kernels = self.kernels = runtime.kernels
        self.ranks, self.part, self.alpha, self.limit = (
            runtime.ranks,
            even_part(inner, runtime.ranks, what),
            alpha,
            limit,
        )
        self.gate_up_XFD = empty_parameter(runtime, num_experts, 2 * self.part.size, hidden)
        self.gate_up_bias_XF = empty_parameter(runtime, num_experts, 2 * self.part.size)
        self.down_XDF = empty_parameter(runtime, num_experts, hidden, self.part.size)
        self.down_bias_XD = empty_parameter(runtime, num_experts, hidden)
        self._own_bias_XD = self.down_bias_XD if self.ranks.rank == 0 else None
        self._has_mlp = is_offered(kernels.clamped_expert_mlp)

    def local(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """Partial sum of this rank, (T, D); the ranks' sums together are the block's output."""
        weights = self.gate_up_XFD, self.gate_up_bias_XF, self.down_XDF, self._own_bias_XD
        mlp = self.kernels.clamped_expert_mlp if self._has_mlp else plain_clamped_expert_mlp
        return mlp(x_TD, expert_TA, weight_TA, *weights, self.alpha, self.limit)

    def add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the weighted sum and the residual, fused with the sum over ranks where these can.

        May overwrite the residual.
        """
        partial_TD = self.local(x_TD, expert_TA, weight_TA)
        return self.ranks.add_rms_norm(self.kernels, partial_TD, residual_TD, norm_weight_D, eps)

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """`name.gate_up_proj`, `name.down_proj` and their biases, one tensor for all experts -> this rank's part.

        The matrices are stored with inputs before outputs, gate and up in turns.
        """
        gate_XFD, up_XFD = self.gate_up_XFD.chunk(2, 1)
        gate_XF, up_XF = self.gate_up_bias_XF.chunk(2, 1)
        both = [WeightTarget.shard(view, 1, self.part) for view in (gate_XFD, up_XFD)]
        biases = [WeightTarget.shard(view, 1, self.part, init="zeros") for view in (gate_XF, up_XF)]
        return {
            f"{name}.gate_up_proj": WeightTarget.interleaved(both, 1).transpose(),
            f"{name}.gate_up_proj_bias": WeightTarget.interleaved(biases, 1),
            f"{name}.down_proj": WeightTarget.shard(self.down_XDF, 2, self.part).transpose(),
            f"{name}.down_proj_bias": WeightTarget.whole(self.down_bias_XD, init="zeros"),
        }


def plain_clamped_expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor, down_XDF: Tensor,
    down_bias_XD: Tensor | None, alpha: float, limit: float,
) -> Tensor:  # fmt: skip
    """See Kernels.clamped_expert_mlp. Device: as `sum_experts`."""
    biases = [None] * len(down_XDF) if down_bias_XD is None else list(down_bias_XD)
    weights = zip(gate_up_XFD, gate_up_bias_XF, down_XDF, biases, strict=True)
    experts = [partial(_clamped_mlp, weights=each, alpha=alpha, limit=limit) for each in weights]
    return sum_experts(experts, x_TD, expert_TA, weight_TA)


def _clamped_mlp(
    x_TD: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor | None], alpha: float, limit: float
) -> Tensor:
    gate_up_FD, gate_up_bias_F, down_DF, down_bias_D = weights
    gate_TF, up_TF = functional.linear(x_TD, gate_up_FD, gate_up_bias_F).chunk(2, -1)
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    return functional.linear((up_TF + 1) * gate_TF * (gate_TF * alpha).sigmoid(), down_DF, down_bias_D)
