"""Experts whose sums do not depend on how many tokens there are: one tiling, and a sum in the order of the choice.

Legend: T tokens, D hidden, A experts of a token.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.plugins.kernels.experts.triton_experts import expert_outputs
from hookline.plugins.kernels.experts.triton_routing import Tiling

COLUMNS = 1024
"""Columns of a program that sums up."""


def only_tiling(itemsize: int) -> Tiling:
    """The same for one token and thousands: 64 pairs are the fewest that Hopper's matrix instruction takes."""
    if itemsize > 2:
        return Tiling(32, (32, 32, 4, 2), (32, 32, 4, 2))
    return Tiling(64, (64, 64, 4, 4), (64, 64, 4, 4))


@triton.jit
def _sum_kernel(parts_ptr, out_ptr, width, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(CHOSEN):
        total += tl.load(parts_ptr + (row * CHOSEN + place) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def expert_mlp(x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
    """See Kernels.expert_mlp."""
    cut = only_tiling(x_TD.element_size())
    return _summed(expert_outputs(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, cut))


def clamped_expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor,
    down_XDF: Tensor, down_bias_XD: Tensor | None, alpha: float, limit: float,
) -> Tensor:  # fmt: skip
    """See Kernels.clamped_expert_mlp."""
    cut, clamps = only_tiling(x_TD.element_size()), (gate_up_bias_XF, down_bias_XD, alpha, limit)
    return _summed(expert_outputs(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, cut, *clamps))


def _summed(parts_TAD: Tensor) -> Tensor:
    """The sum of each token's parts, in their order."""
    num_tokens, num_chosen, width = parts_TAD.shape
    out_TD = torch.empty((num_tokens, width), dtype=parts_TAD.dtype, device=parts_TAD.device)
    if num_tokens:
        grid = num_tokens, triton.cdiv(width, COLUMNS)
        _sum_kernel[grid](parts_TAD, out_TD, width, CHOSEN=num_chosen, COLUMNS=COLUMNS, num_warps=4)
    return out_TD
