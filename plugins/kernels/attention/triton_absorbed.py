"""Products of heads with their own matrices around attention over latents, and what is done to its inputs on the way.

Of few tokens, a program reads its part of a matrix before it waits for the launch before it (programmatic dependent
launch). Of one token, it multiplies and adds where the matrix lies in registers: a matrix instruction would take it
from others, behind the wait.
Legend: T tokens, H heads, P numbers of a query that are not rotated, R rotated ones, C = P + R, L latent, E = R + L,
I input and O output features of a head.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from hookline.plugins.kernels.attention.triton_latent import wait_for_launch_before
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, next_power_of_2, triggers_late

FEW_TOKENS = 16
"""Tokens of a program up to which it is the weights that take time to read; the least that a product takes."""
MANY_TOKENS = 128
"""Tokens above which a program of `latent_queries_keys` has a wider part of a matrix, as tokens alone fill the card."""
CHUNK = 128
"""Input features of a step of `heads_linear`."""


@triton.jit
def _halves(index, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the numbers are that become the first half and then the second half of the rotated ones."""
    if INTERLEAVED:
        return tl.where(index < ROTARY // 2, 2 * index, 2 * index - ROTARY + 1)
    return index


@triton.jit(do_not_specialize=["num_tokens"])
def _latent_queries_keys_kernel(
    q_ptr, latent_ptr, weight_ptr, norm_ptr, out_ptr, q_stride, latent_stride, weight_head, weight_row, weight_column,
    num_tokens, eps,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTARY: tl.constexpr, LATENT: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, WHOLE_L: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """The first programs have a block of a head's latents each, of BLOCK_T tokens; each other one KEYS tokens' keys."""
    BLOCKS: tl.constexpr = (LATENT + BLOCK_L - 1) // BLOCK_L
    HEAD_DIM: tl.constexpr = ROTARY + LATENT
    if PDL and not LATE:
        gdc_launch_dependents()
    part = tl.program_id(0)
    rotated = tl.arange(0, BLOCK_R)
    source = _halves(rotated, ROTARY, INTERLEAVED)
    if part < NUM_HEADS * BLOCKS:
        head = part // BLOCKS
        first = part % BLOCKS * BLOCK_L
        plain, latent = tl.arange(0, BLOCK_P), first + tl.arange(0, BLOCK_L)
        weight_at = weight_ptr + head.to(tl.int64) * weight_head
        weight_at += plain[:, None] * weight_row + latent[None, :] * weight_column
        weight = tl.load(weight_at, mask=(plain < PLAIN)[:, None] & (latent < LATENT)[None, :], other=0.0)
        wait_for_launch_before(PDL, LATE)
        token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
        tokens, at = (token < num_tokens)[:, None], token.to(tl.int64)[:, None]
        from_q = q_ptr + at * q_stride + head * (PLAIN + ROTARY)
        to_out = out_ptr + (at * (NUM_HEADS + 1) + head) * HEAD_DIM
        if BLOCK_T == 1:
            of_plain = tl.trans(tokens) & (plain < PLAIN)[:, None]
            x_P1 = tl.load(tl.trans(from_q) + plain[:, None], mask=of_plain, other=0.0)
            y = tl.sum(x_P1.to(tl.float32) * weight.to(tl.float32), axis=0)[None, :]
        else:
            x = tl.load(from_q + plain[None, :], mask=tokens & (plain < PLAIN)[None, :], other=0.0)
            y = tl.dot(x, weight, input_precision="ieee")
        of_latent = tokens & (latent < LATENT)[None, :]
        tl.store(to_out + ROTARY + latent[None, :], y.to(out_ptr.dtype.element_ty), mask=of_latent)
        if first == 0:
            mask = tokens & (rotated < ROTARY)[None, :]
            numbers = tl.load(from_q + PLAIN + source[None, :], mask=mask, other=0.0)
            tl.store(to_out + rotated[None, :], numbers, mask=mask)
    else:
        whole = tl.arange(0, WHOLE_L)
        wholes, rotates = (whole < LATENT)[None, :], (rotated < ROTARY)[None, :]
        norm = tl.load(norm_ptr + whole, mask=whole < LATENT, other=0.0).to(tl.float32)[None, :]
        wait_for_launch_before(PDL, LATE)
        row = tl.program_id(1) * BLOCK_T + (part - NUM_HEADS * BLOCKS) * KEYS + tl.arange(0, KEYS)
        rows, at_key = (row < num_tokens)[:, None], row.to(tl.int64)[:, None]
        from_latent = latent_ptr + at_key * latent_stride
        to_key = out_ptr + (at_key * (NUM_HEADS + 1) + NUM_HEADS) * HEAD_DIM
        given = tl.load(from_latent + whole[None, :], mask=rows & wholes, other=0.0).to(tl.float32)
        normed = given * tl.rsqrt(tl.sum(given * given, axis=1) / LATENT + eps)[:, None] * norm
        tl.store(to_key + ROTARY + whole[None, :], normed.to(out_ptr.dtype.element_ty), mask=rows & wholes)
        numbers = tl.load(from_latent + LATENT + source[None, :], mask=rows & rotates, other=0.0)
        tl.store(to_key + rotated[None, :], numbers, mask=rows & rotates)


def latent_queries_keys(
    q_THC: Tensor, latent_TE: Tensor, keys_HPL: Tensor, norm_weight_L: Tensor, eps: float, interleaved: bool
) -> Tensor:
    """See Kernels.latent_queries_keys. Device: one launch, no host sync. The matrices are read before its wait."""
    num_tokens, (num_heads, plain, latent) = len(q_THC), keys_HPL.shape
    rotary = q_THC.shape[2] - plain
    assert q_THC.stride(2) == latent_TE.stride(1) == 1 and q_THC.stride(1) == q_THC.shape[2]
    qk_TC = torch.empty((num_tokens, (num_heads + 1) * (rotary + latent)), dtype=q_THC.dtype, device=q_THC.device)
    block_p, is_wide = max(16, next_power_of_2(plain)), q_THC.element_size() > 2
    block_t = 1 if num_tokens == 1 else FEW_TOKENS if num_tokens <= FEW_TOKENS or is_wide else 64
    is_many = num_tokens > MANY_TOKENS and not is_wide
    block_l = min(max(16, next_power_of_2(latent)), 256 if is_many else 32 if is_wide else 64)
    keys = 1 if num_tokens <= FEW_TOKENS else 8
    num_parts = num_heads * cdiv(latent, block_l) + cdiv(min(block_t, num_tokens), keys)
    if num_tokens:
        _latent_queries_keys_kernel[(num_parts, cdiv(num_tokens, block_t))](
            q_THC, latent_TE, keys_HPL, norm_weight_L, qk_TC, q_THC.stride(0), latent_TE.stride(0),
            *keys_HPL.stride(), num_tokens, eps,
            NUM_HEADS=num_heads, PLAIN=plain, ROTARY=rotary, LATENT=latent, INTERLEAVED=interleaved,
            BLOCK_T=block_t, BLOCK_P=block_p, BLOCK_L=block_l, BLOCK_R=max(2, next_power_of_2(rotary)),
            WHOLE_L=next_power_of_2(latent), KEYS=keys, num_warps=8 if is_many else 4, LATE=triggers_late(num_tokens),
            **launch_options(q_THC.device),
        )  # fmt: skip
    return qk_TC


@triton.jit(do_not_specialize=["num_tokens"])
def _heads_linear_kernel(
    x_ptr, weight_ptr, out_ptr, token_stride, head_stride, weight_head, weight_row, weight_column, num_tokens,
    NUM_HEADS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    if PDL and not LATE:
        gdc_launch_dependents()
    head = tl.program_id(1)
    column, out = tl.arange(0, BLOCK_I), tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    outs = (out < OUTPUTS)[None, :]
    weight_at = weight_ptr + head.to(tl.int64) * weight_head
    weight_at += column[:, None] * weight_column + out[None, :] * weight_row
    weights = ()
    if AHEAD:
        for chunk in tl.static_range(CHUNKS):
            inside = outs & (chunk * BLOCK_I + column < INPUTS)[:, None]
            weight = tl.load(weight_at + chunk * BLOCK_I * weight_column, mask=inside, other=0.0)
            weights = weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
    wait_for_launch_before(PDL, LATE)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    tokens, at = (token < num_tokens)[:, None], token.to(tl.int64)[:, None]
    from_x = x_ptr + at * token_stride + head * head_stride + column[None, :]
    if BLOCK_T == 1:
        sums = tl.zeros([BLOCK_I, BLOCK_O], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            inside = tl.trans(tokens) & (chunk * BLOCK_I + column < INPUTS)[:, None]
            x_I1 = tl.load(tl.trans(from_x) + chunk * BLOCK_I, mask=inside, other=0.0)
            sums += x_I1.to(tl.float32) * weights[chunk].to(tl.float32)
        y = tl.sum(sums, axis=0)[None, :]
    elif AHEAD:
        y = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            x = tl.load(from_x + chunk * BLOCK_I, mask=tokens & (chunk * BLOCK_I + column < INPUTS)[None, :], other=0.0)
            y = tl.dot(x, weights[chunk], y, input_precision="ieee")
    else:
        y = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
        for start in range(0, INPUTS, BLOCK_I):
            inside = start + column < INPUTS
            x = tl.load(from_x + start, mask=tokens & inside[None, :], other=0.0)
            weight = tl.load(weight_at + start * weight_column, mask=outs & inside[:, None], other=0.0)
            y = tl.dot(x, weight, y, input_precision="ieee")
    to_out = out_ptr + (at * NUM_HEADS + head) * OUTPUTS + out[None, :]
    tl.store(to_out, y.to(out_ptr.dtype.element_ty), mask=tokens & outs)


def heads_linear(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """See Kernels.heads_linear. Device: one launch, no host sync. Few tokens' matrices are read before its wait."""
    (num_tokens, num_heads, inputs), outputs = x_THI.shape, weight_HOI.shape[1]
    assert x_THI.stride(2) == 1
    out_TC = torch.empty((num_tokens, num_heads * outputs), dtype=x_THI.dtype, device=x_THI.device)
    is_few, is_wide = num_tokens <= FEW_TOKENS, x_THI.element_size() > 2
    block_i = min(max(16, next_power_of_2(inputs)), CHUNK // 2 if is_wide or not is_few else CHUNK)
    block_o = min(max(16, next_power_of_2(outputs)), 16 if is_few else 32 if is_wide else 128)
    block_t, chunks = FEW_TOKENS if is_few else 32 if is_wide else 64, cdiv(inputs, block_i)
    is_ahead = is_few and chunks <= 8
    if is_ahead and num_tokens == 1:
        block_t = 1
    if num_tokens:
        _heads_linear_kernel[(cdiv(outputs, block_o), num_heads, cdiv(num_tokens, block_t))](
            x_THI, weight_HOI, out_TC, x_THI.stride(0), x_THI.stride(1), *weight_HOI.stride(), num_tokens,
            NUM_HEADS=num_heads, INPUTS=inputs, OUTPUTS=outputs, CHUNKS=chunks, AHEAD=is_ahead,
            BLOCK_T=block_t, BLOCK_O=block_o, BLOCK_I=block_i, num_warps=4, num_stages=3,
            LATE=triggers_late(num_tokens), **launch_options(x_THI.device),
        )  # fmt: skip
    return out_TC
