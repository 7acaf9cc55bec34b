"""top_k, top_p and min_p on a GPU without sorting the vocabulary: one threshold a row, found by counting.

Four passes of 8 bits each count how many logits begin with which bits, and so find the k-th largest exactly. One more
pass sums the probabilities of what is left and gathers the few tokens that top_p can still be about; one program
a row finds the threshold among those by bisection, and the last pass sets what lies below it to -inf. Sums are of whole
numbers, so their order does not matter: a row's result depends on that row alone, and always is the same.
Legend: N rows, V vocabulary, C candidates of a row. Keys are float32 bits turned so that they order as the floats do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 4096
"""Tokens of one program."""
NUM_CANDIDATES = 2048
"""Most candidates of a row; if more are left, the row's program reads the whole vocabulary again and again."""
BLOCK = 8192
"""Tokens that such a program reads at a time."""


@triton.jit
def _scaled(logits, temperature):
    """What the softmax is taken of; 0 has one sign, so that keys order as floats do."""
    value = logits / tl.where(temperature > 0, tl.maximum(temperature, 1e-30), 1.0)
    return tl.where(value == 0, 0.0, value)


@triton.jit
def _key(value):
    """uint32 that orders as the float does."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _value(key):
    """The float of a key."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _weight(value, largest):
    """A token's probability, but for a factor, as a whole number: the most likely one has 2^40."""
    return (tl.exp(value - largest) * 1099511627776.0).to(tl.int64)


@triton.jit
def _digits_so_far(counts, row, wanted, NUM_DIGITS: tl.constexpr):
    """The first 8 * NUM_DIGITS bits of the k-th largest key, and which largest it is among keys that begin so."""
    prefix = tl.full((), 0, tl.int64)
    digits = tl.arange(0, 256)
    for place in tl.static_range(NUM_DIGITS):
        count = tl.load(counts + (row * 4 + place) * 256 + digits)
        from_here = tl.sum(count) - tl.cumsum(count, 0) + count
        digit = tl.max(tl.where(from_here >= wanted, digits, 0))
        wanted -= tl.sum(tl.where(digits > digit, count, 0))
        prefix = prefix * 256 + digit
    return prefix, wanted


@triton.jit
def _count(
    logits, row_stride, temperatures, top_ks, counts, largest, num_tokens, DIGIT: tl.constexpr, STRETCH: tl.constexpr
):
    """How many keys that begin like the k-th largest go on with which 8 bits; the first pass also finds the largest."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    top_k = tl.load(top_ks + row)
    has_top_k = (top_k > 0) & (top_k < num_tokens)
    if has_top_k | (DIGIT == 0):
        is_token = columns < num_tokens
        value = tl.load(logits + row * row_stride + columns, mask=is_token, other=-float("inf"))
        key = _key(_scaled(value, tl.load(temperatures + row)))
        if DIGIT == 0:
            tl.atomic_max(largest + row, tl.max(key.to(tl.int64)))
        if has_top_k:
            prefix, _ = _digits_so_far(counts, row, top_k, DIGIT)
            wide = key.to(tl.int64)
            counted = is_token & ((wide >> (32 - 8 * DIGIT)) == prefix)
            digit = ((wide >> (24 - 8 * DIGIT)) & 255).to(tl.int32)
            count = tl.histogram(digit, 256, mask=counted)
            tl.atomic_add(counts + (row * 4 + DIGIT) * 256 + tl.arange(0, 256), count, mask=count > 0, sem="relaxed")


@triton.jit
def _kth_key(counts, row, top_k, num_tokens):
    """The key of the k-th largest logit; 0, which all reach, without top_k."""
    key = tl.full((), 0, tl.int64)
    if (top_k > 0) & (top_k < num_tokens):
        key, _ = _digits_so_far(counts, row, top_k, 4)
    return key


@triton.jit
def _gather(
    logits,
    row_stride,
    temperatures,
    top_ks,
    top_ps,
    counts,
    largest,
    totals,
    num_found,
    candidates,
    num_tokens,
    NUM_CANDIDATES: tl.constexpr,
    STRETCH: tl.constexpr,
):
    """Sum the weights that top_k leaves, and gather the tokens that are not certain to fall to top_p."""
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_ps + row)
    if top_p < 1:
        columns = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
        is_token = columns < num_tokens
        value = tl.load(logits + row * row_stride + columns, mask=is_token, other=-float("inf"))
        value = _scaled(value, tl.load(temperatures + row))
        kth = _kth_key(counts, row, tl.load(top_ks + row), num_tokens)
        largest_value = _value(tl.load(largest + row).to(tl.uint32))
        is_left = is_token & (_key(value).to(tl.int64) >= kth)
        tl.atomic_add(totals + row, tl.sum(tl.where(is_left, _weight(value, largest_value), 0)), sem="relaxed")
        # All tokens below this together weigh less than what top_p may leave out.
        bound = largest_value - tl.log(num_tokens / tl.maximum(1 - top_p, 1e-7)) - 1e-2
        is_candidate = is_left & (value >= bound)
        place = tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        first = tl.atomic_add(num_found + row, tl.sum(is_candidate.to(tl.int32)), sem="relaxed")
        place += first
        tl.store(candidates + row * NUM_CANDIDATES + place, value, mask=is_candidate & (place < NUM_CANDIDATES))


@triton.jit
def _smallest_needed(keys, weights, wanted, low, high):
    """Smallest key t in (low, high] with mass(keys above t) < wanted: tokens from t on are needed to reach it."""
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = tl.sum(tl.where(keys > middle, weights, 0)).to(tl.float64) < wanted
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle)
    return high


@triton.jit
def _smallest_needed_of_all(
    row_logits, temperature, kth, largest_value, wanted, low, high, num_tokens, BLOCK: tl.constexpr
):
    """The same over a row's whole vocabulary, read anew for each bit."""
    while high - low > 1:
        middle = (low + high) // 2
        mass = tl.full((BLOCK,), 0, tl.int64)
        for first in range(0, num_tokens, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            value = _scaled(tl.load(row_logits + columns, mask=columns < num_tokens, other=-float("inf")), temperature)
            key = _key(value).to(tl.int64)
            mass += tl.where((key > middle) & (key >= kth), _weight(value, largest_value), 0)
        is_enough = tl.sum(mass).to(tl.float64) < wanted
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle)
    return high


