"""A gated delta net of one token, between its two products, in two launches that ask early for all they read.

A request's states are written by the step before alone, and an ordinary launch lies between: so both kernels read them
before they wait for the launch before (see triton_launch.py). The first computes the convolution, the gates and the
rule, and only reads the convolution's past inputs, since the heads of a key head share its channels; the second moves
them up, beside the norm. More rows take an operation after the other: each program would convolve for itself.
Legend: T tokens, R rows of states, C channels, W width of a convolution, P = W - 1 past inputs, H value heads, E key
head dim, F value head dim.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import DeltaNet, StateRows
from hookline.plugins.kernels.recurrent.triton_recurrent import EPS, through_one_token, unit
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, launch_options, next_power_of_2

VALUES = 32
"""Columns of a state a program: one of 64, or of 16, takes 0 to 0.7 us longer for one row on an H200 (2026-11-29)."""


@triton.jit
def _past_inputs(conv_ptr, weight_ptr, channel, inside, PAST: tl.constexpr, BLOCK_PAST: tl.constexpr):
    """Of these channels: what past inputs add to the convolution, and the newest input's weight."""
    past = tl.arange(0, BLOCK_PAST)
    mask = inside[:, None] & (past < PAST)[None, :]
    earlier = tl.load(conv_ptr + channel[:, None] * PAST + past[None, :], mask=mask, other=0.0).to(tl.float32)
    weights = tl.load(weight_ptr + channel[:, None] * (PAST + 1) + past[None, :], mask=mask, other=0.0).to(tl.float32)
    newest = tl.load(weight_ptr + channel * (PAST + 1) + PAST, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(earlier * weights, axis=1), newest


@triton.jit
def _convolved(x_ptr, channel, inside, total, newest):
    """The convolution's outputs, rounded as it stores them."""
    x = tl.load(x_ptr + channel, mask=inside, other=0.0)
    total += x.to(tl.float32) * newest
    return (total / (1.0 + tl.exp(-total))).to(x.dtype).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _convolve_and_correct_kernel(
    x_ptr, beta_ptr, decay_ptr, weight_ptr, conv_ptr, log_rate_ptr, bias_ptr, state_ptr, out_ptr, rows_ptr,
    conv_stride, row_stride, head_stride, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAST: tl.constexpr,
    BLOCK_PAST: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state, through the one token."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    keys, values = e < KEY_DIM, f < VALUE_DIM
    mask = keys[:, None] & values[None, :]
    row = tl.load(rows_ptr).to(tl.int64)
    at = state_ptr + row * row_stride + head * head_stride + e[:, None] * VALUE_DIM + f[None, :]
    state = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    KEYS: tl.constexpr = NUM_HEADS // GROUP * KEY_DIM
    of_q = head // GROUP * KEY_DIM + e
    of_v = 2 * KEYS + head * VALUE_DIM + f
    conv_ptr += row * conv_stride
    q, q_newest = _past_inputs(conv_ptr, weight_ptr, of_q, keys, PAST, BLOCK_PAST)
    k, k_newest = _past_inputs(conv_ptr, weight_ptr, KEYS + of_q, keys, PAST, BLOCK_PAST)
    v, v_newest = _past_inputs(conv_ptr, weight_ptr, of_v, values, PAST, BLOCK_PAST)
    rate = tl.exp(tl.load(log_rate_ptr + head))
    bias = tl.load(bias_ptr + head)
    if PDL:
        gdc_wait()
    beta = 1.0 / (1.0 + tl.exp(-tl.load(beta_ptr + head).to(tl.float32)))
    shifted = tl.load(decay_ptr + head).to(tl.float32) + bias
    decay = tl.exp(-rate * (tl.maximum(shifted, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(shifted)))))
    q = unit(_convolved(x_ptr, of_q, keys, q, q_newest), scale, EPS)
    k = unit(_convolved(x_ptr, KEYS + of_q, keys, k, k_newest), 1.0, EPS)
    v = _convolved(x_ptr, of_v, values, v, v_newest)
    state, out = through_one_token(state, q, k, v, decay, beta)
    tl.store(out_ptr + head * VALUE_DIM + f, out.to(out_ptr.dtype.element_ty), mask=values)
    tl.store(at, state.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _norm_and_keep_kernel(
    y_ptr, norm_ptr, gate_ptr, x_ptr, conv_ptr, out_ptr, rows_ptr, conv_stride, num_channels, eps,
    VALUE_DIM: tl.constexpr, PAST: tl.constexpr, BLOCK_PAST: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The norm and gate of one head; and of some channels, the newest input behind the past ones."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    f, place, past = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_PAST)
    values, channel = f < VALUE_DIM, head * CHANNELS + place
    inside = (place < CHANNELS) & (channel < num_channels)
    moved = inside[:, None] & ((past > 0) & (past < PAST))[None, :]
    conv_ptr += tl.load(rows_ptr).to(tl.int64) * conv_stride
    at = conv_ptr + channel[:, None] * PAST + past[None, :]
    earlier = tl.load(at, mask=moved, other=0.0)
    weight = tl.load(norm_ptr + f, mask=values, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    y = tl.load(y_ptr + head * VALUE_DIM + f, mask=values, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + head * VALUE_DIM + f, mask=values, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + channel, mask=inside, other=0.0)
    out = y * tl.rsqrt(tl.sum(y * y, axis=0) / VALUE_DIM + eps) * weight * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + head * VALUE_DIM + f, out.to(out_ptr.dtype.element_ty), mask=values)
    tl.debug_barrier()  # every thread has read what the others overwrite
    tl.store(at - 1, earlier, mask=moved)
    tl.store(conv_ptr + channel * PAST + PAST - 1, x.to(conv_ptr.dtype.element_ty), mask=inside)


def delta_net_of_one_token(
    x_TC: Tensor, beta_TH: Tensor, decay_TH: Tensor, gate_THF: Tensor, net: DeltaNet, conv_RCP: Tensor,
    memory_RHEF: Tensor, states: StateRows,
) -> Tensor:  # fmt: skip
    """Kernels.gated_delta_net of a step of one decode alone. Device: two launches, no host sync."""
    _, num_heads, key_dim, value_dim = memory_RHEF.shape
    num_channels, width = net.conv_CW.shape
    x_TC, beta_TH, decay_TH, gate_THF = (
        one if one[0].is_contiguous() else one.contiguous() for one in (x_TC, beta_TH, decay_TH, gate_THF)
    )
    assert conv_RCP[0].is_contiguous() and memory_RHEF[0].is_contiguous() and net.conv_CW.is_contiguous()
    y_THF, out_THF = (torch.empty(gate_THF.shape, dtype=x_TC.dtype, device=x_TC.device) for _ in "yo")
    past = {"PAST": width - 1, "BLOCK_PAST": next_power_of_2(width - 1)}
    options, group = launch_options(x_TC.device), num_heads * key_dim * 2 // (num_channels - num_heads * value_dim)
    block_f = min(VALUES, next_power_of_2(value_dim))
    _convolve_and_correct_kernel[(cdiv(value_dim, block_f), num_heads)](
        x_TC, beta_TH, decay_TH, net.conv_CW, conv_RCP, net.log_rate_H, net.decay_bias_H, memory_RHEF, y_THF,
        states.rows_B, conv_RCP.stride(0), memory_RHEF.stride(0), memory_RHEF.stride(1), key_dim**-0.5,
        NUM_HEADS=num_heads, GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim, **past,
        BLOCK_E=next_power_of_2(key_dim), BLOCK_F=block_f, num_warps=4, **options,
    )  # fmt: skip
    channels = cdiv(num_channels, num_heads)
    _norm_and_keep_kernel[(num_heads,)](
        y_THF, net.norm_F, gate_THF, x_TC, conv_RCP, out_THF, states.rows_B, conv_RCP.stride(0), num_channels,
        net.eps, VALUE_DIM=value_dim, **past, CHANNELS=channels, BLOCK_C=next_power_of_2(channels),
        BLOCK_F=next_power_of_2(value_dim), num_warps=4, **options,
    )  # fmt: skip
    return out_THF
