"""Triton products of a few tokens with their experts: limited by reading the weights once, not by arithmetic.

Pairs of a token and one of its experts are not grouped: each reads its expert's weights, which hardly any other pair
needs. Two launches do all, and the second asks for its weights while the first still runs (programmatic dependent
launch). Accumulation is float32.
Legend: T tokens, D hidden, F intermediate features, X experts, A experts of a token, P = T * A pairs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.triton_launch import cdiv, launch_options, next_power_of_2

MAX_TOKENS = 4
FEWEST_EXPERTS_A_PAIR = 4
"""Of several tokens, few take the same expert if there are this many for each pair."""
GATE_UP_ELEMENTS, DOWN_ELEMENTS = 16384, 32768
"""Of the weights, in a program's registers at once."""


@triton.jit(do_not_specialize=["alpha", "limit"])
def _few_gate_up_kernel(
    x_ptr, expert_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, expert_stride, weight_stride, half_stride, bias_stride,
    num_chosen, depth, width, alpha, limit,
    CLAMPED: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before: the next kernel reads which experts there are ahead of its wait
    pair = tl.program_id(1)
    out, column = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_D)
    outs, columns = out < width, column < depth
    inside = outs[:, None] & columns[None, :]
    expert = tl.load(expert_ptr + pair).to(tl.int64)
    gate_at = weight_ptr + expert * expert_stride + out[:, None].to(tl.int64) * weight_stride + column[None, :]
    gate_weight = tl.load(gate_at, mask=inside, other=0.0)
    up_weight = tl.load(gate_at + half_stride, mask=inside, other=0.0)
    token = (pair // num_chosen).to(tl.int64)
    x = tl.load(x_ptr + token * x_stride + column, mask=columns, other=0.0).to(tl.float32)[None, :]
    gate = tl.sum(gate_weight.to(tl.float32) * x, axis=1)
    up = tl.sum(up_weight.to(tl.float32) * x, axis=1)
    if CLAMPED:
        bias_at = bias_ptr + expert * bias_stride + out
        gate = tl.minimum(gate + tl.load(bias_at, mask=outs, other=0.0).to(tl.float32), limit)
        up += tl.load(bias_at + width, mask=outs, other=0.0).to(tl.float32)
        up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
    y = gate / (1.0 + tl.exp(-alpha * gate)) * up
    tl.store(out_ptr + pair * width + out, y.to(out_ptr.dtype.element_ty), mask=outs)


@triton.jit
def _few_down_kernel(
    hidden_ptr, expert_ptr, pair_weight_ptr, weight_ptr, bias_ptr, out_ptr, expert_stride, weight_stride, bias_stride,
    depth, width, CHOSEN: tl.constexpr, BIAS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    place, column = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_F)
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    places, outs, columns = place < CHOSEN, out < width, column < depth
    pair = token * CHOSEN + place
    # Routing was over when the kernel before this one let it start; it is read past the L1.
    expert = tl.load(expert_ptr + pair, mask=places, other=0, cache_modifier=".cg").to(tl.int64)
    pair_weight = tl.load(pair_weight_ptr + pair, mask=places, other=0.0, cache_modifier=".cg")
    weight_at = weight_ptr + (expert * expert_stride)[:, None, None] + column[None, None, :]
    weight_at += (out.to(tl.int64) * weight_stride)[None, :, None]
    inside = places[:, None, None] & outs[None, :, None] & columns[None, None, :]
    weight = tl.load(weight_at, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    hidden_at = hidden_ptr + pair[:, None] * depth + column[None, :]
    hidden = tl.load(hidden_at, mask=places[:, None] & columns[None, :], other=0.0).to(tl.float32)
    y = tl.sum(weight.to(tl.float32) * hidden[:, None, :], axis=2)
    if BIAS:
        bias_at = bias_ptr + (expert * bias_stride)[:, None] + out[None, :]
        y += tl.load(bias_at, mask=places[:, None] & outs[None, :], other=0.0).to(tl.float32)
    total = tl.sum(y * pair_weight[:, None], axis=0)
    tl.store(out_ptr + token * width + out, total.to(out_ptr.dtype.element_ty), mask=outs)


def fits(expert_TA: Tensor, num_experts: int) -> bool:
    """Whether these are few enough.

    Device: looks at shapes only, so a captured graph keeps its answer.
    """
    num_tokens, num_pairs = len(expert_TA), expert_TA.numel()
    return num_tokens == 1 or (0 < num_tokens <= MAX_TOKENS and num_pairs * FEWEST_EXPERTS_A_PAIR <= num_experts)


def few_expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
    *, gate_up_bias_XF: Tensor | None = None, down_bias_XD: Tensor | None = None, alpha: float = 1.0,
    limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """Kernels.expert_mlp, or clamped_expert_mlp if there is a gate_up_bias_XF, of what `fits`.

    Device: two launches, no host sync. The weights of the second product and the routing are read before the launch
    before has finished: it must not write them.
    """
    (num_tokens, hidden), num_chosen = x_TD.shape, expert_TA.shape[1]
    _, _, inner = down_XDF.shape
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    expert_TA, weight_TA = expert_TA.contiguous(), weight_TA.contiguous()
    assert gate_up_XFD.stride(2) == 1 and down_XDF.stride(2) == 1
    options = launch_options(x_TD.device)
    hidden_PF = torch.empty((num_tokens * num_chosen, inner), dtype=x_TD.dtype, device=x_TD.device)
    bias_XF = gate_up_XFD if gate_up_bias_XF is None else gate_up_bias_XF
    block_d, block_f = (next_power_of_2(size) for size in (hidden, inner))
    block_o = max(1, GATE_UP_ELEMENTS // (2 * block_d))
    _few_gate_up_kernel[(cdiv(inner, block_o), len(hidden_PF))](
        x_TD, expert_TA, gate_up_XFD, bias_XF, hidden_PF, x_TD.stride(0), gate_up_XFD.stride(0),
        gate_up_XFD.stride(1), inner * gate_up_XFD.stride(1), bias_XF.stride(0), num_chosen, hidden, inner,
        float(alpha), float(limit),
        CLAMPED=gate_up_bias_XF is not None, BLOCK_O=block_o, BLOCK_D=block_d, num_warps=4, **options,
    )  # fmt: skip
    out_TD = torch.empty((num_tokens, hidden), dtype=x_TD.dtype, device=x_TD.device)
    bias_XD = down_XDF if down_bias_XD is None else down_bias_XD
    block_a = next_power_of_2(num_chosen)
    block_o = max(1, DOWN_ELEMENTS // (block_a * block_f))
    _few_down_kernel[(cdiv(hidden, block_o), num_tokens)](
        hidden_PF, expert_TA, weight_TA, down_XDF, bias_XD, out_TD, down_XDF.stride(0), down_XDF.stride(1),
        bias_XD.stride(0), inner, hidden, CHOSEN=num_chosen, BIAS=down_bias_XD is not None, BLOCK_A=block_a,
        BLOCK_O=block_o, BLOCK_F=block_f, num_warps=8, **options,
    )  # fmt: skip
    return out_TD
