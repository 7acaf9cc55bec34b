"""Gumbel-max sampling in one pass over the vocabulary on a GPU: the same draws as `gumbel.py`, without its temporaries.

A program takes a stretch of one row's vocabulary: scales, adds noise, keeps the best. Knows nothing of requests.
Legend: N rows, V vocabulary (or one rank's shard of it), P stretches of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 4096
"""Tokens of one program."""


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _row_key(seed, position, salt):
    x = _mix((seed & 0xFFFFFFFF).to(tl.uint32) ^ salt)
    x = _mix(x ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return _mix(x ^ (position & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def _log_exponential(tokens, first_key, second_key):
    """log of a standard exponential variate per token; see gumbel.random_bits for the mix."""
    x = tokens.to(tl.uint32) ^ first_key
    x = (x ^ (x >> 16)) * 0x7FEB352D + second_key
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    w = tl.minimum((x.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    # log1p: near 0 the series is exact to float32, elsewhere 1 - w loses nothing that matters.
    return tl.log(tl.where(w < 1e-3, w * (1.0 + w * (0.5 + w * 0.3333333333)), -tl.log(1.0 - w)))


@triton.jit
def _best_of_stretch(
    logits,
    row_stride,
    temperatures,
    seeds,
    positions,
    scores,
    winners,
    num_tokens,
    num_stretches,
    first_token,
    GREEDY: tl.constexpr,
    STRETCH: tl.constexpr,
):
    row = tl.program_id(0)
    stretch = tl.program_id(1)
    columns = stretch * STRETCH + tl.arange(0, STRETCH)
    is_token = columns < num_tokens
    score = tl.load(logits + row.to(tl.int64) * row_stride + columns, mask=is_token, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if not GREEDY:
        if temperature > 0:
            salt_one = tl.full((), 0x2545F491, tl.uint32)
            salt_two = tl.full((), 0x5851F42D, tl.uint32)
            seed = tl.load(seeds + row)
            position = tl.load(positions + row)
            first_key = _row_key(seed, position, salt_one)
            second_key = _row_key(seed, position, salt_two)
            noise = _log_exponential(columns + first_token, first_key, second_key)
            score = score / tl.maximum(temperature, 1e-30) - noise
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, columns, num_tokens - 1), axis=0)
    tl.store(scores + row * num_stretches + stretch, best)
    tl.store(winners + row * num_stretches + stretch, winner.to(tl.int64) + first_token)


def best_tokens(
    logits_NV: Tensor,
    temperature_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
    first_token: int,
    greedy: bool,
) -> tuple[Tensor, Tensor]:
    """(score, token id) of the winner of each row.

    Shapes: logits_NV (N, V) with contiguous rows, the rest (N,); returns scores_N float32, tokens_N int64.
    Device: no host sync; safe inside a CUDA graph.
    """
    num_rows, num_tokens = logits_NV.shape
    num_stretches = triton.cdiv(num_tokens, STRETCH)
    scores_NP = torch.empty(num_rows, num_stretches, dtype=torch.float32, device=logits_NV.device)
    winners_NP = torch.empty(num_rows, num_stretches, dtype=torch.int64, device=logits_NV.device)
    _best_of_stretch[(num_rows, num_stretches)](
        logits_NV,
        logits_NV.stride(0),
        temperature_N,
        seed_N,
        position_N,
        scores_NP,
        winners_NP,
        num_tokens,
        num_stretches,
        first_token,
        GREEDY=greedy,
        STRETCH=STRETCH,
        num_warps=8,
    )
    scores_N1, best_N1 = scores_NP.max(dim=1, keepdim=True)
    return scores_N1.squeeze(1), winners_NP.gather(1, best_N1).squeeze(1)
