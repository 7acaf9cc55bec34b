"""Experts that are given each token times its router's score (Llama 4), where transformers gives every token to all.

Here each token passes the experts that it chose alone, by the operation that other experts take.
Legend: T tokens, D hidden, F intermediate features, X experts, A experts of a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations import moe

from hookline.core.contracts import Part, WeightTarget
from hookline.plugins.models.transformers.experts import DOWN, PACKED, experts_of

TRANSPOSED_STYLES = {"packed_rowwise": PACKED, "colwise": DOWN}
"""Transformers' names of how these matrices, which it holds transposed, are split over ranks -> names in experts.py."""


class ScaledExperts(nn.Module):
    """The matrices (X, 2F, D) and (X, D, F) of experts that checkpoints hold as (X, D, 2F) and (X, F, D)."""

    has_gate = is_concatenated = True  # as transformers' own products need it, which compute other gates than SiLU's
    has_bias = is_transposed = has_post_expert_norm = _is_expert_parallel = False
    _apply_gate = getattr(moe, "_default_apply_gate", None)

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.act_fn = experts.act_fn
        (num_experts, hidden_size, _), device = experts.gate_up_proj.shape, experts.gate_up_proj.device
        num_features = experts.down_proj.shape[1]
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * num_features, hidden_size, device=device))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, num_features, device=device))

    def forward(self, x_TD: Tensor, expert_TA: Tensor, score_TA: Tensor) -> Tensor:
        """The sum over each token's experts of expert(score * x): (T, D) -> (T, D)."""
        num_tokens, num_chosen = expert_TA.shape
        scaled_UD = (x_TD.unsqueeze(1) * score_TA.unsqueeze(2)).flatten(0, 1)
        ones_U1 = torch.ones_like(score_TA, dtype=torch.float32).view(-1, 1)
        out_UD = experts_of(self, scaled_UD, expert_TA.reshape(-1, 1), ones_U1)
        return out_UD if num_chosen == 1 else out_UD.view(num_tokens, num_chosen, -1).sum(1)


def serve_scaled_experts(model: nn.Module) -> None:
    """Put such experts into the places of Llama 4's."""
    module: Any
    for module in [one for one in model.modules() if type(one).__name__ == "Llama4TextMoe"]:
        module.experts = ScaledExperts(module.experts)
        module.forward = partial(_routed, module)


def stored_transposed(matrices: Tensor, part: Part | None, *, is_packed: bool) -> WeightTarget:
    """Where the tensor goes that holds all experts' matrices transposed. part: this rank's features; None for all.

    is_packed: whether these are the matrices of gate and up, one below the other.
    """
    if part is None:
        return WeightTarget.whole(matrices).transpose()
    if is_packed:
        return WeightTarget.joined([WeightTarget.shard(one, 1, part) for one in matrices.chunk(2, 1)], 1).transpose()
    return WeightTarget.shard(matrices, 2, part).transpose()


def stored_apart(module: str, matrices: Tensor, part: Part | None, *, is_packed: bool) -> dict[str, WeightTarget]:
    """Where the tensors go that hold each expert's matrices, as quantised checkpoints do. See stored_transposed."""
    kinds = ("gate_proj", "up_proj") if is_packed else ("down_proj",)
    found: dict[str, WeightTarget] = {}
    for expert, matrix in enumerate(matrices):
        for kind, view in zip(kinds, matrix.chunk(len(kinds)), strict=True):
            target = WeightTarget.whole(view) if part is None else WeightTarget.shard(view, int(not is_packed), part)
            found[f"{module}.{expert}.{kind}.weight"] = target
    return found


def _routed(module: Any, hidden_1TD: Tensor) -> tuple[Tensor, Tensor]:
    x_TD = hidden_1TD.reshape(-1, module.hidden_dim)
    logits_TX = functional.linear(x_TD, module.router.weight)
    logit_TA, expert_TA = logits_TX.topk(module.top_k, dim=-1)
    score_TA = logit_TA.float().sigmoid().to(x_TD.dtype)
    return module.shared_expert(x_TD) + module.experts(x_TD, expert_TA, score_TA), logits_TX