@triton.jit
def _find(
    logits,
    row_stride,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    counts,
    largest,
    totals,
    num_found,
    candidates,
    thresholds,
    num_tokens,
    NUM_CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest key that a row keeps."""
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    kth = _kth_key(counts, row, tl.load(top_ks + row), num_tokens)
    largest_key = tl.load(largest + row)
    largest_value = _value(largest_key.to(tl.uint32))
    threshold = kth
    if top_p < 1:
        wanted = tl.load(totals + row).to(tl.float64) * top_p
        found = tl.load(num_found + row)
        if found <= NUM_CANDIDATES:
            places = tl.arange(0, NUM_CANDIDATES)
            at = candidates + row * NUM_CANDIDATES + places
            value = tl.load(at, mask=places < found, other=-float("inf"))
            keys = _key(value).to(tl.int64)
            weights = _weight(value, largest_value)
            threshold = tl.maximum(kth, _smallest_needed(keys, weights, wanted, kth - 1, largest_key))
        else:
            temperature = tl.load(temperatures + row)
            found_key = _smallest_needed_of_all(
                logits + row * row_stride,
                temperature,
                kth,
                largest_value,
                wanted,
                kth - 1,
                largest_key,
                num_tokens,
                BLOCK,
            )
            threshold = tl.maximum(kth, found_key)
    if min_p > 0:
        # exp is monotone, so a bisection of its argument finds where it reaches min_p, rounding included.
        low = kth - 1
        high = largest_key
        while high - low > 1:
            middle = (low + high) // 2
            is_kept = tl.exp(_value(middle.to(tl.uint32)) - largest_value) >= min_p
            high = tl.where(is_kept, middle, high)
            low = tl.where(is_kept, low, middle)
        threshold = tl.maximum(threshold, high)
    tl.store(thresholds + row, threshold)


@triton.jit
def _cut(logits, row_stride, temperatures, thresholds, num_tokens, STRETCH: tl.constexpr):
    """Set what lies below the threshold to -inf."""
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.load(thresholds + row)
    if threshold > 0:
        columns = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
        is_token = columns < num_tokens
        at = logits + row * row_stride + columns
        value = tl.load(at, mask=is_token, other=-float("inf"))
        key = _key(_scaled(value, tl.load(temperatures + row))).to(tl.int64)
        tl.store(at, -float("inf"), mask=is_token & (key < threshold))


def truncate(logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Set all but the most likely tokens of each row to -inf, in place.

    Shapes: logits_NV (N, V) float32 with contiguous rows, top_k_N int64, the rest float32 (N,).
    Device: no host sync; safe inside a CUDA graph.
    """
    num_rows, num_tokens = logits_NV.shape
    device = logits_NV.device
    # counts (N, 4, 256), num_found (N,); largest, totals, thresholds (N,)
    counts = torch.zeros(num_rows * 1025, dtype=torch.int32, device=device)
    wide = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
    candidates = torch.empty(num_rows, NUM_CANDIDATES, dtype=torch.float32, device=device)
    num_found, (largest, totals, thresholds) = counts[num_rows * 1024 :], wide
    grid = (num_rows, triton.cdiv(num_tokens, STRETCH))
    row = (logits_NV, logits_NV.stride(0), temperature_N)
    for digit in range(4):
        _count[grid](*row, top_k_N, counts, largest, num_tokens, DIGIT=digit, STRETCH=STRETCH, num_warps=8)
    sizes = {"NUM_CANDIDATES": NUM_CANDIDATES, "num_warps": 8}
    sums = (counts, largest, totals, num_found, candidates)
    _gather[grid](*row, top_k_N, top_p_N, *sums, num_tokens, STRETCH=STRETCH, **sizes)
    _find[(num_rows,)](*row, top_k_N, top_p_N, min_p_N, *sums, thresholds, num_tokens, BLOCK=BLOCK, **sizes)
    _cut[grid](*row, thresholds, num_tokens, STRETCH=STRETCH, num_warps=8)
    return logits_NV
