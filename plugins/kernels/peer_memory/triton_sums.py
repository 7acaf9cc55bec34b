"""Sums of rows over ranks, each of which has a partial sum, fused with the norm that follows: kernels and launch.

A program stores the data that other ranks need of its row directly into their memory; there are no signals. A place
without new data holds all ones, a NaN that is never sent. A waiting program polls the data themselves, takes them, and
writes all ones back. There are three ways, each of which gives all ranks the same bits; none uses multicast:
- at once: each rank sends its row to all, and adds all rows in order of rank;
- by parts: each rank adds up one part of every row's columns, and sends the sum to all; fewer bytes, but two trips;
- by rows: each rank adds up every R-th row whole, with a residual that it alone keeps, and sends the norm to all: the
  bytes and trips of parts, and a norm is computed once. A program has R rows, of which its rank adds up one.
The product that makes the partial sums may have sent them already, tile by tile ("sent").

Why two copies of a slot suffice, taken in turn: to complete an exchange a rank needs something of every other rank's
kernels of that exchange, the product that sends or the sum, if only by way of the rank that adds up. So when a rank
sends for exchange n + 2, all others have begun their first kernel of n + 1, and with it ended the sum of n, which left
its copy all ones again. Counts that only grow, kept on the device, say whose turn it is: a captured graph replays, and
slots may be used by different kinds of exchanges, and differently often.
Legend: T rows, D columns, R ranks.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import PeerMemory
from hookline.plugins.kernels.peer_memory.triton_slots import (
    WORD_BYTES,
    Way,
    as_words,
    go_at_of,
    high_of,
    low_of,
    must_wait,
    offset_of,
    pack,
    part_words,
    place,
    place_arguments,
    place_constants,
    sendable,
)
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, next_power_of_2


@triton.jit
def _take_sum(here, go_at, word, inside, own, rank, dtype: tl.constexpr, SIZE: tl.constexpr,
              SLOT_BYTES: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Wait for the data of all other ranks from `here` on, and add them and this rank's in order of rank: as words.

    rank: -1 if this rank's data were sent there too.
    """
    ranks = tl.full((WORDS,), rank, tl.int32)
    low, high = tl.zeros((WORDS,), dtype=tl.float32), tl.zeros((WORDS,), dtype=tl.float32)
    waiting = True
    while waiting:
        low, high = tl.zeros((WORDS,), dtype=tl.float32), tl.zeros((WORDS,), dtype=tl.float32)
        is_missing = word < 0
        for source in tl.static_range(SIZE):
            at = here + source * (SLOT_BYTES // 4) + word
            words = tl.load(at, mask=inside & (ranks != source), other=own, volatile=True)
            is_missing |= words == -1
            low += low_of(words, dtype)
            high += high_of(words, dtype)
        waiting = must_wait(is_missing, go_at)
    empty = tl.full((WORDS,), -1, tl.int32)
    for source in tl.static_range(SIZE):
        tl.store(here + source * (SLOT_BYTES // 4) + word, empty, mask=inside & (ranks != source))
    return pack(low, high, dtype)


@triton.jit
def _normalised(total, weight, residual, width, eps, dtype: tl.constexpr):
    """As triton_norms' norm with a residual: the norm of both, and their sum."""
    low = low_of(total, dtype) + low_of(residual, dtype)
    high = high_of(total, dtype) + high_of(residual, dtype)
    scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / width + eps)
    out = pack(low * scale * low_of(weight, dtype), high * scale * high_of(weight, dtype), dtype)
    return out, pack(low, high, dtype)


@triton.jit
def _row_of_words(weight_ptr, num_words, NORM: tl.constexpr, WORDS: tl.constexpr):
    """A program's row, its words, which of them there are, where the row has them, and the weight of a norm."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, WORDS)
    inside = word < num_words
    at = row * num_words + word
    weight = tl.zeros((WORDS,), dtype=tl.int32)
    if NORM:  # no kernel before this one writes it
        weight = tl.load(as_words(weight_ptr) + word, mask=inside, other=0)
    return row, word, inside, at, weight


@triton.jit
def _count_and_residual(counts, residual_ptr, row, at, inside, without, NORM: tl.constexpr):
    """How often the row's slot was used, and the residual; `without` stands for that of a sum without a norm."""
    count = tl.load(counts + row, cache_modifier=".cg")
    residual = without
    if NORM:
        residual = tl.load(as_words(residual_ptr) + at, mask=inside, other=0, cache_modifier=".cg")
    return count, residual


@triton.jit
def _finish(
    total, weight, residual, residual_ptr, out_ptr, counts, row, count, at, inside, width, eps,
    dtype: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store the sum, or its norm and with it the new residual, and that the slot was used once more."""
    residual_at, out_at = as_words(residual_ptr) + at, as_words(out_ptr) + at
    if NORM:
        total, added = _normalised(total, weight, residual, width, eps, dtype)
        tl.store(residual_at, added, mask=inside)
    tl.store(out_at, total, mask=inside)
    tl.store(counts + row, count + 1)


@triton.jit
def _sum_once_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, addresses, counts, rank, width, num_words, eps,
    SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
    NORM: tl.constexpr, SENT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    dtype = x_ptr.dtype.element_ty
    row, word, inside, at, weight = _row_of_words(weight_ptr, num_words, NORM, WORDS)
    go_at = go_at_of(addresses, rank)
    if PDL and not SENT:
        gdc_wait()
    count, residual = _count_and_residual(counts, residual_ptr, row, at, inside, weight, NORM)
    own = weight
    without = -1
    if not SENT:
        without = rank
        own = sendable(tl.load(as_words(x_ptr) + at, mask=inside, other=0))
        for step in tl.static_range(1, SIZE):
            theirs = place(addresses, (rank + step) % SIZE, row, count, rank, tl.int32, SIZE, SLOT_BYTES)
            tl.store(theirs + word, own, mask=inside)
    here = place(addresses, rank, row, count, 0, tl.int32, SIZE, SLOT_BYTES)
    total = _take_sum(here, go_at, word, inside, own, without, dtype, SIZE, SLOT_BYTES, WORDS)
    if PDL and SENT:
        gdc_wait()
    _finish(total, weight, residual, residual_ptr, out_ptr, counts, row, count, at, inside, width, eps, dtype, NORM)


@triton.jit
def _sum_by_parts_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, addresses, counts, rank, width, num_words, eps,
    SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
    NORM: tl.constexpr, SENT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    dtype = x_ptr.dtype.element_ty
    row, word, inside, at, weight = _row_of_words(weight_ptr, num_words, NORM, WORDS)
    peer = tl.arange(0, LANES)
    is_other = (peer < SIZE) & (peer != rank)
    address = tl.load(addresses + peer, mask=is_other, other=0)
    of_part = tl.arange(0, TILE)
    owned = rank * PART + of_part
    is_owned = (of_part < PART) & (owned < num_words)
    go_at = go_at_of(addresses, rank)
    if PDL and not SENT:
        gdc_wait()
    count, residual = _count_and_residual(counts, residual_ptr, row, at, inside, weight, NORM)
    own = tl.zeros((TILE,), dtype=tl.int32)
    without = -1
    if not SENT:
        without = rank
        theirs = peer[:, None] * PART + of_part[None, :]
        is_theirs = is_other[:, None] & (of_part[None, :] < PART) & (theirs < num_words)
        parts = sendable(tl.load(as_words(x_ptr) + row * num_words + theirs, mask=is_theirs, other=0))
        own = sendable(tl.load(as_words(x_ptr) + row * num_words + owned, mask=is_owned, other=0))
        to_place = offset_of(row, count, rank, SIZE, SLOT_BYTES)
        places = tl.multiple_of((address + to_place)[:, None].to(tl.pointer_type(tl.int32)), (16, 16))
        tl.store(places + of_part[None, :], parts, mask=is_theirs)
    here = place(addresses, rank, row, count, 0, tl.int32, SIZE, SLOT_BYTES)
    summed = _take_sum(here, go_at, of_part, is_owned, own, without, dtype, SIZE, SLOT_BYTES, TILE)
    summed = sendable(summed)
    for step in tl.static_range(SIZE):
        sums = place(addresses, (rank + step) % SIZE, row, count, SIZE, tl.int32, SIZE, SLOT_BYTES)
        tl.store(sums + owned, summed, mask=is_owned)
    sums = place(addresses, rank, row, count, SIZE, tl.int32, SIZE, SLOT_BYTES)
    total = weight
    waiting = True
    while waiting:
        total = tl.load(sums + word, mask=inside, other=0, volatile=True)
        waiting = must_wait(total == -1, go_at)
    tl.store(sums + word, tl.full((WORDS,), -1, tl.int32), mask=inside)
    if PDL and SENT:
        gdc_wait()
    _finish(total, weight, residual, residual_ptr, out_ptr, counts, row, count, at, inside, width, eps, dtype, NORM)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_by_rows_kernel(
    x_ptr, residual_ptr, weight_ptr, addresses, counts, rank, width, num_words, num_rows, eps,
    SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0).to(tl.int64) * SIZE
    dtype = x_ptr.dtype.element_ty
    word = tl.arange(0, WORDS)
    inside = word < num_words
    step = tl.arange(0, LANES) + 1
    peer = (rank + step) % SIZE
    row = first + peer
    is_other = (step < SIZE) & (row < num_rows)
    is_theirs = is_other[:, None] & inside[None, :]
    address = tl.load(addresses + peer)
    go_at = go_at_of(addresses, rank)
    at = row[:, None] * num_words + word[None, :]
    if PDL:
        gdc_wait()
    count = tl.load(counts + row, mask=is_other, other=0, cache_modifier=".cg")
    words = sendable(tl.load(as_words(x_ptr) + at, mask=is_theirs, other=0))
    to_place = offset_of(row, count, rank, SIZE, SLOT_BYTES)
    places = tl.multiple_of((address + to_place)[:, None].to(tl.pointer_type(tl.int32)), (16, 16))
    tl.store(places + word[None, :], words, mask=is_theirs)
    mine = first + rank
    if mine < num_rows:
        own_count = tl.load(counts + mine, cache_modifier=".cg")
        own_at = mine * num_words + word
        residual_at = as_words(residual_ptr) + own_at
        own = sendable(tl.load(as_words(x_ptr) + own_at, mask=inside, other=0))
        weight = tl.load(as_words(weight_ptr) + word, mask=inside, other=0)
        residual = tl.load(residual_at, mask=inside, other=0, cache_modifier=".cg")
        here = place(addresses, rank, mine, own_count, 0, tl.int32, SIZE, SLOT_BYTES)
        total = _take_sum(here, go_at, word, inside, own, rank, dtype, SIZE, SLOT_BYTES, WORDS)
        out, added = _normalised(total, weight, residual, width, eps, dtype)
        out = sendable(out)
        for other in tl.static_range(1, SIZE):
            result = place(addresses, (rank + other) % SIZE, mine, own_count, SIZE, tl.int32, SIZE, SLOT_BYTES)
            tl.store(result + word, out, mask=inside)
        tl.store(as_words(x_ptr) + own_at, out, mask=inside)
        tl.store(residual_at, added, mask=inside)
        tl.store(counts + mine, own_count + 1)
    from_place = tl.load(addresses + rank) + offset_of(row, count, SIZE, SIZE, SLOT_BYTES)
    results = tl.multiple_of(from_place[:, None].to(tl.pointer_type(tl.int32)), (16, 16)) + word[None, :]
    waiting = True
    while waiting:
        words = tl.load(results, mask=is_theirs, other=0, volatile=True)
        waiting = must_wait(words == -1, go_at)
    tl.store(results, tl.full((LANES, WORDS), -1, tl.int32), mask=is_theirs)
    tl.store(as_words(x_ptr) + at, words, mask=is_theirs)
    tl.store(counts + row, count + 1, mask=is_other)


_KERNELS = {Way.AT_ONCE: _sum_once_kernel, Way.BY_PARTS: _sum_by_parts_kernel}
LAUNCHES = {Way.AT_ONCE: (16, 64), Way.BY_PARTS: (8, 96)}
"""Most warps of a program and most registers of a thread, few enough that one of the next product fits in beside it."""
LAUNCHES_BY_ROWS = {1: (8, 128), 2: (16, 128)}
"""The same for sums by rows: rows that a program sends, 2 for more. The next product's programs start late there."""


def launch_sum(
    peers: PeerMemory, way: Way, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, out_TD: Tensor, eps: float, *,
    norm: bool, sent: bool = False,
) -> None:  # fmt: skip
    """Sum x up over the ranks into `out`, or the norm of that and the residual, and their sum into the residual.

    If x was `sent`, it is not read. Device: one launch, no host sync, waits for the other ranks' launches.
    """
    num_rows, width = x_TD.shape
    num_words = width * x_TD.element_size() // WORD_BYTES
    part = part_words(num_words, peers.size)
    _KERNELS[way][(num_rows,)](
        x_TD, residual_TD, weight_D, out_TD, *place_arguments(peers), width, num_words, eps, **place_constants(peers),
        PART=part, TILE=next_power_of_2(part), LANES=next_power_of_2(peers.size), NORM=norm, SENT=sent,
        **_options(num_words, LAUNCHES[way], x_TD.device),
    )  # fmt: skip


def launch_sum_by_rows(peers: PeerMemory, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> None:
    """Write the norm of the sum over ranks and the residual over x, and the new residual over its rows of this rank.

    Device: as launch_sum.
    """
    num_rows, width = x_TD.shape
    num_words, num_sent = width * x_TD.element_size() // WORD_BYTES, peers.size - 1
    _sum_by_rows_kernel[(cdiv(num_rows, peers.size),)](
        x_TD, residual_TD, weight_D, *place_arguments(peers), width, num_words, num_rows, eps, **place_constants(peers),
        LANES=next_power_of_2(num_sent), **_options(num_words, LAUNCHES_BY_ROWS[min(num_sent, 2)], x_TD.device),
    )  # fmt: skip


def _options(num_words: int, limits: tuple[int, int], device: torch.device) -> dict[str, Any]:
    most_warps, most_registers = limits
    words = next_power_of_2(num_words)
    num_warps = max(1, min(most_warps, words // 128))
    return {"WORDS": words, "num_warps": num_warps, "maxnreg": most_registers, **launch_options(device)}
