"""Sums of many rows over the ranks of one host: copy engines move one chunk while the next chunk is multiplied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookline.core.distributed.ranks import MOST_CHUNKS, LocalRanks
from hookline.core.distributed.signal_board import SignalBoard

if TYPE_CHECKING:
    from hookline.core.contracts import Kernels


@dataclass(frozen=True)
class Layout:
    """Offsets in a rank's shared memory (partial sums, then results) and in its row of the signal board.

    Rows are counted with each chunk rounded up to R equal shares.
    """

    size: int
    num_rows: int
    row_bytes: int

    @classmethod
    def of(cls, size: int, num_tokens: int, row_bytes: int) -> Layout:
        """The layout for `size` ranks and steps of up to `num_tokens` tokens."""
        return cls(size, num_tokens + MOST_CHUNKS * size, row_bytes)

    @property
    def num_signals(self) -> int:
        """Words for signals: one for each chunk, kind and rank."""
        return MOST_CHUNKS * 2 * self.size

    @property
    def results(self) -> int:
        """Where results start, in bytes."""
        return self.num_rows * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of a rank's memory."""
        return self.results + self.num_rows * self.row_bytes

    def partial_row(self, row: int) -> int:
        """Offset of a row of partials."""
        return row * self.row_bytes

    def result_row(self, row: int) -> int:
        """Offset of a row of results."""
        return self.results + row * self.row_bytes

    def partial_signal(self, chunk: int, source: int) -> int:
        """The word that signals the arrival of a rank's partial sum of a chunk."""
        return chunk * 2 * self.size + source

    def result_signal(self, chunk: int, source: int) -> int:
        """The word that signals the arrival of a rank's share of the result."""
        return (chunk * 2 + 1) * self.size + source


LET_GO = 0x4000_0000
"""A signal's value beyond any count, so that all waits for it end. Waits compare modulo 2**32, since counts grow
without end."""
SideStream = Callable[[Callable[[], object]], Callable[[], None]]
Normalise = Callable[[Tensor, Tensor, Tensor], None]
"""Takes parts_RPD, residual_PD and the output; writes the sum over the residual."""


@dataclass(frozen=True)
class SideStreams:
    """Streams for work beside the products: sending partial sums, adding them up, and sending results to all ranks."""

    send: SideStream
    add: SideStream
    hand_round: SideStream


class PeerCopies:
    """Sums by copies, on one rank. addresses: of every rank's memory, in this process. memory_X: its own, as bytes."""

    def __init__(
        self,
        ranks: LocalRanks,
        layout: Layout,
        addresses: list[int],
        memory_X: Tensor,
        board: SignalBoard,
        side_streams: SideStreams,
    ) -> None:
        self.rank, self.size, self.layout, self.driver = ranks.rank, ranks.size, layout, board.driver
        self.board = board
        self.addresses, self.side_streams, self._memory_X = addresses, side_streams, memory_X
        self.others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]
        self._counts = [0] * MOST_CHUNKS

    def fits(self, chunks: list[Tensor]) -> bool:
        """Whether these chunks fit the shared memory."""
        num_rows = sum(largest_share(len(chunk_TD), self.size) * self.size for chunk_TD in chunks)
        row_bytes = {chunk_TD.shape[1] * chunk_TD.element_size() for chunk_TD in chunks}
        return len(chunks) <= MOST_CHUNKS and num_rows <= self.layout.num_rows and row_bytes == {self.layout.row_bytes}

    def add_rms_norm_each(
        self, kernels: Kernels, partials: Iterable[Tensor], residual_chunks: list[Tensor], weight_D: Tensor, eps: float
    ) -> Iterator[Tensor]:
        """See Ranks. Each rank keeps only its own share of a residual up to date.

        Device: no host sync; not for CUDA graphs, since signals count calls on the host.
        """
        normalise = normaliser(kernels, weight_D, eps)
        under_way, first_row = deque[_Sum](), 0
        for chunk, (partial_TD, residual_TD) in enumerate(zip(partials, residual_chunks, strict=True)):
            one = _Sum(self, chunk, first_row, partial_TD)
            one.start(residual_TD, normalise)
            under_way.append(one)
            first_row += one.share * self.size
        while under_way:
            one = under_way.popleft()
            one.wait()
            yield one.result_TD

    def is_own(self, chunks: list[Tensor]) -> Tensor:
        """Whether this rank adds up each row, and so keeps it up to date: (T,) bool, on the chunks' device."""
        is_own = [torch.zeros(len(chunk_TD), dtype=torch.bool, device=chunk_TD.device) for chunk_TD in chunks]
        for is_own_T in is_own:
            is_own_T[own_rows(len(is_own_T), self.rank, self.size)] = True
        return torch.cat(is_own)

    def let_go(self) -> None:
        """End all waits of this rank's GPU for other ranks; its later results are meaningless.

        From any thread, and at once, even while the GPU is busy. A signal that another GPU still writes may undo this:
        call it again once the other ranks are gone.
        """
        self.board.words[: self.layout.num_signals] = (max(self._counts) + LET_GO) % (1 << 32)

    def count(self, chunk: int) -> int:
        """Count a call; returns the value of the chunk's signals in it. Every rank makes the same calls."""
        self._counts[chunk] += 1
        return self._counts[chunk]

    def rows(self, offset: int, first_row: int, num_rows: int, like: Tensor) -> Tensor:
        """Rows of this rank's own memory, as a tensor with the dtype and width of `like`."""
        row_bytes = self.layout.row_bytes
        memory_X = self._memory_X[offset + first_row * row_bytes :][: num_rows * row_bytes]
        return memory_X.view(like.dtype).view(num_rows, like.shape[1])


