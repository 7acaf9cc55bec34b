"""Gumbel-max sampling in one pass over the vocabulary on a GPU: the same draws as `gumbel.py`, without its temporaries.

A program takes a stretch of one row's vocabulary. Two logarithms a token would take longer than reading the logits, so
it bounds every token's noise from the exponent and mantissa of the random number, computes the noise of the few tokens
with the highest bounds, and the noise of all tokens only if these few do not decide the draw.
Legend: N rows, V vocabulary (or one rank's shard of it), P stretches of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 4096
"""Tokens of one program."""
LANE = 8
"""Tokens of a lane, in which only the token with the highest bound has its noise computed."""
WARPS = 4
PIECE = 512
"""Tokens that are checked for NaN at a time, in a row without a winner."""


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
def _random(tokens, first_key, second_key):
    """A float32 in (0, 2^31] per token; see gumbel.random_bits for the mix."""
    x = tokens.to(tl.uint32) ^ first_key
    x = (x ^ (x >> 16)) * 0x7FEB352D + second_key
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    return x.to(tl.int32, bitcast=True).to(tl.float32) + 0.5


@triton.jit
def _gumbel(random):
    """Standard Gumbel noise: minus the logarithm of a standard exponential variate."""
    w = tl.minimum(random * 4.656612873077393e-10, 0.9999999403953552)
    # log1p: near 0 the series is exact to float32, elsewhere 1 - w loses nothing that matters.
    return -tl.log(tl.where(w < 1e-3, w * (1.0 + w * (0.5 + w * 0.3333333333)), -tl.log(1.0 - w)))


@triton.jit
def _gumbel_bound(random):
    """At least `_gumbel(random)`, and close to it where that is large, without a logarithm.

    -log(-log1p(-w)) <= -log(w), and a float's bits as an integer are a lower bound of its logarithm: exact at powers of
    two and linear in between. 1e-4 covers every rounding.
    """
    bits = random.to(tl.int32, bitcast=True).to(tl.float32)
    return 109.51725 + 1e-4 - bits * 8.262958405176314e-08


@triton.jit
def _best(score, columns, num_tokens):
    """The best score and the first column that has it."""
    best = tl.max(tl.max(score, axis=1), axis=0)
    return best, tl.min(tl.min(tl.where(score == best, columns, num_tokens - 1), axis=1), axis=0)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _best_of_stretch(
    logits, row_stride, temperatures, seeds, positions, scores, winners, num_tokens, num_stretches, first_token,
    GREEDY: tl.constexpr, STRETCH: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    stretch = tl.program_id(1)
    within = tl.arange(0, LANE)[None, :]
    lane_columns = stretch * STRETCH + tl.arange(0, STRETCH // LANE) * LANE
    columns = lane_columns[:, None] + within
    row_ptr = logits + row.to(tl.int64) * row_stride
    score = tl.load(row_ptr + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
    temperature = 0.0
    if not GREEDY:
        temperature = tl.load(temperatures + row)
    if temperature > 0:
        coldness = 1.0 / tl.maximum(temperature, 1e-30)
        salt_one = tl.full((), 0x2545F491, tl.uint32)
        salt_two = tl.full((), 0x5851F42D, tl.uint32)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        first_key = _row_key(seed, position, salt_one)
        second_key = _row_key(seed, position, salt_two)
        bound = score * coldness + _gumbel_bound(_random(columns + first_token, first_key, second_key))
        top_bound = tl.max(bound, axis=1)
        top = tl.min(tl.where(bound == top_bound[:, None], within, LANE - 1), axis=1)
        runner_up = tl.max(tl.max(tl.where(within == top[:, None], -float("inf"), bound), axis=1), axis=0)
        # Loaded and drawn again: kept, they would take registers from the programs beside this one.
        top_column = lane_columns + top
        top_score = tl.load(row_ptr + top_column, mask=top_column < num_tokens, other=-float("inf")).to(tl.float32)
        top_score = top_score * coldness + _gumbel(_random(top_column + first_token, first_key, second_key))
        best = tl.max(top_score, axis=0)
        winner = tl.min(tl.where(top_score == best, top_column, num_tokens - 1), axis=0)
        # A stretch that a grammar forbids as a whole is settled: all of it is -inf, with any noise.
        if (runner_up >= best) & (runner_up > -float("inf")):
            score = tl.load(row_ptr + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
            score = score * coldness + _gumbel(_random(columns + first_token, first_key, second_key))
            best, winner = _best(score, columns, num_tokens)
    else:
        best, winner = _best(score, columns, num_tokens)
    tl.store(scores + row * num_stretches + stretch, best)
    tl.store(winners + row * num_stretches + stretch, winner + first_token)


@triton.jit
def _best_of_row(
    logits, row_stride, scores, winners, best_scores, tokens, num_tokens, num_stretches,
    BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The best of a row's stretches; NaN and NO_TOKEN if nothing in the row is above -inf and something is NaN."""
    row = tl.program_id(0)
    stretch = tl.arange(0, BLOCK)
    is_stretch = stretch < num_stretches
    score = tl.load(scores + row * num_stretches + stretch, mask=is_stretch, other=-float("inf"))
    winner = tl.load(winners + row * num_stretches + stretch, mask=is_stretch, other=2147483647)
    best = tl.max(score, axis=0)
    first = tl.min(tl.where((score == best) & is_stretch, winner, 2147483647), axis=0)
    token = tl.where(first == 2147483647, tl.min(winner, axis=0), first).to(tl.int64)
    # The largest of NaN and -inf is -inf: only a row without a winner is looked at again, so others pay nothing.
    if (best != best) | (best == -float("inf")):
        num_nan = tl.full((), 0, tl.int32)
        for start in range(0, num_tokens, PIECE):
            columns = start + tl.arange(0, PIECE)
            at = logits + row.to(tl.int64) * row_stride + columns
            value = tl.load(at, mask=columns < num_tokens, other=0.0).to(tl.float32)
            num_nan += tl.sum((value != value).to(tl.int32), axis=0)
        best = tl.where(num_nan > 0, float("nan"), best)
        token = tl.where(num_nan > 0, -1, token)
    tl.store(best_scores + row, best)
    tl.store(tokens + row, token)


