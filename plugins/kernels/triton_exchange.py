"""Sums over ranks through the GPUs' direct view of each other's memory, fused with the norm that follows.

A program has a row, and stores what others need of it straight into their memory; nobody signals. A place that nothing
has arrived at holds all ones, a NaN that is never sent, so whoever waits looks at the data themselves, takes them, and
puts all ones back. Two ways, of which each gives all ranks the same bits; nothing here uses multicast:
- at once: each rank sends its row to all, and adds all rows in order of rank;
- by parts: each rank adds up one part of every row's columns, and sends the sum to all; fewer bytes, but two trips.
What a rank sends first may have been sent already, tile by tile, by the product that made it ("sent").

Why two copies of a slot suffice, taken in turn: to complete an exchange a rank needs something of every other rank's
kernels of that exchange, the product that sends or the sum. So when a rank sends for exchange n + 2, all others have
begun their first kernel of n + 1, and with it ended the sum of n, which left its copy all ones again. Counts that only
grow, kept on the device, say whose turn it is: a captured graph replays, and slots may be used by different kinds of
exchanges, and differently often.
Legend: T rows, D columns, R ranks, N rows of a draw.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from core.peer_memory import MIN_SLOT_BYTES, PeerMemory
from plugins.kernels import triton_ops, triton_thin
from plugins.kernels.triton_launch import launch_options
from plugins.kernels.triton_product import Kind
from plugins.kernels.triton_slots import (
    WORD_BYTES,
    Sends,
    Way,
    high_of,
    low_of,
    offset_of,
    pack,
    part_words,
    place,
    place_arguments,
    place_constants,
    sendable,
)
from plugins.kernels.triton_wide import WideScratch, empty_with_room, fitting_wide_tiling, send_wide_product

BEST_ROWS = 128
"""Draws per program of `best_tokens`."""
PAIR_BYTES = 8
"""A draw's score and token."""
assert PAIR_BYTES * BEST_ROWS <= MIN_SLOT_BYTES
LAUNCHES = {Way.AT_ONCE: (16, 64), Way.BY_PARTS: (8, 96)}
"""Most warps of a program and most registers of a thread, few enough that one of the next product fits in beside it."""


@triton.jit
def _go_at(addresses, rank):
    """Where this rank is let go, see PeerMemory."""
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def _must_wait(is_missing, go_at):
    """Whether anything is missing, unless this rank was let go."""
    let_go = tl.load(go_at, volatile=True)
    return (tl.max(is_missing.to(tl.int32), axis=0) != 0) & (let_go == 0)


