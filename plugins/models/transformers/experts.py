"""Experts of transformers' models by the kernels' expert operation, and their shares of several ranks.

transformers calls the function that is registered under the name in the config's `_experts_implementation`. Experts
with SiLU gates and without biases are the kernels'; others are transformers' own grouped products.
Legend: T tokens, D hidden, F intermediate features of this rank, X experts, A experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward, grouped_mm_experts_forward

from hookline.core.contracts import Runtime, is_offered
from hookline.core.layers import plain_expert_mlp

SERVED_EXPERTS = "hookline"
"""Name of the experts implementation, as transformers' configs have it."""
PACKED, DOWN, SUMMED = "packed_colwise", "rowwise", "moe_tp_experts"
"""Styles of experts in tensor-parallel plans: of the gate-up matrices, of the down matrices, and of their module."""


class ServedExperts:
    """The experts of one model on one rank."""

    def __init__(self, runtime: Runtime, *, sums: bool) -> None:
        kernels = runtime.kernels
        self.mlp = kernels.expert_mlp if is_offered(kernels.expert_mlp) else plain_expert_mlp
        self.ranks = runtime.ranks if sums else None

    def __call__(self, module: Any, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """The weighted sum over each token's experts, and over the ranks: (T, D) -> (T, D)."""
        if is_gated_silu(module):
            out_TD = self.mlp(x_TD, expert_TA, weight_TA.float(), module.gate_up_proj, module.down_proj)
        else:
            out_TD = _products(module, x_TD)(module, x_TD, expert_TA, weight_TA)
        return out_TD if self.ranks is None else self.ranks.all_reduce(out_TD)


def attach_experts(model: nn.Module, experts: ServedExperts) -> None:
    """Let all experts of a model go through this."""
    for module in model.modules():
        if hasattr(module, "has_gate"):
            module.hookline_experts = experts  # type: ignore[assignment]


def is_gated_silu(module: Any) -> bool:
    """Whether experts compute down(silu(gate) * up), gate and up one below the other, and nothing else."""
    if not module.has_gate or module.has_bias or module.is_transposed or getattr(module, "has_post_expert_norm", False):
        return False
    if not getattr(module, "is_concatenated", True):
        return False
    usual = type(module)._apply_gate is getattr(moe, "_default_apply_gate", None)
    return usual and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _products(module: Any, x_TD: Tensor) -> Any:
    """Transformers' grouped products, or batched ones if rows are no multiple of 16 bytes, as grouped ones require."""
    is_aligned = all(size * x_TD.element_size() % 16 == 0 for size in module.down_proj.shape[-2:])
    return grouped_mm_experts_forward if is_aligned else batched_mm_experts_forward


def experts_of(module: Any, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
    """The function that transformers calls. A probed model has no experts attached: the result has only the shape."""
    compute = getattr(module, "hookline_experts", None)
    out_TD: Tensor = torch.empty_like(x_TD) if compute is None else compute(module, x_TD, expert_TA, weight_TA)
    return out_TD


ExpertsInterface.register(SERVED_EXPERTS, experts_of)


def rank_shape(shape: torch.Size, style: str | None, num_features: int) -> tuple[int, ...]:
    """The shape of a rank's part of merged experts (X, 2F, D) or (X, D, F), for this many features F of the rank."""
    if style == PACKED:
        return (shape[0], 2 * num_features, *shape[2:])
    return (*shape[:-1], num_features) if style == DOWN else tuple(shape)
