"""Sums over ranks through the GPUs' direct view of each other's memory, fused with the norm that follows.

A program has a row of the tensor and a slot of each rank's block of memory, and meets the other ranks' programs of the
same row. Every rank adds in order of rank, so all hold the same bits. Counts that only grow, kept on the device, tell
one exchange from the last, so a captured graph replays. Nothing here uses multicast. Two ways:
- at once: each rank writes its row into its own memory, signals, and reads all others' rows;
- by owner: row r is summed up by rank r mod R, which writes the sum to all; fewer bytes for many rows.
Legend: T rows, D columns, R ranks, N rows of a draw.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from core.peer_memory import MIN_SLOT_BYTES, NUM_AREAS, NUM_COPIES, PeerMemory
from plugins.kernels.triton_launch import launch_options

AREAS = tl.constexpr(NUM_AREAS)
ONCE, PARTS, SUMS, BEST = (tl.constexpr(area) for area in range(NUM_AREAS))
"""What each area of the memory is for. The two copies of a slot take turns, which `count % 2` says."""
BEST_ROWS = 128
"""Draws per program of `best_tokens`."""
PAIR_BYTES = 12
"""A draw's token and score."""
assert PAIR_BYTES * BEST_ROWS <= MIN_SLOT_BYTES and NUM_COPIES == 2
MOST_ROWS_AT_ONCE = {2: 512, 3: 64, 4: 32}
"""By number of ranks; with more rows, each is summed up by its owner. Measured: docs/log.md."""
FEW_ROWS_AT_ONCE = 16
"""For more ranks."""
MOST_ROWS_BY_OWNER = 320
"""More rows than this, and than those at once, are for nccl."""


class Way(Enum):
    """How rows are summed up, see above."""

    AT_ONCE = "once"
    BY_OWNER = "owner"


