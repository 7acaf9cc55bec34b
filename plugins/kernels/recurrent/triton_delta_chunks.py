"""The gated delta rule for prompts, a chunk of tokens at a time on the tensor cores.

The updates of the state by the tokens of a chunk depend on one another by a triangular system (see
core/layers/recurrent.py). One kernel inverts the systems of all chunks in parallel; another takes the state of each
request and head through its chunks, by matrix products alone. Both read lengths from the device, so steps with prompts
can be captured.
Legend: T tokens, B requests, N tokens of a chunk, K key heads, H = K * G value heads, E key head dim, F value head dim,
W chunks.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.core.contracts import StateRows
from hookline.plugins.kernels.attention.triton_prefill import query_tiles_on_device
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, next_power_of_2

CHUNK = 32
"""Its size and that of VALUES fill the registers of eight warps."""
VALUES = 64
"""Columns of a state a program."""
FEW_ROWS, MANY_ROWS = 32, 1024


def rows_in_a_block(num_rows: int) -> int:
    """A power of two that the rows do not exceed: one of two, so that a new number of them hardly ever compiles."""
    return FEW_ROWS if num_rows <= FEW_ROWS else max(MANY_ROWS, next_power_of_2(num_rows))


def precision(dtype: torch.dtype) -> str:
    """How products are computed: 11 bits lose nothing that 16-bit inputs have; float32 takes three such products."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def _unit_keys(x_ptr, token, is_token, e, keys, stride, head, KEY_DIM: tl.constexpr):
    """Queries or keys of a chunk (N, BLOCK_E) in float32, normalised."""
    at = token.to(tl.int64)[:, None] * stride + head * KEY_DIM + e[None, :]
    EPS: tl.constexpr = 1e-6
    x = tl.load(x_ptr + at, mask=is_token[:, None] & keys[None, :], other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]


@triton.jit
def _log_decays(log_decay_ptr, token, is_token, stride, head):
    """Logarithms of the products of decays up to each token of a chunk, itself included (N,)."""
    return tl.cumsum(tl.load(log_decay_ptr + token.to(tl.int64) * stride + head, mask=is_token, other=0.0), axis=0)


