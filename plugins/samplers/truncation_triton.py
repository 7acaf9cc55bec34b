"""top_k, top_p and min_p on a GPU without sorting the vocabulary: one threshold a row, found among few candidates.

The largest logits of groups of 256 tokens bound the k-th largest logit of the row from below, and the row's largest
logit bounds the logits that top_p can keep. Logits that reach the bound are gathered as candidates, and one program a
row finds the threshold among them by bisection. In a row with too many candidates, all tokens' weights are summed by
the first bits of the distance from their keys to the largest key, then the weights of one such part by the next bits,
and so on: three passes of many programs. Such a row with a top_k is read as a whole by one program, once per bit. Sums
are of whole numbers, so their order does not matter: a row's result depends on that row alone, and is always the same.
Legend: N rows, V vocabulary, C candidates of a row, G groups of a row, X sums of a row. Keys are float32 bits turned so
that they order as the floats do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 4096
"""Tokens of one program."""
GROUPS = 16
"""Groups of one program's tokens."""
NUM_CANDIDATES = 2048
"""Most candidates of a row that are kept."""
NUM_PARTS = tl.constexpr(2048)
"""Parts into which a pass divides distances, each with a sum of weights."""
BITS = tl.constexpr(11)
"""Bits of a distance, which has 32, that a pass looks at."""
NUM_PASSES = tl.constexpr(3)
BLOCK = 8192
"""Tokens that a program reads at a time where it reads a whole row."""
OF_ROWS = ("temperatures", "top_ks", "top_ps", "min_ps", "largest", "bounds", "totals", "num_found", "thresholds")
"""Arguments with one number a row, whose alignment depends on the number of rows: kernels need no variant for that."""
LOWEST = tl.constexpr(-2147483648)
"""A key that every token reaches."""


@triton.jit
def _scaled(logits, temperature):
    """The softmax's input, logits over temperature; 0 has one sign, so that keys order as floats do."""
    value = logits / tl.where(temperature > 0, tl.maximum(temperature, 1e-30), 1.0)
    return tl.where(value == 0, 0.0, value)