@triton.jit
def _data(addresses, peer, slot, count, dtype: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
          SLOT_BYTES: tl.constexpr, AREA: tl.constexpr):  # fmt: skip
    """A peer's copy of a slot for this count, as a pointer."""
    at = AREAS * SLOTS * SIZE * 8 + ((AREA * SLOTS + slot) * 2 + count % 2) * SLOT_BYTES
    return tl.multiple_of((tl.load(addresses + peer) + at).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _signal_all(addresses, rank, slot, count, SIZE: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
                AREA: tl.constexpr):  # fmt: skip
    """Tell every rank's program of this slot that what this one stored can be read."""
    tl.debug_barrier()  # all threads have stored before one of them signals
    peer = tl.arange(0, LANES)
    is_peer = peer < SIZE
    theirs = tl.load(addresses + peer, mask=is_peer, other=0) + ((AREA * SLOTS + slot) * SIZE + rank) * 8
    tl.atomic_xchg(theirs.to(tl.pointer_type(tl.int64)), count, mask=is_peer, sem="release", scope="sys")


@triton.jit
def _signal_one(addresses, peer, rank, slot, count, SIZE: tl.constexpr, SLOTS: tl.constexpr, AREA: tl.constexpr):
    """Tell one rank's."""
    tl.debug_barrier()
    theirs = tl.load(addresses + peer) + ((AREA * SLOTS + slot) * SIZE + rank) * 8
    tl.atomic_xchg(theirs.to(tl.pointer_type(tl.int64)), count, sem="release", scope="sys")


@triton.jit
def _wait_for_all(addresses, rank, slot, count, SIZE: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
                  AREA: tl.constexpr):  # fmt: skip
    """Wait until every rank's program of this slot has signalled here."""
    peer = tl.arange(0, LANES)
    is_peer = peer < SIZE
    mine = (tl.load(addresses + rank) + ((AREA * SLOTS + slot) * SIZE + peer) * 8).to(tl.pointer_type(tl.int64))
    nothing = tl.zeros((LANES,), dtype=tl.int64)
    least = count - 1
    while least < count:
        seen = tl.atomic_add(mine, nothing, mask=is_peer, sem="acquire", scope="sys")
        least = tl.min(tl.where(is_peer, seen, count))
    tl.debug_barrier()


@triton.jit
def _wait_for_one(addresses, peer, rank, slot, count, SIZE: tl.constexpr, SLOTS: tl.constexpr, AREA: tl.constexpr):
    """Wait until one rank's has."""
    mine = (tl.load(addresses + rank) + ((AREA * SLOTS + slot) * SIZE + peer) * 8).to(tl.pointer_type(tl.int64))
    while tl.atomic_add(mine, 0, sem="acquire", scope="sys") < count:
        pass
    tl.debug_barrier()


@triton.jit
def _norm(x, weight, residual_at, out_at, width, inside, eps):
    """As triton_ops' norm, of a sum that is not in memory."""
    tl.store(residual_at, x.to(residual_at.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(out_at, (x * scale * weight).to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _sum_once_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, addresses, counts, rank, num_rows, width, eps,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr, LANES: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype = x_ptr.dtype.element_ty
    weight = tl.zeros((BLOCK,), dtype=tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    count = tl.load(counts + ONCE * SLOTS + row) + 1
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0)
    mine = _data(addresses, rank, row, count, dtype, SIZE, SLOTS, SLOT_BYTES, ONCE)
    tl.store(mine + column, x, mask=inside)
    residual_at = residual_ptr + row * width + column
    residual = weight
    if NORM:
        residual = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    _signal_all(addresses, rank, row, count, SIZE, SLOTS, LANES, ONCE)
    _wait_for_all(addresses, rank, row, count, SIZE, SLOTS, LANES, ONCE)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for peer in tl.static_range(SIZE):
        theirs = _data(addresses, peer, row, count, dtype, SIZE, SLOTS, SLOT_BYTES, ONCE)
        total += tl.load(theirs + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    total = total.to(dtype)
    out_at = out_ptr + row * width + column
    if NORM:
        _norm(total.to(tl.float32) + residual, weight, residual_at, out_at, width, inside, eps)
    else:
        tl.store(out_at, total, mask=inside)
    tl.store(counts + ONCE * SLOTS + row, count)


@triton.jit
def _sum_by_owner_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, addresses, counts, rank, num_rows, width, eps,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr, LANES: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    owner = row % SIZE
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype = x_ptr.dtype.element_ty
    weight = tl.zeros((BLOCK,), dtype=tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    count = tl.load(counts + PARTS * SLOTS + row) + 1
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0)
    mine = _data(addresses, rank, row, count, dtype, SIZE, SLOTS, SLOT_BYTES, PARTS)
    tl.store(mine + column, x, mask=inside)
    _signal_one(addresses, owner, rank, row, count, SIZE, SLOTS, PARTS)
    residual_at = residual_ptr + row * width + column
    residual = weight
    if NORM:
        residual = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    if rank == owner:
        _wait_for_all(addresses, rank, row, count, SIZE, SLOTS, LANES, PARTS)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for peer in tl.static_range(SIZE):
            theirs = _data(addresses, peer, row, count, dtype, SIZE, SLOTS, SLOT_BYTES, PARTS)
            total += tl.load(theirs + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        x = total.to(dtype)
        for peer in tl.static_range(SIZE):
            theirs = _data(addresses, peer, row, count, dtype, SIZE, SLOTS, SLOT_BYTES, SUMS)
            tl.store(theirs + column, x, mask=inside)
        _signal_all(addresses, rank, row, count, SIZE, SLOTS, LANES, SUMS)
    else:
        _wait_for_one(addresses, owner, rank, row, count, SIZE, SLOTS, SUMS)
        summed = _data(addresses, rank, row, count, dtype, SIZE, SLOTS, SLOT_BYTES, SUMS)
        x = tl.load(summed + column, mask=inside, other=0.0, cache_modifier=".cg")
    out_at = out_ptr + row * width + column
    if NORM:
        _norm(x.to(tl.float32) + residual, weight, residual_at, out_at, width, inside, eps)
    else:
        tl.store(out_at, x, mask=inside)
    tl.store(counts + PARTS * SLOTS + row, count)


@triton.jit
def _best_kernel(
    scores_ptr, tokens_ptr, out_ptr, addresses, counts, rank, num_rows,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, ROWS)
    rows = slot * ROWS + lane
    is_row = rows < num_rows
    count = tl.load(counts + BEST * SLOTS + slot) + 1
    my_tokens = _data(addresses, rank, slot, count, tl.int64, SIZE, SLOTS, SLOT_BYTES, BEST)
    my_scores = (my_tokens + ROWS).to(tl.pointer_type(tl.float32))
    tl.store(my_tokens + lane, tl.load(tokens_ptr + rows, mask=is_row, other=0), mask=is_row)
    tl.store(my_scores + lane, tl.load(scores_ptr + rows, mask=is_row, other=0.0), mask=is_row)
    _signal_all(addresses, rank, slot, count, SIZE, SLOTS, LANES, BEST)
    _wait_for_all(addresses, rank, slot, count, SIZE, SLOTS, LANES, BEST)
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    winner = tl.full((ROWS,), -1, tl.int64)
    for peer in tl.static_range(SIZE):
        their_tokens = _data(addresses, peer, slot, count, tl.int64, SIZE, SLOTS, SLOT_BYTES, BEST)
        their_scores = (their_tokens + ROWS).to(tl.pointer_type(tl.float32))
        token = tl.load(their_tokens + lane, mask=is_row, other=0, cache_modifier=".cg")
        score = tl.load(their_scores + lane, mask=is_row, other=0.0, cache_modifier=".cg")
        is_better = (score > best) | (winner < 0)  # of equal ones the lowest rank's
        best = tl.where(is_better, score, best)
        winner = tl.where(is_better, token, winner)
    tl.store(out_ptr + rows, winner, mask=is_row)
    tl.store(counts + BEST * SLOTS + slot, count)


_KERNELS = {
    Way.AT_ONCE: _sum_once_kernel,
    Way.BY_OWNER: _sum_by_owner_kernel,
}


class TritonExchange:
    """`core.contracts.Exchange` over the memory of these ranks."""

    def __init__(self, peers: PeerMemory) -> None:
        self.peers = peers

    def fits(self, x_TD: Tensor) -> bool:
        """See Exchange."""
        return (
            x_TD.dim() == 2
            and 0 < x_TD.shape[0] <= min(self.peers.num_slots, max(self._most_at_once, MOST_ROWS_BY_OWNER))
            and x_TD.shape[1] * x_TD.element_size() <= self.peers.slot_bytes
            and x_TD.is_contiguous()
            and x_TD.dtype in (torch.bfloat16, torch.float16, torch.float32)
        )

    def all_reduce(self, x_TD: Tensor) -> Tensor:
        """See Exchange."""
        self._sum(x_TD, x_TD, x_TD, x_TD, 0.0, norm=False)
        return x_TD

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Exchange; overwrites both inputs."""
        self._sum(x_TD, residual_TD, weight_D, x_TD, eps, norm=True)
        return x_TD, residual_TD

    def best_tokens(self, scores_N: Tensor, tokens_N: Tensor) -> Tensor:
        """See Exchange."""
        out_N = torch.empty_like(tokens_N)
        num_rows = scores_N.shape[0]
        rows = min(BEST_ROWS, triton.next_power_of_2(num_rows))
        _best_kernel[(triton.cdiv(num_rows, rows),)](
            scores_N.contiguous(), tokens_N.contiguous(), out_N, *self._place(), num_rows, **self._sizes(),
            ROWS=rows, num_warps=4, **launch_options(scores_N.device),
        )  # fmt: skip
        return out_N

    def _sum(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, out_TD: Tensor, eps: float, *, norm: bool
    ) -> None:
        num_rows, width = x_TD.shape
        block = triton.next_power_of_2(width)
        _KERNELS[self.way(num_rows)][(num_rows,)](
            x_TD, residual_TD, weight_D, out_TD, *self._place(), num_rows, width, eps, **self._sizes(),
            NORM=norm, BLOCK=block, num_warps=max(1, min(16, block // 256)), **launch_options(x_TD.device),
        )  # fmt: skip

    def way(self, num_rows: int) -> Way:
        """How so many rows are summed up."""
        return Way.AT_ONCE if num_rows <= self._most_at_once else Way.BY_OWNER

    @property
    def _most_at_once(self) -> int:
        return MOST_ROWS_AT_ONCE.get(self.peers.size, FEW_ROWS_AT_ONCE)

    def _place(self) -> tuple[Tensor, Tensor, int]:
        return self.peers.addresses_R, self.peers.counts_AS, self.peers.rank

    def _sizes(self) -> dict[str, int]:
        peers = self.peers
        lanes = triton.next_power_of_2(peers.size)
        return {"SIZE": peers.size, "SLOTS": peers.num_slots, "SLOT_BYTES": peers.slot_bytes, "LANES": lanes}