class _Sum:
    """The sum of one chunk: partial sums are sent to the ranks that own the rows, added and normalised there, and the
    results are sent to all ranks.
    """

    def __init__(self, copies: PeerCopies, chunk: int, first_row: int, partial_TD: Tensor) -> None:
        self.copies, self.chunk, self.first_row, self.partial_TD = copies, chunk, first_row, partial_TD.contiguous()
        self.share, self.count = largest_share(len(partial_TD), copies.size), copies.count(chunk)
        self.result_TD = copies.rows(copies.layout.results, first_row, len(partial_TD), partial_TD)
        self._added: Callable[[], None] | None = None

    def start(self, residual_TD: Tensor, normalise: Normalise) -> None:
        """Launch the copies and the sum, but not the wait."""
        self.copies.side_streams.send(self._send)
        self._added = self.copies.side_streams.add(lambda: self._add(residual_TD, normalise))

    def wait(self) -> None:
        """Let the current stream wait for the result."""
        assert self._added is not None
        self._added()
        self._wait_for(self.copies.layout.result_signal)

    def _own(self, rank: int) -> slice:
        """Which rows of the chunk a rank owns."""
        return own_rows(len(self.partial_TD), rank, self.copies.size)

    def _send(self) -> None:
        copies, layout = self.copies, self.copies.layout
        for other in copies.others:
            there, part_PD = copies.addresses[other], self.partial_TD[self._own(other)]
            row = self.first_row + copies.rank * self.share
            copies.driver.copy(there + layout.partial_row(row), part_PD.data_ptr(), part_PD.nbytes)
            copies.driver.signal(copies.board.at(other, layout.partial_signal(self.chunk, copies.rank)), self.count)

    def _add(self, residual_TD: Tensor, normalise: Normalise) -> None:
        copies, own = self.copies, self._own(self.copies.rank)
        parts_TD = copies.rows(0, self.first_row, self.share * copies.size, self.partial_TD)
        parts_RPD = parts_TD.view(copies.size, self.share, -1)[:, : own.stop - own.start]
        mine_PD = self.partial_TD[own]
        copies.driver.copy(parts_RPD[copies.rank].data_ptr(), mine_PD.data_ptr(), mine_PD.nbytes)
        self._wait_for(copies.layout.partial_signal)
        normalise(parts_RPD, residual_TD[own], self.result_TD[own])
        copies.side_streams.hand_round(self._hand_round)

    def _hand_round(self) -> None:
        copies, layout = self.copies, self.copies.layout
        own = self._own(copies.rank)
        part_PD = self.result_TD[own]
        for other in copies.others:
            there, row = copies.addresses[other], self.first_row + own.start
            copies.driver.copy(there + layout.result_row(row), part_PD.data_ptr(), part_PD.nbytes)
            copies.driver.signal(copies.board.at(other, layout.result_signal(self.chunk, copies.rank)), self.count)

    def _wait_for(self, signal: Callable[[int, int], int]) -> None:
        copies = self.copies
        for other in copies.others:
            copies.driver.wait(copies.board.at(copies.rank, signal(self.chunk, other)), self.count)


def largest_share(num_rows: int, num_ranks: int) -> int:
    """Rows of a chunk that the first ranks own each; the last ranks may own fewer, or none."""
    return -(-num_rows // num_ranks)


def own_rows(num_rows: int, rank: int, num_ranks: int) -> slice:
    """The rows that a rank owns of a chunk."""
    share = largest_share(num_rows, num_ranks)
    return slice(min(rank * share, num_rows), min((rank + 1) * share, num_rows))


def normaliser(kernels: Kernels, weight_D: Tensor, eps: float) -> Normalise:
    """The kernels' add_parts_rms_norm with this weight."""
    return lambda parts_RPD, residual_PD, out_PD: kernels.add_parts_rms_norm(
        parts_RPD, residual_PD, weight_D, eps, out_PD
    )