@triton.jit
def _key(value):
    """int32 that orders as the float does."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The float of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _weight(value, largest):
    """A token's probability, up to a factor, as a whole number: the most likely one has 2^40."""
    return (tl.exp(value - largest) * 1099511627776.0).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _survey(
    logits,
    row_stride,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    groups,
    num_tokens,
    STRETCH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The largest key of each group."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row)
    if ((top_k > 0) & (top_k < num_tokens)) | (tl.load(top_ps + row) < 1) | (tl.load(min_ps + row) > 0):
        stretch = tl.program_id(1)
        columns = stretch * STRETCH + tl.arange(0, STRETCH)
        value = tl.load(logits + row * row_stride + columns, mask=columns < num_tokens, other=-float("inf"))
        key = _key(_scaled(value, tl.load(temperatures + row)))
        best = tl.max(tl.reshape(key, (GROUPS, STRETCH // GROUPS)), axis=1)
        tl.store(groups + (row * tl.num_programs(1) + stretch) * GROUPS + tl.arange(0, GROUPS), best)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _bound(
    top_ks,
    top_ps,
    min_ps,
    groups,
    largest,
    bounds,
    totals,
    num_found,
    sums,
    num_tokens,
    num_groups,
    ALL_GROUPS: tl.constexpr,
):
    """The least key of candidates, and the row's largest key; sets the row's sums to zero."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    has_top_k = (top_k > 0) & (top_k < num_tokens)
    if has_top_k | (top_p < 1) | (tl.load(min_ps + row) > 0):
        places = tl.arange(0, ALL_GROUPS)
        keys = tl.load(groups + row * num_groups + places, mask=places < num_groups, other=LOWEST)
        best = tl.max(keys).to(tl.int64)
        low = tl.full((), LOWEST, tl.int64)
        if has_top_k & (top_k <= num_groups):
            # The greatest key that k groups reach: so do at least k tokens.
            high = best + 1
            while high - low > 1:
                middle = (low + high) >> 1
                is_reached = tl.sum((keys >= middle).to(tl.int32)) >= top_k
                high = tl.where(is_reached, high, middle)
                low = tl.where(is_reached, middle, low)
        elif top_p < 1:
            # All tokens below this together weigh less than the weight that top_p may leave out.
            value = _value(best.to(tl.int32)) - tl.log(num_tokens / tl.maximum(1 - top_p, 1e-7)) - 1e-2
            low = _key(value).to(tl.int64)
        tl.store(largest + row, best)
        tl.store(bounds + row, low)
        tl.store(totals + row, 0)
        tl.store(num_found + row, 0)
        if (top_p < 1) & (top_k <= 0):
            for part in tl.static_range(NUM_PASSES):
                at = sums + (row * NUM_PASSES + part) * NUM_PARTS + tl.arange(0, NUM_PARTS)
                tl.store(at, tl.zeros((NUM_PARTS,), tl.int64))


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _gather(
    logits,
    row_stride,
    temperatures,
    top_ks,
    top_ps,
    largest,
    bounds,
    totals,
    num_found,
    candidates,
    num_tokens,
    num_groups,
    NUM_CANDIDATES: tl.constexpr,
    STRETCH: tl.constexpr,
):
    """Gather what reaches the bound; without top_k also sum the weights of all tokens."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row)
    has_top_k = (top_k > 0) & (top_k < num_tokens)
    if (has_top_k & (top_k <= num_groups)) | ((tl.load(top_ps + row) < 1) & (top_k <= num_groups)):
        columns = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
        is_token = columns < num_tokens
        value = tl.load(logits + row * row_stride + columns, mask=is_token, other=-float("inf"))
        value = _scaled(value, tl.load(temperatures + row))
        if not has_top_k:
            weight = _weight(value, _value(tl.load(largest + row).to(tl.int32)))
            tl.atomic_add(totals + row, tl.sum(weight), sem="relaxed")
        is_candidate = is_token & (_key(value) >= tl.load(bounds + row))
        count = tl.sum(is_candidate.to(tl.int32))
        if count > 0:
            first = tl.atomic_add(num_found + row, count.to(tl.int64), sem="relaxed")
            place = first + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            tl.store(candidates + row * NUM_CANDIDATES + place, value, mask=is_candidate & (place < NUM_CANDIDATES))


@triton.jit
def _distance(row_sums, wanted, NUM_DONE: tl.constexpr, BITS: tl.constexpr):
    """The distance below the largest key at which the sum of weights reaches `wanted`; bits of later passes are 0."""
    distance = tl.full((), 0, tl.int64)
    above = tl.full((), 0, tl.int64)
    for done in tl.static_range(NUM_DONE):
        sums = above + tl.cumsum(tl.load(row_sums + done * NUM_PARTS + tl.arange(0, NUM_PARTS)), 0)
        is_before = sums.to(tl.float64) < wanted
        part = tl.minimum(tl.sum(is_before.to(tl.int64)), NUM_PARTS - 1)
        above = tl.maximum(above, tl.max(tl.where(is_before, sums, 0)))
        distance += part << BITS * (NUM_PASSES - 1 - done)
    return distance


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _sum_parts(
    logits,
    row_stride,
    temperatures,
    top_ks,
    top_ps,
    largest,
    totals,
    num_found,
    sums,
    num_tokens,
    NUM_DONE: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    STRETCH: tl.constexpr,
):
    """A pass over a row with too many candidates and no top_k: sum weights by the next bits of the keys' distances."""
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_ps + row)
    if (top_p < 1) & (tl.load(top_ks + row) <= 0):
        if tl.load(num_found + row) > NUM_CANDIDATES:
            row_sums = sums + row * NUM_PASSES * NUM_PARTS
            best = tl.load(largest + row)
            reached = _distance(row_sums, tl.load(totals + row).to(tl.float64) * top_p, NUM_DONE, BITS)
            columns = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
            value = tl.load(logits + row * row_stride + columns, mask=columns < num_tokens, other=-float("inf"))
            value = _scaled(value, tl.load(temperatures + row))
            weight = _weight(value, _value(best.to(tl.int32)))
            distance = tl.maximum(best - _key(value), 0)
            num_left = BITS * (NUM_PASSES - NUM_DONE)
            is_in = (weight > 0) & ((distance >> num_left) == (reached >> num_left))
            part = (distance >> num_left - BITS) & (NUM_PARTS - 1)
            tl.atomic_add(row_sums + NUM_DONE * NUM_PARTS + part, weight, mask=is_in, sem="relaxed")


@triton.jit
def _sum_of_row(row_logits, temperature, above, kth, largest, num_tokens, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The number of a whole row's tokens with keys above `above`, or the weight of such tokens that reach `kth`."""
    total = tl.full((BLOCK,), 0, tl.int64)
    for first in range(0, num_tokens, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        is_token = columns < num_tokens
        value = _scaled(tl.load(row_logits + columns, mask=is_token, other=-float("inf")), temperature)
        key = _key(value)
        if IS_COUNT:
            total += (is_token & (key > above)).to(tl.int64)
        else:
            total += tl.where((key > above) & (key >= kth), _weight(value, largest), 0)
    return tl.sum(total)


@triton.jit
def _threshold_of_row(row_logits, temperature, top_k, top_p, has_top_k, best, num_tokens, BLOCK: tl.constexpr):
    """The smallest key that top_k and top_p keep, by reading the whole row for each bit."""
    largest = _value(best.to(tl.int32))
    kth = tl.full((), LOWEST, tl.int64)
    if has_top_k:
        high = best + 1
        while high - kth > 1:
            middle = (kth + high) >> 1
            count = _sum_of_row(row_logits, temperature, middle - 1, middle, largest, num_tokens, True, BLOCK)
            high = tl.where(count >= top_k, high, middle)
            kth = tl.where(count >= top_k, middle, kth)
    threshold = kth
    if top_p < 1:
        total = _sum_of_row(row_logits, temperature, kth - 1, kth, largest, num_tokens, False, BLOCK)
        wanted = total.to(tl.float64) * top_p
        low = kth - 1
        threshold = best
        while threshold - low > 1:
            middle = (low + threshold) >> 1
            mass = _sum_of_row(row_logits, temperature, middle, kth, largest, num_tokens, False, BLOCK)
            is_enough = mass.to(tl.float64) < wanted
            threshold = tl.where(is_enough, middle, threshold)
            low = tl.where(is_enough, low, middle)
    return threshold


@triton.jit
def _threshold_of_candidates(value, is_here, top_k, top_p, has_top_k, best, bound, total):
    """The smallest key that top_k and top_p keep, by candidates alone; total: weight of all tokens, without top_k."""
    keys = tl.where(is_here, _key(value), LOWEST)
    kth = bound
    if has_top_k:
        high = best + 1
        while high - kth > 1:
            middle = (kth + high) >> 1
            is_reached = tl.sum((keys >= middle).to(tl.int32)) >= top_k
            high = tl.where(is_reached, high, middle)
            kth = tl.where(is_reached, middle, kth)
    threshold = tl.full((), LOWEST, tl.int64)
    if has_top_k:
        threshold = kth
    if top_p < 1:
        weights = tl.where(is_here & (keys >= kth), _weight(value, _value(best.to(tl.int32))), 0)
        if has_top_k:
            total = tl.sum(weights)
        wanted = total.to(tl.float64) * top_p
        # The smallest key with less than this above it: tokens from it on are needed to reach top_p.
        low = kth - 1
        threshold = best
        while threshold - low > 1:
            middle = (low + threshold) >> 1
            is_enough = tl.sum(tl.where(keys > middle, weights, 0)).to(tl.float64) < wanted
            threshold = tl.where(is_enough, middle, threshold)
            low = tl.where(is_enough, low, middle)
    return threshold


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _find(
    logits,
    row_stride,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    largest,
    bounds,
    totals,
    num_found,
    candidates,
    sums,
    thresholds,
    num_tokens,
    num_groups,
    NUM_CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest key that a row keeps."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    has_top_k = (top_k > 0) & (top_k < num_tokens)
    threshold = tl.full((), LOWEST, tl.int64)
    if has_top_k | (top_p < 1):
        best = tl.load(largest + row)
        found = tl.load(num_found + row)
        if (top_k <= num_groups) & (found <= NUM_CANDIDATES):
            places = tl.arange(0, NUM_CANDIDATES)
            is_here = places < found
            value = tl.load(candidates + row * NUM_CANDIDATES + places, mask=is_here, other=-float("inf"))
            threshold = _threshold_of_candidates(
                value, is_here, top_k, top_p, has_top_k, best, tl.load(bounds + row), tl.load(totals + row)
            )
        elif top_k <= 0:
            wanted = tl.load(totals + row).to(tl.float64) * top_p
            threshold = best - _distance(sums + row * NUM_PASSES * NUM_PARTS, wanted, NUM_PASSES, BITS)
        else:
            temperature = tl.load(temperatures + row)
            threshold = _threshold_of_row(
                logits + row * row_stride, temperature, top_k, top_p, has_top_k, best, num_tokens, BLOCK
            )
    if min_p > 0:
        # exp is monotone, so a bisection of its argument finds where it reaches min_p, rounding included.
        high = tl.load(largest + row)
        largest_value = _value(high.to(tl.int32))
        low = tl.full((), LOWEST, tl.int64)
        while high - low > 1:
            middle = (low + high) >> 1
            is_kept = tl.exp(_value(middle.to(tl.int32)) - largest_value) >= min_p
            high = tl.where(is_kept, middle, high)
            low = tl.where(is_kept, low, middle)
        threshold = tl.maximum(threshold, high)
    tl.store(thresholds + row, threshold)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _cut(logits, row_stride, temperatures, thresholds, num_tokens, STRETCH: tl.constexpr):
    """Set logits below the threshold to -inf."""
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.load(thresholds + row)
    if threshold > LOWEST:
        columns = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
        is_token = columns < num_tokens
        at = logits + row * row_stride + columns
        value = tl.load(at, mask=is_token, other=-float("inf"))
        is_kept = _key(_scaled(value, tl.load(temperatures + row))) >= threshold
        tl.store(at, tl.where(is_kept, value, -float("inf")), mask=is_token)


def truncate(logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Set all but the most likely tokens of each row to -inf, in place.

    Shapes: logits_NV (N, V) float32 with contiguous rows, top_k_N int64, the rest float32 (N,).
    Device: no host sync; safe inside a CUDA graph.
    """
    num_rows, num_tokens = logits_NV.shape
    device = logits_NV.device
    num_stretches = triton.cdiv(num_tokens, STRETCH)
    num_groups = num_stretches * GROUPS
    groups_NG = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
    numbers_5N = torch.empty(5, num_rows, dtype=torch.int64, device=device)
    largest_N, bounds_N, thresholds_N, totals_N, num_found_N = numbers_5N
    sums_NX = torch.empty(num_rows, NUM_PASSES.value * NUM_PARTS.value, dtype=torch.int64, device=device)
    candidates_NC = torch.empty(num_rows, NUM_CANDIDATES, dtype=torch.float32, device=device)
    grid, rows = (num_rows, num_stretches), (num_rows,)
    row = (logits_NV, logits_NV.stride(0), temperature_N)
    asked = (top_k_N, top_p_N, min_p_N)
    _survey[grid](*row, *asked, groups_NG, num_tokens, STRETCH=STRETCH, GROUPS=GROUPS, num_warps=8)
    all_groups = triton.next_power_of_2(num_groups)
    summed = (totals_N, num_found_N, sums_NX)
    bounds = (groups_NG, largest_N, bounds_N)
    _bound[rows](*asked, *bounds, *summed, num_tokens, num_groups, ALL_GROUPS=all_groups, num_warps=4)
    found = (largest_N, bounds_N, totals_N, num_found_N, candidates_NC)
    sizes = {"NUM_CANDIDATES": NUM_CANDIDATES, "num_warps": 8}
    _gather[grid](*row, top_k_N, top_p_N, *found, num_tokens, num_groups, STRETCH=STRETCH, **sizes)
    for num_done in range(NUM_PASSES.value):
        _sum_parts[grid](
            *row, top_k_N, top_p_N, largest_N, *summed, num_tokens,
            NUM_DONE=num_done, STRETCH=STRETCH, **sizes,
        )  # fmt: skip
    _find[rows](*row, *asked, *found, sums_NX, thresholds_N, num_tokens, num_groups, BLOCK=BLOCK, **sizes)
    _cut[grid](*row, thresholds_N, num_tokens, STRETCH=STRETCH, num_warps=8)
    return logits_NV
