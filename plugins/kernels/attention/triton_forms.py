"""Attention forms in Triton kernels: how a product of query and key becomes a score, and rotary embedding.

Scores are in units of log2, for exp2 is what a card computes. Kernels take each feature as a constant that they are
compiled with, so that plain attention has no instruction of it.
Legend: H heads, E head dim, R rotated values of a head.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)
"""Where a running maximum begins that may meet tiles of which a query sees nothing: -inf less -inf is NaN."""


@dataclass(frozen=True)
class Scoring:
    """A kernel's arguments for a form. factor: multiplies products of query and key. cap: of the scores, 0 for none."""

    factor: float
    cap: float
    sinks_H: Tensor | None

    @classmethod
    def of(cls, scale: float, form: AttentionForm = PLAIN_ATTENTION) -> Scoring:
        """A form's, where 1 / sqrt(E) is `scale`."""
        scale = scale if form.scale is None else form.scale
        if form.softcap is None:
            return cls(scale * LOG2_E, 0.0, form.sinks_H)
        return cls(2 * LOG2_E * scale / form.softcap, form.softcap * LOG2_E, form.sinks_H)


@triton.jit
def scored(products, factor, cap, CAP: tl.constexpr):
    """Scores of products of query and key; cap * tanh(x) = cap - 2 * cap / (1 + exp(2x))."""
    if CAP:
        return cap - 2.0 * cap / (1.0 + tl.exp2(products * factor))
    else:
        return products * factor


@triton.jit
def load_sinks(sinks_ptr, head, heads):
    """Sinks of these heads as scores."""
    FACTOR: tl.constexpr = 1.4426950408889634  # LOG2_E, and not a global: see docs/plugins.md#kernels-in-triton
    return tl.load(sinks_ptr + head, mask=heads, other=0.0).to(tl.float32) * FACTOR


@triton.jit
def first_seen(context_len, window):
    """First position that the last token of a context sees within a window."""
    return tl.maximum(context_len - window, 0)


@triton.jit
def load_rotation(row_ptr, dim, dims, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Cosine and signed sine of every value of a head (BLOCK_DIM,), from a position's row of the table."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    partner = rotary_partner(dim, ROTARY_DIM, HEAD_DIM)
    if ROTARY_DIM == HEAD_DIM:
        cos = tl.load(row_ptr + tl.minimum(dim, partner), mask=dims, other=0.0)
        sin = tl.load(row_ptr + tl.maximum(dim, partner), mask=dims, other=0.0)
    else:
        cos = tl.load(row_ptr + tl.minimum(dim, partner), mask=dim < ROTARY_DIM, other=1.0)
        sin = tl.load(row_ptr + tl.maximum(dim, partner), mask=dim < ROTARY_DIM, other=0.0)
    return cos, tl.where(dim < HALF, -sin, sin)


@triton.jit
def rotary_partner(dim, ROTARY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The index of the value that each value of a head is rotated with; its own index if it is not rotated."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    if ROTARY_DIM != HEAD_DIM:
        partner = tl.where(dim < ROTARY_DIM, partner, dim)
    return partner


@triton.jit
def load_rotation_and_weights(
    rope_row_ptr, q_weight_ptr, k_weight_ptr, dim, partner, dims, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Cosine and sine of every value of a head, and the norms' weights of it and of its partner, of q and of k."""
    cos, sin = 1.0 + tl.zeros([BLOCK_DIM], tl.float32), tl.zeros([BLOCK_DIM], tl.float32)
    if ROPE:
        cos, sin = load_rotation(rope_row_ptr, dim, dims, HEAD_DIM, ROTARY_DIM)
    q_weight, k_weight, other_q_weight, other_k_weight = cos, cos, cos, cos
    if NORM:
        q_weight = tl.load(q_weight_ptr + dim, mask=dims, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + dim, mask=dims, other=0.0).to(tl.float32)
        other_q_weight = tl.load(q_weight_ptr + partner, mask=dims, other=0.0).to(tl.float32)
        other_k_weight = tl.load(k_weight_ptr + partner, mask=dims, other=0.0).to(tl.float32)
    return cos, sin, q_weight, k_weight, other_q_weight, other_k_weight


@triton.jit
def rotated(
    x_ptr, mask, weight, other_weight, cos, sin, eps, dim, partner,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Heads (n, BLOCK_DIM) at x_ptr (n, 1), normalised and rotated, in float32; `sin` has its sign."""
    x = tl.load(x_ptr + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    other = x
    if ROPE:
        other = tl.load(x_ptr + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x *= scale * weight[None, :]
        other *= scale * other_weight[None, :]
    if ROPE:
        x = x * cos[None, :] + other * sin[None, :]
    return x