@triton.jit
def _take_sum(here, go_at, word, inside, own, rank, dtype: tl.constexpr, SIZE: tl.constexpr,
              SLOT_BYTES: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Wait for what all other ranks sent to `here` and on, add it and our own in order of rank: the sum as words.

    A rank of -1 stands for one whose own data were sent there too.
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
        waiting = _must_wait(is_missing, go_at)
    empty = tl.full((WORDS,), -1, tl.int32)
    for source in tl.static_range(SIZE):
        tl.store(here + source * (SLOT_BYTES // 4) + word, empty, mask=inside & (ranks != source))
    return pack(low, high, dtype)


@triton.jit
def _finish(total, weight, residual, residual_at, out_at, width, inside, eps, dtype: tl.constexpr, NORM: tl.constexpr):
    """Store the sum, or as triton_ops' norm with a residual does."""
    if NORM:
        low = low_of(total, dtype) + low_of(residual, dtype)
        high = high_of(total, dtype) + high_of(residual, dtype)
        tl.store(residual_at, pack(low, high, dtype), mask=inside)
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / width + eps)
        out = pack(low * scale * low_of(weight, dtype), high * scale * high_of(weight, dtype), dtype)
        tl.store(out_at, out, mask=inside)
    else:
        tl.store(out_at, total, mask=inside)


@triton.jit
def _as_words(pointer):
    return pointer.to(tl.pointer_type(tl.int32))


@triton.jit
def _sum_once_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, addresses, counts, rank, width, num_words, eps,
    SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
    NORM: tl.constexpr, SENT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    dtype = x_ptr.dtype.element_ty
    word = tl.arange(0, WORDS)
    inside = word < num_words
    at = row * num_words + word
    weight = tl.zeros((WORDS,), dtype=tl.int32)
    if NORM:
        weight = tl.load(_as_words(weight_ptr) + word, mask=inside, other=0)
    go_at = _go_at(addresses, rank)
    if PDL and not SENT:
        gdc_wait()
    count = tl.load(counts + row, cache_modifier=".cg")
    residual = weight
    if NORM:
        residual = tl.load(_as_words(residual_ptr) + at, mask=inside, other=0, cache_modifier=".cg")
    own = weight
    without = -1
    if not SENT:
        without = rank
        own = sendable(tl.load(_as_words(x_ptr) + at, mask=inside, other=0))
        for step in tl.static_range(1, SIZE):
            theirs = place(addresses, (rank + step) % SIZE, row, count, rank, tl.int32, SIZE, SLOT_BYTES)
            tl.store(theirs + word, own, mask=inside)
    here = place(addresses, rank, row, count, 0, tl.int32, SIZE, SLOT_BYTES)
    total = _take_sum(here, go_at, word, inside, own, without, dtype, SIZE, SLOT_BYTES, WORDS)
    if PDL and SENT:
        gdc_wait()
    residual_at, out_at = _as_words(residual_ptr) + at, _as_words(out_ptr) + at
    _finish(total, weight, residual, residual_at, out_at, width, inside, eps, dtype, NORM)
    tl.store(counts + row, count + 1)


@triton.jit
def _sum_by_parts_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, addresses, counts, rank, width, num_words, eps,
    SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
    NORM: tl.constexpr, SENT: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    dtype = x_ptr.dtype.element_ty
    word = tl.arange(0, WORDS)
    inside = word < num_words
    at = row * num_words + word
    weight = tl.zeros((WORDS,), dtype=tl.int32)
    if NORM:
        weight = tl.load(_as_words(weight_ptr) + word, mask=inside, other=0)
    peer = tl.arange(0, LANES)
    is_other = (peer < SIZE) & (peer != rank)
    address = tl.load(addresses + peer, mask=is_other, other=0)
    of_part = tl.arange(0, TILE)
    owned = rank * PART + of_part
    is_owned = (of_part < PART) & (owned < num_words)
    go_at = _go_at(addresses, rank)
    if PDL and not SENT:
        gdc_wait()
    count = tl.load(counts + row, cache_modifier=".cg")
    residual = weight
    if NORM:
        residual = tl.load(_as_words(residual_ptr) + at, mask=inside, other=0, cache_modifier=".cg")
    own = tl.zeros((TILE,), dtype=tl.int32)
    without = -1
    if not SENT:
        without = rank
        theirs = peer[:, None] * PART + of_part[None, :]
        is_theirs = is_other[:, None] & (of_part[None, :] < PART) & (theirs < num_words)
        parts = sendable(tl.load(_as_words(x_ptr) + row * num_words + theirs, mask=is_theirs, other=0))
        own = sendable(tl.load(_as_words(x_ptr) + row * num_words + owned, mask=is_owned, other=0))
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
        waiting = _must_wait(total == -1, go_at)
    tl.store(sums + word, tl.full((WORDS,), -1, tl.int32), mask=inside)
    if PDL and SENT:
        gdc_wait()
    residual_at, out_at = _as_words(residual_ptr) + at, _as_words(out_ptr) + at
    _finish(total, weight, residual, residual_at, out_at, width, inside, eps, dtype, NORM)
    tl.store(counts + row, count + 1)


@triton.jit
def _best_kernel(
    scores_ptr, tokens_ptr, out_ptr, addresses, counts, rank, num_rows,
    SIZE: tl.constexpr, SLOT_BYTES: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, ROWS)
    rows = slot * ROWS + lane
    is_row = rows < num_rows
    go_at = _go_at(addresses, rank)
    count = tl.load(counts + slot)
    bits = tl.load(scores_ptr + rows, mask=is_row, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
    own = (bits << 32) | tl.load(tokens_ptr + rows, mask=is_row, other=0)  # no token is all ones
    for step in tl.static_range(1, SIZE):
        theirs = place(addresses, (rank + step) % SIZE, slot, count, rank, tl.int64, SIZE, SLOT_BYTES)
        tl.store(theirs + lane, own, mask=is_row)
    here = place(addresses, rank, slot, count, 0, tl.int64, SIZE, SLOT_BYTES)
    stride = SLOT_BYTES // 8
    ranks = tl.full((ROWS,), rank, tl.int32)
    winner = tl.zeros((ROWS,), dtype=tl.int64)
    waiting = True
    while waiting:
        best = tl.full((ROWS,), -float("inf"), tl.float32)
        winner = tl.full((ROWS,), -1, tl.int64)
        is_missing = lane < 0
        for source in tl.static_range(SIZE):
            pair = tl.load(here + source * stride + lane, mask=is_row & (ranks != source), other=own, volatile=True)
            is_missing |= pair == -1
            score = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            is_better = (score > best) | (winner < 0)  # of equal ones the lowest rank's
            best = tl.where(is_better, score, best)
            winner = tl.where(is_better, pair & 0xFFFFFFFF, winner)
        waiting = _must_wait(is_missing, go_at)
    empty = tl.full((ROWS,), -1, tl.int64)
    for source in tl.static_range(SIZE):
        tl.store(here + source * stride + lane, empty, mask=is_row & (ranks != source))
    tl.store(out_ptr + rows, winner, mask=is_row)
    tl.store(counts + slot, count + 1)


_KERNELS = {
    Way.AT_ONCE: _sum_once_kernel,
    Way.BY_PARTS: _sum_by_parts_kernel,
}


class TritonExchange:
    """`core.contracts.Exchange` over the memory of these ranks."""

    def __init__(self, peers: PeerMemory, scratch: WideScratch) -> None:
        self.peers, self.scratch = peers, scratch

    def fits(self, x_TD: Tensor) -> bool:
        """See Exchange."""
        return (
            x_TD.dim() == 2
            and 0 < x_TD.shape[0] <= self.peers.num_slots
            and x_TD.shape[1] * x_TD.element_size() <= self.peers.slot_bytes
            and x_TD.shape[1] * x_TD.element_size() % WORD_BYTES == 0
            and x_TD.is_contiguous()
            and x_TD.dtype in (torch.bfloat16, torch.float16, torch.float32)
        )

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        """See Exchange."""
        self._sum(x_TD, x_TD, x_TD, x_TD, 0.0, norm=False)
        return x_TD

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Exchange; overwrites both inputs. Others of another dtype or with gaps take a launch of their own."""
        if not _are_like(x_TD, residual_TD, weight_D):
            return triton_ops.add_rms_norm(self.all_reduce(x_TD), residual_TD, weight_D, eps)
        self._sum(x_TD, residual_TD, weight_D, x_TD, eps, norm=True)
        return x_TD, residual_TD

    def linear_add_rms_norm(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """See FusedExchange: tiles of the product go straight to the ranks that sum them up."""
        if not _are_like(x_TD, residual_TO, norm_weight_O) or not self.fits(residual_TO):
            return None
        if not self._send(x_TD, weight_OD, bias_O):
            return None
        out_TO = empty_with_room(*residual_TO.shape, like=x_TD)
        self._sum(out_TO, residual_TO, norm_weight_O, out_TO, eps, norm=True, sent=True)
        return out_TO, residual_TO

    def _send(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> bool:
        """Launch a product that sends its tiles, if there is one that pays."""
        sends = Sends(self.peers, self.way(len(x_TD)))
        if triton_thin.fits(x_TD, weight_OD):
            if not triton_thin.sends_thin(x_TD, weight_OD, sends):
                return False
            triton_thin.send_thin_linear(x_TD, weight_OD, bias_O, sends)
            return True
        tiling = fitting_wide_tiling(Kind.PLAIN, x_TD, weight_OD, sends=True)
        if tiling is None or not sends.takes(weight_OD.shape[0], tiling.block_o):
            return False
        send_wide_product(x_TD, weight_OD, bias_O, tiling, self.scratch, sends)
        return True

    def best_tokens(self, scores_N: Tensor, tokens_N: Tensor) -> Tensor:
        """See Exchange."""
        out_N = torch.empty_like(tokens_N)
        num_rows = scores_N.shape[0]
        rows = min(BEST_ROWS, triton.next_power_of_2(num_rows))
        _best_kernel[(triton.cdiv(num_rows, rows),)](
            scores_N.contiguous(), tokens_N.contiguous(), out_N, *place_arguments(self.peers), num_rows,
            **place_constants(self.peers), ROWS=rows, num_warps=4, **launch_options(scores_N.device),
        )  # fmt: skip
        return out_N

    def _sum(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, out_TD: Tensor, eps: float, *, norm: bool,
        sent: bool = False,
    ) -> None:  # fmt: skip
        num_rows, width = x_TD.shape
        num_words = width * x_TD.element_size() // WORD_BYTES
        part = part_words(num_words, self.peers.size)
        words = triton.next_power_of_2(num_words)
        way = self.way(num_rows)
        most_warps, most_registers = LAUNCHES[way]
        _KERNELS[way][(num_rows,)](
            x_TD, residual_TD, weight_D, out_TD, *place_arguments(self.peers), width, num_words, eps,
            **place_constants(self.peers), PART=part, TILE=triton.next_power_of_2(part),
            LANES=triton.next_power_of_2(self.peers.size),
            NORM=norm, SENT=sent, WORDS=words, num_warps=max(1, min(most_warps, words // 128)), maxnreg=most_registers,
            **launch_options(x_TD.device),
        )  # fmt: skip

    def way(self, num_rows: int) -> Way:
        """How so many rows are summed up."""
        return Way.of(self.peers.size, num_rows)


def _are_like(x_TD: Tensor, *others: Tensor) -> bool:
    """Whether the others have its dtype, and no gaps."""
    return all(one.dtype == x_TD.dtype and one.is_contiguous() for one in others)
