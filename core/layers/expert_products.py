"""Experts in plain torch: what a CPU computes, and what kernels without operations for experts leave to us.

Legend: T tokens, D hidden, F intermediate features of this rank, X experts, A experts of a token, P = T * A pairs,
N tokens of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import Activation

Expert = Callable[[Tensor], Tensor]
"""An expert: maps tokens (N, D) to (N, D)."""


def plain_expert_mlp(
    x_TD: Tensor,
    expert_TA: Tensor,
    weight_TA: Tensor,
    gate_up_XFD: Tensor,
    down_XDF: Tensor,
    activation: Activation = "silu",
) -> Tensor:
    """See Kernels.expert_mlp and gelu_expert_mlp. Device: as `sum_experts`."""
    return sum_experts(_expert_mlps(gate_up_XFD, down_XDF, activation), x_TD, expert_TA, weight_TA)


def every_expert(x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
    """`every_expert_of` for experts with a gate of SiLU, by their weights."""
    return every_expert_of(_expert_mlps(gate_up_XFD, down_XDF), x_TD, expert_TA, weight_TA)


def sum_experts(experts: Sequence[Expert], x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
    """The weighted sum of each token's chosen experts.

    Device: on a CPU each expert computes the tokens that chose it; elsewhere every expert computes all tokens, which is
    much more work but needs no host sync.
    """
    compute = wanted_experts_of if x_TD.device.type == "cpu" else every_expert_of
    return compute(experts, x_TD, expert_TA, weight_TA)


def every_expert_of(experts: Sequence[Expert], x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
    """Compute all experts for all tokens; experts that a token did not choose have weight zero. No host sync."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for index, expert in enumerate(experts):
        weight_T1 = weight_TA.mul(expert_TA == index).sum(-1, keepdim=True)
        out_TD.addcmul_(weight_T1, expert(x_TD).float())
    return out_TD.to(x_TD.dtype)


def wanted_experts_of(experts: Sequence[Expert], x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
    """Compute each expert for the tokens that chose it. The host waits to learn how many these are."""
    expert_P, num_chosen = expert_TA.flatten(), expert_TA.shape[1]
    pairs_P = expert_P.argsort(stable=True)
    counts = torch.bincount(expert_P, minlength=len(experts)).tolist()
    out_PD = x_TD.new_empty(len(expert_P), x_TD.shape[1])
    for expert, mine_P in zip(experts, torch.split(pairs_P, counts), strict=True):
        if len(mine_P):
            out_PD[mine_P] = expert(x_TD[mine_P // num_chosen])
    out_TAD = out_PD.view(*expert_TA.shape, x_TD.shape[1])
    return torch.einsum("tad,ta->td", out_TAD.float(), weight_TA).to(x_TD.dtype)


def _expert_mlps(gate_up_XFD: Tensor, down_XDF: Tensor, activation: Activation = "silu") -> list[Expert]:
    return [
        partial(expert_mlp, gate_up_FD=gate_up_FD, down_DF=down_DF, activation=activation)
        for gate_up_FD, down_DF in zip(gate_up_XFD, down_XDF, strict=True)
    ]


def expert_mlp(x_TD: Tensor, gate_up_FD: Tensor, down_DF: Tensor, activation: Activation = "silu") -> Tensor:
    """The feed-forward of one expert: (N, D) -> (N, D)."""
    gate_TF, up_TF = functional.linear(x_TD, gate_up_FD).chunk(2, -1)
    gate_TF = functional.silu(gate_TF) if activation == "silu" else functional.gelu(gate_TF, approximate="tanh")
    return functional.linear(gate_TF * up_TF, down_DF)
