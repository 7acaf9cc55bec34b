"""Log-probabilities on a GPU in two launches: `core.worker.results.scores.scored` without its temporaries.

Legend: N rows, V vocabulary, P stretches of a row, K alternatives, X = 2 + 2K integers of a scored token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 4096
"""Tokens of one program."""


@triton.jit
def _of_stretch(logits, row_stride, stats, tops, ids, num_tokens, num_top, STRETCH: tl.constexpr):
    """The largest logit of a stretch, the sum of exponentials relative to it, and its `num_top` largest logits."""
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    columns = stretch * STRETCH + tl.arange(0, STRETCH)
    value = tl.load(logits + row * row_stride + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
    largest = tl.max(value)
    place = row * tl.num_programs(1) + stretch
    tl.store(stats + place * 2, largest)
    tl.store(stats + place * 2 + 1, tl.sum(tl.where(value == -float("inf"), 0.0, tl.exp(value - largest))))
    for rank in range(num_top):
        best = tl.max(value)
        winner = tl.min(tl.where(value == best, columns, 2147483647))
        tl.store(tops + place * num_top + rank, best)
        tl.store(ids + place * num_top + rank, winner)
        value = tl.where(columns == winner, -float("inf"), value)


@triton.jit
def _of_row(
    logits,
    row_stride,
    tokens,
    stats,
    tops,
    ids,
    out,
    num_stretches,
    num_top,
    STRETCHES: tl.constexpr,
    TOPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stretches = tl.arange(0, STRETCHES)
    at = stats + (row * num_stretches + stretches) * 2
    largest = tl.load(at, mask=stretches < num_stretches, other=-float("inf"))
    sums = tl.load(at + 1, mask=stretches < num_stretches, other=0.0)
    most = tl.max(largest)
    total = most + tl.log(tl.sum(tl.where(sums > 0, sums * tl.exp(largest - most), 0.0)))
    token = tl.load(tokens + row)
    out_row = out + row * (2 + 2 * num_top)
    tl.store(out_row, token)
    chosen = tl.load(logits + row * row_stride + tl.maximum(token, 0)).to(tl.float32) - total  # -1: NO_TOKEN
    tl.store(out_row + 1, chosen.to(tl.int32, bitcast=True).to(tl.int64))
    places = tl.arange(0, TOPS)
    is_here = places < num_stretches * num_top
    value = tl.load(tops + row * num_stretches * num_top + places, mask=is_here, other=-float("inf"))
    names = tl.load(ids + row * num_stretches * num_top + places, mask=is_here, other=2147483647)
    for rank in range(num_top):
        best = tl.max(value)
        winner = tl.min(tl.where(value == best, names, 2147483647))
        tl.store(out_row + 2 + rank, winner.to(tl.int64))
        tl.store(out_row + 2 + num_top + rank, (best - total).to(tl.int32, bitcast=True).to(tl.int64))
        is_taken = names == winner
        value = tl.where(is_taken, -float("inf"), value)
        names = tl.where(is_taken, 2147483647, names)


def score(logits_NV: Tensor, tokens_N: Tensor, num_logprobs: int) -> Tensor:
    """Tokens with their log-probabilities, and the most likely tokens with theirs: (N, X) int64.

    core/worker/results/scores.py has the layout.

    Shapes: logits_NV (N, V) with contiguous rows of any float dtype, tokens_N int64.
    Device: no host sync; safe inside a CUDA graph.
    """
    num_rows, num_tokens = logits_NV.shape
    device, num_stretches = logits_NV.device, triton.cdiv(num_tokens, STRETCH)
    stats = torch.empty(num_rows, num_stretches, 2, dtype=torch.float32, device=device)
    num_tops = num_stretches * num_logprobs
    tops = torch.empty(num_rows, max(1, num_tops), dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, max(1, num_tops), dtype=torch.int32, device=device)
    out_NX = torch.empty(num_rows, 2 + 2 * num_logprobs, dtype=torch.int64, device=device)
    row = (logits_NV, logits_NV.stride(0))
    partial = (stats, tops, ids)
    _of_stretch[(num_rows, num_stretches)](*row, *partial, num_tokens, num_logprobs, STRETCH=STRETCH, num_warps=8)
    _of_row[(num_rows,)](
        *row,
        tokens_N,
        *partial,
        out_NX,
        num_stretches,
        num_logprobs,
        STRETCHES=triton.next_power_of_2(num_stretches),
        TOPS=triton.next_power_of_2(max(1, num_tops)),
        num_warps=4,
    )
    return out_NX