@triton.jit
def _ratios(log_decays, place):
    """Decay from a token (column) to a later one (row), 0 for earlier ones: (N, N)."""
    is_past = place[:, None] >= place[None, :]
    return tl.where(is_past, tl.exp(tl.where(is_past, log_decays[:, None] - log_decays[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _invert_kernel(
    k_ptr, log_decay_ptr, beta_ptr, inverse_ptr, tiles_ptr, starts_ptr, k_stride, gate_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse of one chunk's system for one head, row by row."""
    tile, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles_ptr + tile * 2)
    if request < 0:
        return
    place = tl.arange(0, CHUNK)
    token = tl.load(starts_ptr + request) + tl.load(tiles_ptr + tile * 2 + 1) + place
    is_token = token < tl.load(starts_ptr + request + 1)
    e = tl.arange(0, BLOCK_E)
    k = _unit_keys(k_ptr, token, is_token, e, e < KEY_DIM, k_stride, head // GROUP, KEY_DIM)
    log_decays = _log_decays(log_decay_ptr, token, is_token, gate_stride, head)
    beta = tl.load(beta_ptr + token.to(tl.int64) * gate_stride + head, mask=is_token, other=0.0)
    system = beta[:, None] * _ratios(log_decays, place) * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    system = tl.where(place[:, None] > place[None, :], system, 0.0)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    for at in range(1, CHUNK):
        of_row = tl.sum(tl.where(place[:, None] == at, system, 0.0), axis=0)
        change = tl.sum(of_row[:, None] * inverse, axis=0)
        inverse = tl.where(place[:, None] == at, inverse - change[None, :], inverse)
    inverse_ptr += (tile.to(tl.int64) * NUM_HEADS + head) * CHUNK * CHUNK
    tl.store(inverse_ptr + place[:, None] * CHUNK + place[None, :], inverse)


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=OF_STEP)
def _scan_kernel(
    q_ptr, k_ptr, v_ptr, log_decay_ptr, beta_ptr, inverse_ptr, state_ptr, out_ptr, rows_ptr, starts_ptr, first_request,
    q_stride, k_stride, v_stride, gate_stride, row_stride, head_stride, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state, through the chunks of one request."""
    head = tl.program_id(1)
    request = first_request + tl.program_id(2)
    start, stop = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    if start == stop:
        return
    earlier = tl.arange(0, BLOCK_ROWS)
    is_earlier = (earlier >= first_request) & (earlier < request)
    first = tl.load(starts_ptr + earlier, mask=is_earlier, other=0)
    tile = tl.sum(tl.cdiv(tl.load(starts_ptr + earlier + 1, mask=is_earlier, other=0) - first, CHUNK), axis=0)
    place = tl.arange(0, CHUNK)
    e = tl.arange(0, BLOCK_E)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    keys, values = e < KEY_DIM, f < VALUE_DIM
    mask = keys[:, None] & values[None, :]
    state_row = tl.load(rows_ptr + request).to(tl.int64)
    state_at = state_ptr + state_row * row_stride + head * head_stride + e[:, None] * VALUE_DIM + f[None, :]
    state = tl.load(state_at, mask=mask, other=0.0).to(tl.float32)
    for begin in range(start, stop, CHUNK):
        token = begin + place
        is_token = token < stop
        token_mask = is_token[:, None] & values[None, :]
        q = _unit_keys(q_ptr, token, is_token, e, keys, q_stride, head // GROUP, KEY_DIM) * scale
        k = _unit_keys(k_ptr, token, is_token, e, keys, k_stride, head // GROUP, KEY_DIM)
        v_at = token.to(tl.int64)[:, None] * v_stride + head * VALUE_DIM + f[None, :]
        v = tl.load(v_ptr + v_at, mask=token_mask, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token.to(tl.int64) * gate_stride + head, mask=is_token, other=0.0)
        log_decays = _log_decays(log_decay_ptr, token, is_token, gate_stride, head)
        inverse_at = (tile.to(tl.int64) * NUM_HEADS + head) * CHUNK * CHUNK + place[:, None] * CHUNK + place[None, :]
        inverse = tl.load(inverse_ptr + inverse_at)
        decays = tl.exp(log_decays)[:, None]
        recalled = tl.dot(k, state, input_precision=PRECISION)
        wanted = beta[:, None] * (v - decays * recalled)
        update = tl.dot(inverse, wanted, input_precision=PRECISION)
        weights = _ratios(log_decays, place) * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        out = decays * tl.dot(q, state, input_precision=PRECISION)
        out += tl.dot(weights, update, input_precision=PRECISION)
        out_at = (token.to(tl.int64)[:, None] * NUM_HEADS + head) * VALUE_DIM + f[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=token_mask)
        total = tl.sum(tl.where(place == CHUNK - 1, log_decays, 0.0), axis=0)
        left = k * tl.exp(total - log_decays)[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(left), update, input_precision=PRECISION)
        tile += 1
    tl.store(state_at, state.to(state_ptr.dtype.element_ty), mask=mask)


def chunked_delta_rule(
    q_TKE: Tensor,
    k_TKE: Tensor,
    v_THF: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    state_RHEF: Tensor,
    states: StateRows,
    out_THF: Tensor,
) -> None:
    """The rule for all requests behind the decodes, whose outputs alone are written.

    Shapes: as Kernels.gated_delta_rule, the heads of a token one behind the other; log_decay_TH, beta_TH float32,
    contiguous.
    Device: three launches, no host sync; safe in a CUDA graph.
    """
    num_heads, value_dim = v_THF.shape[1:]
    key_dim, group, num_requests = q_TKE.shape[2], num_heads // q_TKE.shape[1], len(states.rows_B)
    first, num_tokens = states.num_decodes, len(q_TKE) - states.num_decodes
    tiles_W2 = query_tiles_on_device(states.query_starts_B1, num_tokens, first, CHUNK, rows_in_a_block(num_requests))
    inverse_WHNN = torch.empty((len(tiles_W2), num_heads, CHUNK, CHUNK), dtype=torch.float32, device=q_TKE.device)
    sizes: dict[str, Any] = {"NUM_HEADS": num_heads, "GROUP": group, "KEY_DIM": key_dim, "CHUNK": CHUNK}
    sizes["PRECISION"] = precision(q_TKE.dtype)
    block_e = max(16, next_power_of_2(key_dim))
    _invert_kernel[(len(tiles_W2), num_heads)](
        k_TKE, log_decay_TH, beta_TH, inverse_WHNN, tiles_W2, states.query_starts_B1, k_TKE.stride(0), num_heads,
        BLOCK_E=block_e, num_warps=4, **sizes,
    )  # fmt: skip
    _scan_kernel[(cdiv(value_dim, VALUES), num_heads, num_requests - first)](
        q_TKE, k_TKE, v_THF, log_decay_TH, beta_TH, inverse_WHNN, state_RHEF, out_THF, states.rows_B,
        states.query_starts_B1, first, q_TKE.stride(0), k_TKE.stride(0), v_THF.stride(0), num_heads,
        state_RHEF.stride(0), state_RHEF.stride(1), key_dim**-0.5,
        VALUE_DIM=value_dim, BLOCK_ROWS=rows_in_a_block(num_requests), BLOCK_E=block_e, BLOCK_F=VALUES,
        num_warps=8, num_stages=1, **sizes,
    )  # fmt: skip
