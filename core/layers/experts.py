"""Experts: gated feed-forwards of which every token uses a few, and the router that chooses them.

A model hands in the names of its tensors and gets `WeightTarget`s back. Kernels may offer `route_experts` and
`expert_mlp`; where they do not, the plain ones here and in core/layers/expert_products.py are used.
Legend: T tokens, D hidden, F intermediate features of this rank, X experts, A experts of a token, P = T * A pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import MatrixPiece, Part, WeightTarget, is_offered
from hookline.core.distributed.partition import even_part
from hookline.core.layers.weights import PLAIN, PlainExperts, PlainWeight, empty_parameter

if TYPE_CHECKING:
    from hookline.core.contracts import Activation, Runtime
    from hookline.core.layers.linear import GatedMLP

ALIGNED_OUTPUTS = 8
"""A router with gates pads its outputs to a multiple of this, since products are faster if rows of 16-bit outputs are
aligned to 16 bytes."""


class ParallelExperts:
    """Experts whose intermediate features are split over the ranks: each rank holds a part of every expert.

    So all ranks do the same work whatever the routing, and the block needs one sum over the ranks. If each rank held
    some of the experts instead, a rank would be idle whenever no token chose its experts.
    num_experts: X. hidden: D. inner: intermediate features of the whole expert, over all ranks. activation: as of
    GatedMLP. num_shared: experts X, X + 1 and so on, which every token takes; a checkpoint has them as one feed-forward
    of num_shared times their features.
    Shapes: x_TD (T, D), expert_TA (T, A) int64, weight_TA (T, A) float32 -> (T, D), the same on every rank.
    Raises: ConfigError, naming `what`, if the ranks do not divide the intermediate features.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        inner: int,
        runtime: Runtime,
        *,
        what: str,
        activation: Activation = "silu",
        num_shared: int = 0,
    ) -> None:
        """Allocate this rank's parts, uninitialised, on runtime.device."""
        self.num_experts, self.num_shared, self.features = num_experts, num_shared, Part(hidden, 0, hidden)
        self.ranks, self.part = runtime.ranks, even_part(inner, runtime.ranks, what)
        self.kernels = runtime.kernels
        num_all = num_experts + num_shared
        self.weights = (runtime.weights or PLAIN).experts(runtime, num_all, hidden, self.part.size, activation)

    def local(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """Partial sum of this rank, (T, D); the ranks' sums together are the block's output."""
        return self.weights.mlp(x_TD, expert_TA, weight_TA)

    def local_with_shared(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, shared: GatedMLP, gate_T1: Tensor
    ) -> Tensor:
        """`local` plus sigmoid(gate) times `shared.local`, of an expert for every token; shared: with silu, no bias."""
        own, first, second = self.weights, shared.gate_up.weight, shared.down.weight
        if isinstance(own, PlainExperts) and own.has_mlp and type(first) is type(second) is PlainWeight:
            weights = own.gate_up_XFD, own.down_XDF, first.plain(), second.plain()
            return self.kernels.shared_expert_mlp(x_TD, expert_TA, weight_TA, *weights, gate_T1)
        return self.kernels.sigmoid_mul(shared.local(x_TD), gate_T1, self.local(x_TD, expert_TA, weight_TA))

    def __call__(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """The weighted sum over each token's experts: (T, D) -> (T, D)."""
        return self.ranks.all_reduce(self.local(x_TD, expert_TA, weight_TA))

    def add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the weighted sum and the residual, fused with either sum where kernels or ranks can.

        May overwrite the residual.
        """
        return self.weights.mlp_add_rms_norm(x_TD, expert_TA, weight_TA, residual_TD, norm_weight_D, eps)

    def targets(self, experts: str, gate: str, up: str, down: str, shared: str = "") -> dict[str, WeightTarget]:
        """`experts.INDEX.gate.weight` and so on -> this rank's part, one checkpoint tensor for each expert's matrix.

        shared: the name of the feed-forward that is the experts which every token takes.
        """
        first, second, part = [], [], self.part
        total = self.num_shared * part.total
        starts = range(0, total, part.total)
        named = [(f"{experts}.{index}", part) for index in range(self.num_experts)]
        named += [(shared, Part(total, start + part.start, start + part.stop)) for start in starts]
        for index, (expert, mine) in enumerate(named):
            first.append(MatrixPiece(f"{expert}.{gate}", 0, mine, self.features, index))
            first.append(MatrixPiece(f"{expert}.{up}", part.size, mine, self.features, index))
            second.append(MatrixPiece(f"{expert}.{down}", 0, self.features, mine, index))
        return self.weights.targets(first, second)


class SoftmaxRouter:
    """Scores every expert for every token, and takes the best few; every rank has all of it.

    num_experts: X. hidden: D. top_k: A. bias: whether the logits have one.
    normalise: whether a token's weights are made to add up to one; they are then the softmax of the best few alone.
    num_gates: outputs besides the scores, which `with_gates` hands on as they are; their weight is gate_GD. They share
    the router's product, and take no bias.
    Shapes: x_TD (T, D) -> expert_TA (T, A) int64 and weight_TA (T, A) float32, the best expert first.
    """

    def __init__(
        self, num_experts: int, hidden: int, top_k: int, runtime: Runtime, *, normalise: bool, bias: bool = False,
        num_gates: int = 0,
    ) -> None:  # fmt: skip
        """Allocate the whole matrix, uninitialised, on runtime.device."""
        assert not (bias and num_gates)
        num_rows, self.num_gates = num_experts + num_gates, num_gates
        num_padded = -(-num_rows // ALIGNED_OUTPUTS) * ALIGNED_OUTPUTS if num_gates else num_rows
        self._weight_RD = empty_parameter(runtime, num_padded, hidden)
        self._weight_RD[num_rows:].zero_()
        self.weight_XD, self.gate_GD = self._weight_RD[:num_experts], self._weight_RD[num_experts:num_rows]
        self.bias_X = empty_parameter(runtime, num_experts) if bias else None
        kernels = self.kernels = runtime.kernels
        self.top_k, self.normalise = top_k, normalise
        self._has_route = is_offered(kernels.route_experts)

    def __call__(self, x_TD: Tensor, *scale_X: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each token's experts: (T, D) -> (T, A) and (T, A), by Kernels.route_experts where there is one.

        scale_X: see Kernels.route_experts.
        """
        return self.with_gates(x_TD, *scale_X)[:2]

    def with_gates(self, x_TD: Tensor, *scale_X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A call's two tensors, and the gates' products (T, num_gates), a view whose rows are not contiguous."""
        num_experts = len(self.weight_XD)
        logits_TR = self.kernels.linear(x_TD, self._weight_RD, self.bias_X)
        logits_TX = logits_TR[:, :num_experts] if self.num_gates else logits_TR
        route: Any = self.kernels.route_experts if self._has_route else plain_route_experts
        gate_TG = logits_TR[:, num_experts : num_experts + self.num_gates]
        return *route(logits_TX, self.top_k, self.normalise, *scale_X), gate_TG

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """`name.weight` (and `name.bias`) -> the whole matrix."""
        targets = {f"{name}.weight": WeightTarget.whole(self.weight_XD)}
        if self.bias_X is not None:
            targets[f"{name}.bias"] = WeightTarget.whole(self.bias_X, init="zeros")
        return targets


def plain_route_experts(
    logits_TX: Tensor, top_k: int, normalise: bool, scale_X: Tensor | None = None, num_shared: int = 0
) -> tuple[Tensor, Tensor]:
    """See Kernels.route_experts. Device: no host sync."""
    weight_TA, expert_TA = logits_TX.softmax(-1, dtype=torch.float32).topk(top_k)
    if normalise:
        weight_TA = weight_TA / weight_TA.sum(-1, keepdim=True)
    if scale_X is not None:
        weight_TA = weight_TA * scale_X[expert_TA]
    return with_shared_experts(expert_TA, weight_TA, logits_TX.shape[1], num_shared)


def with_shared_experts(
    expert_TA: Tensor, weight_TA: Tensor, num_experts: int, num_shared: int
) -> tuple[Tensor, Tensor]:
    """Each token's experts and weights, and behind them so many experts from num_experts on, with weight 1."""
    if not num_shared:
        return expert_TA, weight_TA
    shared_S = torch.arange(num_experts, num_experts + num_shared, device=expert_TA.device)
    expert_TA = torch.cat((expert_TA, shared_S.expand(len(expert_TA), -1)), 1)
    return expert_TA, functional.pad(weight_TA, (0, num_shared), value=1.0)