def best_tokens(
    logits_NV: Tensor,
    temperature_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
    first_token: int,
    greedy: bool,
) -> tuple[Tensor, Tensor]:
    """(score, token id) of the winner of each row; of equals the first. NaN and NO_TOKEN for a row of NaN.

    Shapes: logits_NV (N, V) with contiguous rows, the rest (N,); returns scores_N float32, tokens_N int64.
    Device: two launches, no host sync; safe inside a CUDA graph.
    """
    num_rows, num_tokens = logits_NV.shape
    num_stretches = triton.cdiv(num_tokens, STRETCH)
    device = logits_NV.device
    scores_NP = torch.empty(num_rows, num_stretches, dtype=torch.float32, device=device)
    winners_NP = torch.empty(num_rows, num_stretches, dtype=torch.int32, device=device)
    scores_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    tokens_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    _best_of_stretch[(num_rows, num_stretches)](
        logits_NV, logits_NV.stride(0), temperature_N, seed_N, position_N, scores_NP, winners_NP,
        num_tokens, num_stretches, first_token,
        GREEDY=greedy, STRETCH=STRETCH, LANE=LANE, num_warps=WARPS,
    )  # fmt: skip
    _best_of_row[(num_rows,)](
        logits_NV, logits_NV.stride(0), scores_NP, winners_NP, scores_N, tokens_N, num_tokens, num_stretches,
        BLOCK=triton.next_power_of_2(num_stretches), PIECE=PIECE, num_warps=1,
    )  # fmt: skip
    return scores_N, tokens_N
