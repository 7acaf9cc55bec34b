"""Collectives of ranks that directly see each other's memory: sums with the norm that follows, and best tokens.

The package peer_memory says where what is sent lies, and why no signals are needed.
Legend: T rows, D columns, R ranks, N rows of a draw.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import MIN_SLOT_BYTES, Exchange, PeerMemory
from hookline.plugins.kernels.norms import triton_norms
from hookline.plugins.kernels.peer_memory.triton_slots import (
    LEAST_ROWS_BY_ROWS,
    WORD_BYTES,
    Sends,
    Way,
    go_at_of,
    must_wait,
    place,
    place_arguments,
    place_constants,
    sums_by_rows,
)
from hookline.plugins.kernels.peer_memory.triton_sums import launch_sum, launch_sum_by_rows
from hookline.plugins.kernels.products import triton_thin
from hookline.plugins.kernels.products.triton_product import Kind
from hookline.plugins.kernels.products.triton_wide import (
    MAX_ROWS,
    WideScratch,
    empty_with_room,
    fitting_wide_tiling,
    send_wide_product,
)
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, next_power_of_2

BEST_ROWS = 128
"""Draws per program of `best_tokens`."""
PAIR_BYTES = 8
"""Bytes of a score and its token."""
assert PAIR_BYTES * BEST_ROWS <= MIN_SLOT_BYTES
assert MAX_ROWS < min(LEAST_ROWS_BY_ROWS.values()), (
    "after a product that sends its tiles every rank needs the residual whole"
)


@triton.jit(do_not_specialize=["num_rows"])
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
    go_at = go_at_of(addresses, rank)
    count = tl.load(counts + slot)
    bits = tl.load(scores_ptr + rows, mask=is_row, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
    token = tl.load(tokens_ptr + rows, mask=is_row, other=0) & 0x7FFFFFFF  # no pair is all ones, nor is NO_TOKEN's
    own = (bits << 32) | token
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
            is_better = (score > best) | (score != score) | (winner < 0)  # of equal ones the lowest rank's
            best = tl.where(is_better, score, best)
            winner = tl.where(is_better, pair & 0xFFFFFFFF, winner)
        waiting = must_wait(is_missing, go_at)
    empty = tl.full((ROWS,), -1, tl.int64)
    for source in tl.static_range(SIZE):
        tl.store(here + source * stride + lane, empty, mask=is_row & (ranks != source))
    tl.store(out_ptr + rows, tl.where(winner == 0x7FFFFFFF, -1, winner), mask=is_row)
    tl.store(counts + slot, count + 1)


class TritonExchange(Exchange):
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
        launch_sum(self.peers, self.way(len(x_TD)), x_TD, x_TD, x_TD, x_TD, 0.0, norm=False)
        return x_TD

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Exchange; overwrites both inputs. Others of another dtype or with gaps take a launch of their own."""
        if not _are_like(x_TD, residual_TD, weight_D):
            return triton_norms.add_rms_norm(self.all_reduce(x_TD), residual_TD, weight_D, eps)
        launch_sum(self.peers, self.way(len(x_TD)), x_TD, residual_TD, weight_D, x_TD, eps, norm=True)
        return x_TD, residual_TD

    def keeps_own_rows(self, residual_TD: Tensor) -> bool:
        """See Exchange."""
        return self.fits(residual_TD) and sums_by_rows(self.peers.size, len(residual_TD))

    def add_rms_norm_own(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See Exchange; overwrites x."""
        launch_sum_by_rows(self.peers, x_TD, residual_TD, weight_D, eps)
        return x_TD

    def linear_add_rms_norm(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """See Exchange: tiles of the product go straight to the ranks that sum them up."""
        if not _are_like(x_TD, residual_TO, norm_weight_O) or not self.fits(residual_TO):
            return None
        if not self._send(x_TD, weight_OD, bias_O):
            return None
        out_TO = empty_with_room(*residual_TO.shape, like=x_TD)
        way = self.way(len(x_TD))
        launch_sum(self.peers, way, out_TO, residual_TO, norm_weight_O, out_TO, eps, norm=True, sent=True)
        return out_TO, residual_TO

    def _send(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> bool:
        """Launch a product that sends its tiles, if there is a fast one; returns whether it was launched."""
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
        rows = min(BEST_ROWS, next_power_of_2(num_rows))
        _best_kernel[(cdiv(num_rows, rows),)](
            scores_N.contiguous(), tokens_N.contiguous(), out_N, *place_arguments(self.peers), num_rows,
            **place_constants(self.peers), ROWS=rows, num_warps=4, **launch_options(scores_N.device),
        )  # fmt: skip
        return out_N

    def way(self, num_rows: int) -> Way:
        """The way in which this many rows are summed up."""
        return Way.of(self.peers.size, num_rows)


def _are_like(x_TD: Tensor, *others: Tensor) -> bool:
    """Whether the others have its dtype, and no gaps."""
    return all(one.dtype == x_TD.dtype and one.is_contiguous() for one in others)
