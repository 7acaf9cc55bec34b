"""Experts whose sums do not depend on how many tokens there are: one tiling, and a sum in the order of the choice.

Legend: T tokens, D hidden, A experts of a token.
"""

from __future__ import annotations

from torch import Tensor

from hookline.plugins.kernels.experts.triton_experts import expert_outputs, summed
from hookline.plugins.kernels.experts.triton_routing import Tiling
from hookline.plugins.kernels.products.triton_scales import Scales


def only_tiling(itemsize: int) -> Tiling:
    """The same for one token and thousands: 64 pairs are the fewest that Hopper's matrix instruction takes."""
    if itemsize > 2:
        return Tiling(32, (32, 32, 4, 2), (32, 32, 4, 2))
    return Tiling(64, (64, 64, 4, 4), (64, 64, 4, 4))


def expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
    scales: tuple[Scales, Scales] | None = None, *, gelu: bool = False,
) -> Tensor:  # fmt: skip
    """See Kernels.expert_mlp, and with `gelu` gelu_expert_mlp. scales: as of `expert_outputs`."""
    cut = only_tiling(x_TD.element_size())
    return summed(expert_outputs(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, cut, scales=scales, gelu=gelu))


def clamped_expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor,
    down_XDF: Tensor, down_bias_XD: Tensor | None, alpha: float, limit: float,
) -> Tensor:  # fmt: skip
    """See Kernels.clamped_expert_mlp."""
    cut, clamps = only_tiling(x_TD.element_size()), (gate_up_bias_XF, down_bias_XD, alpha, limit)
    return summed(expert_outputs(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, cut, *clamps))
