"""Kernels of recurrent layers: a short convolution with a state, and the gated delta rule, token by token.

For long chunks of prompts see triton_delta_chunks.py. States are read and written in place; arithmetic is float32.
Legend: T tokens, B requests, R rows of states, C channels, W width of a convolution, P = W - 1 past inputs,
K key heads, H = K * G value heads, E key head dim, F value head dim.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import StateRows
from hookline.plugins.kernels.recurrent.triton_delta_chunks import chunked_delta_rule, rows_in_a_block
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, launch_options, next_power_of_2

CHANNELS = 256
"""Channels a program, of one token or a few."""
TOKENS = 8
VALUES, VALUES_OF_ONE = 32, 64
"""Columns of a state a program, through any number of tokens and through one. 256 rows of 48 heads of 128 x 128 on an
H200, 2026-11-29: 402 us with 64 columns, 430 with 32, 519 with 16; a copy of as many bytes takes 378."""
FEWEST_IN_CHUNKS = 16
"""Tokens of a prompt from which on chunks are faster than one after the other."""
EPS = tl.constexpr(1e-6)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _convolve_one_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, rows_ptr, x_stride, row_stride, num_channels,
    BIAS: tl.constexpr, PAST: tl.constexpr, BLOCK_PAST: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The short convolution of one token of each request, and the update of its state."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < num_channels
    past = tl.arange(0, BLOCK_PAST)
    mask = inside[:, None] & (past < PAST)[None, :]
    state_row_ptr = state_ptr + tl.load(rows_ptr + token).to(tl.int64) * row_stride
    x = tl.load(x_ptr + token * x_stride + channel, mask=inside, other=0.0)
    at = channel[:, None] * PAST + past[None, :]
    earlier = tl.load(state_row_ptr + at, mask=mask, other=0.0)
    weights = tl.load(weight_ptr + channel[:, None] * (PAST + 1) + past[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + channel * (PAST + 1) + PAST, mask=inside, other=0.0)
    total = tl.sum(earlier.to(tl.float32) * weights.to(tl.float32), axis=1) + x.to(tl.float32) * weight.to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + token * num_channels + channel, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # every thread has read what the others overwrite
    tl.store(state_row_ptr + at - 1, earlier, mask=mask & (past > 0)[None, :])
    tl.store(state_row_ptr + channel * PAST + PAST - 1, x.to(state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"], do_not_specialize_on_alignment=OF_STEP)
def _convolve_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, rows_ptr, starts_ptr, x_stride, row_stride, num_channels,
    num_tokens, num_rows, BIAS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tokens of any requests, from inputs and states as they were before the step."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tokens, channels = token < num_tokens, channel < num_channels
    row = tl.arange(0, BLOCK_ROWS)
    ends = tl.load(starts_ptr + 1 + row, mask=row < num_rows, other=2147483647)
    request = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    start = tl.load(starts_ptr + request, mask=tokens, other=0)
    state_row = tl.load(rows_ptr + request, mask=tokens, other=0).to(tl.int64)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=channels, other=0.0).to(tl.float32)[None, :]
    for place in tl.static_range(WIDTH):
        source = token - (WIDTH - 1) + place
        is_input = (source >= start)[:, None]
        mask = tokens[:, None] & channels[None, :]
        x_at = source.to(tl.int64)[:, None] * x_stride + channel[None, :]
        x = tl.load(x_ptr + x_at, mask=mask & is_input, other=0.0).to(tl.float32)
        if place < WIDTH - 1:
            past = source - start + WIDTH - 1
            state_at = state_row[:, None] * row_stride + channel[None, :] * (WIDTH - 1) + past[:, None]
            x += tl.load(state_ptr + state_at, mask=mask & (source < start)[:, None], other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channel * WIDTH + place, mask=channels, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    out = total / (1.0 + tl.exp(-total))
    at = token.to(tl.int64)[:, None] * num_channels + channel[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=tokens[:, None] & channels[None, :])


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _keep_inputs_kernel(
    x_ptr, state_ptr, rows_ptr, starts_ptr, x_stride, row_stride, num_channels,
    PAST: tl.constexpr, BLOCK_PAST: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The last inputs of each request into its state."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0)
    start, stop = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    if start == stop:
        return
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    past = tl.arange(0, BLOCK_PAST)
    mask = (channel < num_channels)[:, None] & (past < PAST)[None, :]
    source = stop - PAST + past
    is_input = (source >= start)[None, :]
    state_row_ptr = state_ptr + tl.load(rows_ptr + request).to(tl.int64) * row_stride
    at = channel[:, None] * PAST
    x_at = source.to(tl.int64)[None, :] * x_stride + channel[:, None]
    x = tl.load(x_ptr + x_at, mask=mask & is_input, other=0.0).to(state_ptr.dtype.element_ty)
    earlier_at = at + (past + stop - start)[None, :]
    earlier = tl.load(state_row_ptr + earlier_at, mask=mask & (source < start)[None, :], other=0.0)
    tl.debug_barrier()  # every thread has read what the others overwrite
    tl.store(state_row_ptr + at + past[None, :], tl.where(is_input, x, earlier), mask=mask)


def short_convolution(
    x_TC: Tensor, weight_CW: Tensor, state_RCP: Tensor, states: StateRows, bias_C: Tensor | None = None
) -> Tensor:
    """See Kernels.short_convolution. Device: one launch for decodes alone, else two; no host sync."""
    num_tokens, num_channels = x_TC.shape
    width, num_requests = weight_CW.shape[1], len(states.rows_B)
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    assert state_RCP.stride(1) == width - 1 and weight_CW.is_contiguous()
    out_TC = torch.empty((num_tokens, num_channels), dtype=x_TC.dtype, device=x_TC.device)
    row_stride, options = state_RCP.stride(0), launch_options(x_TC.device)
    weights = weight_CW, weight_CW if bias_C is None else bias_C
    past = {"PAST": width - 1, "BLOCK_PAST": next_power_of_2(width - 1), "BLOCK_C": CHANNELS}
    num_blocks = cdiv(num_channels, CHANNELS)
    if num_requests == states.num_decodes:
        _convolve_one_kernel[(num_tokens, num_blocks)](
            x_TC, *weights, state_RCP, out_TC, states.rows_B, x_TC.stride(0), row_stride, num_channels,
            BIAS=bias_C is not None, **past, num_warps=4, **options,
        )  # fmt: skip
        return out_TC
    _convolve_kernel[(cdiv(num_tokens, TOKENS), num_blocks)](
        x_TC, *weights, state_RCP, out_TC, states.rows_B, states.query_starts_B1, x_TC.stride(0), row_stride,
        num_channels, num_tokens, num_requests,
        BIAS=bias_C is not None, WIDTH=width, BLOCK_ROWS=rows_in_a_block(num_requests), BLOCK_T=TOKENS,
        BLOCK_C=CHANNELS, num_warps=4, **options,
    )  # fmt: skip
    _keep_inputs_kernel[(num_requests, num_blocks)](
        x_TC, state_RCP, states.rows_B, states.query_starts_B1, x_TC.stride(0), row_stride, num_channels,
        **past, num_warps=4, **options,
    )  # fmt: skip
    return out_TC


@triton.jit
def unit(x, scale, least):
    """Divided by the root of the sum of squares, to which `least` is added, times `scale`."""
    return x * (tl.rsqrt(tl.sum(x * x, axis=0) + least) * scale)


@triton.jit
def through_one_token(state, q, k, v, decay, beta):
    """The state (E, F) behind one token, and what the query reads there (F,).

    Keys and queries read the state before its update, at once: fewer of its values are in registers then, and what the
    update adds to the query's result follows from the product of query and key.
    """
    recalled = tl.sum(state * k[:, None], axis=0)
    read = tl.sum(state * q[:, None], axis=0)
    update = (v - decay * recalled) * beta
    return state * decay + k[:, None] * update[None, :], decay * read + tl.sum(q * k, axis=0) * update


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _delta_rule_kernel(
    q_ptr, k_ptr, v_ptr, log_decay_ptr, beta_ptr, state_ptr, out_ptr, rows_ptr, starts_ptr,
    q_stride: tl.int64, k_stride: tl.int64, v_stride: tl.int64, gate_stride, row_stride, head_stride, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ONE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state, through the tokens of one request; ONE: each has one, as decodes have."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(1)
    request = tl.program_id(2)
    e = tl.arange(0, BLOCK_E)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    keys, values = e < KEY_DIM, f < VALUE_DIM
    mask = keys[:, None] & values[None, :]
    start = request
    stop = request + 1
    if not ONE:
        start, stop = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
        if start == stop:
            return
    state_row = tl.load(rows_ptr + request).to(tl.int64)
    at = state_ptr + state_row * row_stride + head * head_stride + e[:, None] * VALUE_DIM + f[None, :]
    state = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    key_head = head // GROUP
    for token in range(start, stop):
        q = tl.load(q_ptr + token * q_stride + key_head * KEY_DIM + e, mask=keys, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * k_stride + key_head * KEY_DIM + e, mask=keys, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_stride + head * VALUE_DIM + f, mask=values, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(log_decay_ptr + token * gate_stride + head))
        beta = tl.load(beta_ptr + token * gate_stride + head)
        state, out = through_one_token(state, unit(q, scale, EPS), unit(k, 1.0, EPS), v, decay, beta)
        to_out = out_ptr + (token * NUM_HEADS + head) * VALUE_DIM + f
        tl.store(to_out, out.to(out_ptr.dtype.element_ty), mask=values)
    tl.store(at, state.to(state_ptr.dtype.element_ty), mask=mask)


def gated_delta_rule(
    q_TKE: Tensor,
    k_TKE: Tensor,
    v_THF: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    state_RHEF: Tensor,
    states: StateRows,
) -> Tensor:
    """See Kernels.gated_delta_rule. Device: one launch for decodes alone; no host sync."""
    num_heads, value_dim = v_THF.shape[1:]
    key_dim, num_requests = q_TKE.shape[2], len(states.rows_B)
    q_TKE, k_TKE, v_THF = (x if _has_whole_tokens(x) else x.contiguous() for x in (q_TKE, k_TKE, v_THF))
    log_decay_TH, beta_TH = log_decay_TH.float().contiguous(), beta_TH.float().contiguous()
    assert state_RHEF.stride()[2:] == (value_dim, 1)
    out_THF = torch.empty(v_THF.shape, dtype=v_THF.dtype, device=v_THF.device)
    in_chunks = states.max_query_len >= FEWEST_IN_CHUNKS
    num_one_by_one = states.num_decodes if in_chunks else num_requests
    if num_one_by_one:
        are_decodes = num_one_by_one == states.num_decodes
        block_f = min(VALUES_OF_ONE if are_decodes else VALUES, next_power_of_2(value_dim))
        _delta_rule_kernel[(cdiv(value_dim, block_f), num_heads, num_one_by_one)](
            q_TKE, k_TKE, v_THF, log_decay_TH, beta_TH, state_RHEF, out_THF, states.rows_B, states.query_starts_B1,
            q_TKE.stride(0), k_TKE.stride(0), v_THF.stride(0), num_heads, state_RHEF.stride(0), state_RHEF.stride(1),
            key_dim**-0.5,
            NUM_HEADS=num_heads, GROUP=num_heads // q_TKE.shape[1], KEY_DIM=key_dim, VALUE_DIM=value_dim,
            ONE=are_decodes, BLOCK_E=next_power_of_2(key_dim), BLOCK_F=block_f, num_warps=4,
            **launch_options(q_TKE.device),
        )  # fmt: skip
    if in_chunks and num_requests > states.num_decodes:
        chunked_delta_rule(q_TKE, k_TKE, v_THF, log_decay_TH, beta_TH, state_RHEF, states, out_THF)
    return out_THF


def _has_whole_tokens(x: Tensor) -> bool:
    """Whether the heads of a token lie one behind the other."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
