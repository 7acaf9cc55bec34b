"""Experts: gated feed-forwards of which every token uses a few, and the router that chooses them.

A model hands in the names of its tensors and gets `WeightTarget`s back. Kernels may offer `route_experts` and
`expert_mlp`; where they do not, the plain ones here are used.
Legend: T tokens, D hidden, F intermediate features of this rank, X experts, A experts of a token, P = T * A pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import WeightTarget, is_offered
from hookline.core.distributed.partition import even_part
from hookline.core.layers.vocab import empty_parameter

if TYPE_CHECKING:
    from hookline.core.contracts import Runtime

ALIGNED_OUTPUTS = 8
"""A router with gates pads its outputs to a multiple of this, since products are faster if rows of 16-bit outputs are
aligned to 16 bytes."""

Expert = Callable[[Tensor], Tensor]
"""One expert: maps tokens (N, D) to (N, D)."""


class ParallelExperts:
    """Experts whose intermediate features are split over the ranks: each rank holds a part of every expert.

    So all ranks do the same work whatever the routing, and the block needs one sum over the ranks. If each rank held
    some of the experts instead, a rank would be idle whenever no token chose its experts.
    num_experts: X. hidden: D. inner: intermediate features of the whole expert, over all ranks.
    Shapes: x_TD (T, D), expert_TA (T, A) int64, weight_TA (T, A) float32 -> (T, D), the same on every rank.
    Raises: ConfigError, naming `what`, if the ranks do not divide the intermediate features.
    """

    def __init__(self, num_experts: int, hidden: int, inner: int, runtime: Runtime, *, what: str) -> None:
        """Allocate this rank's parts, uninitialised, on runtime.device."""
        kernels = self.kernels = runtime.kernels
        self.ranks, self.part = runtime.ranks, even_part(inner, runtime.ranks, what)
        self.gate_up_XFD = empty_parameter(runtime, num_experts, 2 * self.part.size, hidden)
        self.down_XDF = empty_parameter(runtime, num_experts, hidden, self.part.size)
        self._has_mlp = is_offered(kernels.expert_mlp)

    def local(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """Partial sum of this rank, (T, D); the ranks' sums together are the block's output."""
        mlp = self.kernels.expert_mlp if self._has_mlp else plain_expert_mlp
        return mlp(x_TD, expert_TA, weight_TA, self.gate_up_XFD, self.down_XDF)

    def __call__(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """The weighted sum over each token's experts: (T, D) -> (T, D)."""
        return self.ranks.all_reduce(self.local(x_TD, expert_TA, weight_TA))

    def add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the weighted sum and the residual, fused with either sum where kernels or ranks can.

        May overwrite the residual.
        """
        if self.ranks.size == 1 and self._has_mlp:
            given = x_TD, expert_TA, weight_TA, self.gate_up_XFD, self.down_XDF
            return self.kernels.expert_mlp_add_rms_norm(*given, residual_TD, norm_weight_D, eps)
        partial_TD = self.local(x_TD, expert_TA, weight_TA)
        return self.ranks.add_rms_norm(self.kernels, partial_TD, residual_TD, norm_weight_D, eps)

    def targets(self, experts: str, gate: str, up: str, down: str) -> dict[str, WeightTarget]:
        """`experts.INDEX.gate.weight` and so on -> this rank's part, one checkpoint tensor for each expert's matrix."""
        targets, inner = {}, self.part.size
        for index, (gate_up_FD, down_DF) in enumerate(zip(self.gate_up_XFD, self.down_XDF, strict=True)):
            expert = f"{experts}.{index}"
            targets[f"{expert}.{gate}.weight"] = WeightTarget.shard(gate_up_FD[:inner], 0, self.part)
            targets[f"{expert}.{up}.weight"] = WeightTarget.shard(gate_up_FD[inner:], 0, self.part)
            targets[f"{expert}.{down}.weight"] = WeightTarget.shard(down_DF, 1, self.part)
        return targets


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

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each token's experts: (T, D) -> (T, A) and (T, A), by Kernels.route_experts where there is one."""
        return self.with_gates(x_TD)[:2]

    def with_gates(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a call returns, and the gates' products (T, num_gates), a view whose rows are not contiguous."""
        num_experts = len(self.weight_XD)
        logits_TR = self.kernels.linear(x_TD, self._weight_RD, self.bias_X)
        logits_TX = logits_TR[:, :num_experts] if self.num_gates else logits_TR
        route = self.kernels.route_experts if self._has_route else plain_route_experts
        gate_TG = logits_TR[:, num_experts : num_experts + self.num_gates]
        return *route(logits_TX, self.top_k, self.normalise), gate_TG

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """`name.weight` (and `name.bias`) -> the whole matrix."""
        targets = {f"{name}.weight": WeightTarget.whole(self.weight_XD)}
        if self.bias_X is not None:
            targets[f"{name}.bias"] = WeightTarget.whole(self.bias_X, init="zeros")
        return targets


def plain_route_experts(logits_TX: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """See Kernels.route_experts. Device: no host sync."""
    weight_TA, expert_TA = logits_TX.softmax(-1, dtype=torch.float32).topk(top_k)
    return expert_TA, weight_TA / weight_TA.sum(-1, keepdim=True) if normalise else weight_TA


def plain_expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
) -> Tensor:
    """See Kernels.expert_mlp.

    Device: on a CPU each expert computes the tokens that chose it; elsewhere every expert computes all tokens, which is
    much more work but needs no host sync.
    """
    compute = wanted_experts if x_TD.device.type == "cpu" else every_expert
    return compute(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)


def every_expert(x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
    """Compute all experts for all tokens, and weight those that a token did not choose with zero. No host sync."""
    return every_expert_of(_mlps(gate_up_XFD, down_XDF), x_TD, expert_TA, weight_TA)


def wanted_experts(x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
    """Compute each expert for the tokens that chose it. The host waits to learn how many these are."""
    return wanted_experts_of(_mlps(gate_up_XFD, down_XDF), x_TD, expert_TA, weight_TA)


def every_expert_of(experts: Sequence[Expert], x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
    """`every_expert` for experts that are functions: each maps tokens (N, D) to (N, D)."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for index, expert in enumerate(experts):
        weight_T1 = weight_TA.mul(expert_TA == index).sum(-1, keepdim=True)
        out_TD.addcmul_(weight_T1, expert(x_TD).float())
    return out_TD.to(x_TD.dtype)


def wanted_experts_of(experts: Sequence[Expert], x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
    """`wanted_experts` for experts that are functions: each maps tokens (N, D) to (N, D)."""
    expert_P, num_chosen = expert_TA.flatten(), expert_TA.shape[1]
    pairs_P = expert_P.argsort(stable=True)
    counts = torch.bincount(expert_P, minlength=len(experts)).tolist()
    out_PD = x_TD.new_empty(len(expert_P), x_TD.shape[1])
    for expert, mine_P in zip(experts, torch.split(pairs_P, counts), strict=True):
        if len(mine_P):
            out_PD[mine_P] = expert(x_TD[mine_P // num_chosen])
    out_TAD = out_PD.view(*expert_TA.shape, x_TD.shape[1])
    return torch.einsum("tad,ta->td", out_TAD.float(), weight_TA).to(x_TD.dtype)


def _mlps(gate_up_XFD: Tensor, down_XDF: Tensor) -> list[Expert]:
    return [
        partial(_mlp, gate_up_FD=gate_up_FD, down_DF=down_DF)
        for gate_up_FD, down_DF in zip(gate_up_XFD, down_XDF, strict=True)
    ]


def _mlp(x_TD: Tensor, gate_up_FD: Tensor, down_DF: Tensor) -> Tensor:
    gate_TF, up_TF = functional.linear(x_TD, gate_up_FD).chunk(2, -1)
    return functional.linear(functional.silu(gate_TF) * up_TF, down_DF)
