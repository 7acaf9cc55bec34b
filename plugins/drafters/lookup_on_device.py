"""The look-ups of lookup.py for many requests at once on the device: one Triton kernel on a GPU, plain torch elsewhere.

Of more than MOST_PLACES places where the newest tokens came before, the latest ones count.
Legend: R rows of requests, L tokens of a row, B rows to draft for, K drafts of each, P places.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PLACES = 16
"""Places whose continuations are counted, and most drafts."""
BLOCK = 1024
"""Places that a program of the kernel compares at a time."""


def look_up(
    tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int, *, matches: range, counts: bool
) -> Tensor:
    """Drafts (B, K) int64, as `Drafter.propose_on_device` returns them.

    matches: from the fewest to the most tokens that must be the same. counts: whether to draft the most frequent
    continuation of the places and to go on with the drafts themselves; else what followed at the latest place.
    """
    fewest, most = matches.start, matches.stop - 1
    compute = launch_look_up if tokens_RL.is_cuda else look_up_plainly
    return compute(tokens_RL, rows_B, lengths_B, num_drafts, fewest, most, counts=counts)


def launch_look_up(
    tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int, fewest: int, most: int, *, counts: bool
) -> Tensor:
    """`look_up` as one launch. fewest, most: tokens that must be the same."""
    drafts_BK = torch.empty((len(rows_B), num_drafts), dtype=torch.int64, device=rows_B.device)
    _look_up_kernel[(len(rows_B),)](
        tokens_RL, rows_B, lengths_B, drafts_BK, tokens_RL.stride(0), num_drafts,
        FEWEST=fewest, MOST=most, PLACES=MOST_PLACES if counts else 1, COUNTS=counts,
        DRAFTS=triton.next_power_of_2(max(MOST_PLACES, num_drafts)), BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return drafts_BK


def look_up_plainly(
    tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int, fewest: int, most: int, *, counts: bool
) -> Tensor:
    """`look_up` in plain torch."""
    tokens_BL, last_B1 = tokens_RL[rows_B], lengths_B.long().unsqueeze(1) - 1
    at_L = torch.arange(tokens_BL.shape[1], device=rows_B.device)
    is_same_BL, num_same_BL = at_L < last_B1, torch.zeros_like(tokens_BL)
    for back in range(most):
        newest_B1 = tokens_BL.gather(1, (last_B1 - back).clamp(min=0))
        is_same_BL = is_same_BL & (tokens_BL.roll(back, 1) == newest_B1) & (at_L >= back)
        num_same_BL += is_same_BL
    longest_B1 = num_same_BL.amax(1, keepdim=True)
    is_place_BL = (num_same_BL == longest_B1) & (longest_B1 >= fewest)
    num_places = min(MOST_PLACES if counts else 1, len(at_L))
    places_BP = torch.where(is_place_BL, at_L, -1).topk(num_places, dim=1).values
    is_left_BP = places_BP >= 0
    known_BL = torch.cat([tokens_BL, tokens_BL.new_zeros(len(rows_B), num_drafts)], dim=1).long()
    drafts, is_there_B = [], is_left_BP.any(1)
    for place in range(num_drafts):
        next_BP = places_BP + 1 + place
        if not counts:
            is_there_B = is_there_B & (next_BP[:, 0] <= last_B1[:, 0])
        next_BP = known_BL.gather(1, next_BP.clamp(max=known_BL.shape[1] - 1))
        is_equal_BPP = (next_BP.unsqueeze(2) == next_BP.unsqueeze(1)) & is_left_BP.unsqueeze(1)
        score_BP = torch.where(is_left_BP, is_equal_BPP.sum(2), -1)
        best_B1 = score_BP.max(1, keepdim=True).values == score_BP
        chosen_B1 = next_BP.gather(1, best_B1.int().argmax(1, keepdim=True))  # the first, which is the latest place
        is_left_BP = is_left_BP & (next_BP == chosen_B1)
        known_BL.scatter_(1, last_B1 + 1 + place, chosen_B1)
        drafts.append(torch.where(is_there_B, chosen_B1[:, 0], -1))
    return torch.stack(drafts, dim=1)


@triton.jit
def _num_same(base, place, inside, last, MOST: tl.constexpr):
    """For each place, how many tokens that end there are the newest ones, up to MOST."""
    is_same = inside
    count = tl.zeros_like(place)
    for back in tl.static_range(MOST):
        newest = tl.load(base + last - back, mask=last >= back, other=-1)
        found = tl.load(base + place - back, mask=inside & (place >= back), other=-2)
        is_same = is_same & (found == newest)
        count += is_same.to(tl.int32)
    return count


@triton.jit(do_not_specialize=["stride", "num_drafts"])
def _look_up_kernel(
    tokens_ptr, rows_ptr, lengths_ptr, drafts_ptr, stride, num_drafts,
    FEWEST: tl.constexpr, MOST: tl.constexpr, PLACES: tl.constexpr, COUNTS: tl.constexpr, DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    base = tokens_ptr + tl.load(rows_ptr + at) * stride
    length = tl.load(lengths_ptr + at)
    last = length - 1
    offset = tl.arange(0, BLOCK)
    longest = 0
    for first in range(0, last, BLOCK):
        place = first + offset
        longest = tl.maximum(longest, tl.max(_num_same(base, place, place < last, last, MOST)))
    slot = tl.arange(0, PLACES)
    places = tl.full((PLACES,), -1, tl.int32)
    count = 0
    first = (last - 1) // BLOCK * BLOCK
    if longest < FEWEST:
        first = -1
    while first >= 0:
        place = first + offset
        is_place = _num_same(base, place, place < last, last, MOST) == longest
        num_here = tl.minimum(tl.sum(is_place.to(tl.int32)), PLACES - count)
        before = first + BLOCK
        for _ in range(0, num_here):
            before = tl.max(tl.where(is_place & (place < before), place, -1))
            places = tl.where(slot == count, before, places)
            count += 1
        first = tl.where(count == PLACES, -1, first - BLOCK)
    is_left = places >= 0
    number = tl.arange(0, DRAFTS)
    drafts = tl.full((DRAFTS,), -1, tl.int32)
    is_there = count > 0
    for at_draft in range(0, num_drafts):
        next_place = places + 1 + at_draft
        token = tl.load(base + next_place, mask=is_left & (next_place < length), other=-1)
        if COUNTS:  # a continuation that reaches the newest token goes on with the drafts
            is_draft = (next_place - length)[:, None] == number[None, :]
            drafted = tl.sum(tl.where(is_draft, drafts[None, :], 0), axis=1)
            token = tl.where(next_place < length, token, drafted)
            is_equal = (token[:, None] == token[None, :]) & is_left[None, :]
            score = tl.where(is_left, tl.sum(is_equal.to(tl.int32), axis=1) * PLACES + PLACES - 1 - slot, -1)
            chosen = tl.max(tl.where(score == tl.max(score), token, -1))
            is_left = is_left & (token == chosen)
        else:
            chosen = tl.max(token)
        drafts = tl.where(number == at_draft, tl.where(is_there, chosen, -1), drafts)
    tl.store(drafts_ptr + at * num_drafts + number, drafts.to(tl.int64), mask=number < num_drafts)
