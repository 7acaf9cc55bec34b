"""Sums by copies, with GPUs played by queues: whatever order their streams run in, all ranks get the plain result.

A rank's host puts operations into its streams and never waits; then the streams run, in an order drawn at random.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.core.contracts import AttentionSpec
from hookline.core.distributed.peer_copies import LET_GO, Layout, PeerCopies, SideStreams, normaliser
from hookline.core.distributed.ranks import MOST_CHUNKS, LocalRanks
from hookline.core.distributed.signal_board import SignalBoard
from hookline.core.testing.plain_kernels import PlainKernels

WIDTH, EPS = 3, 1e-6
WEIGHT_D = torch.linspace(0.5, 1.5, WIDTH).double()
PLAIN = PlainKernels(None, cast(AttentionSpec, None))
STREAMS = ("main", "send", "add", "hand")


class Gpu:
    """Streams of operations; each is a condition to wait for, and what to do then. Streams may share a queue."""

    def __init__(self, num_queues: int) -> None:
        queues: list[deque[Any]] = [deque() for _ in range(num_queues)]
        self.queues = {name: queues[min(index, num_queues - 1)] for index, name in enumerate(STREAMS)}
        self.current = "main"

    def put(self, work: Callable[[], object], condition: Callable[[], bool] = lambda: True) -> None:
        self.queues[self.current].append((condition, work))

    def side_stream(self, stream: str) -> Callable[[Callable[[], object]], Callable[[], None]]:
        """What core.distributed.side_stream.SideStream is on a GPU."""

        def launch(work: Callable[[], object]) -> Callable[[], None]:
            before, self.current = self.current, stream
            self._wait_for(before)
            work()
            self.current = before
            done = self._event(stream)
            return lambda: self.put(lambda: None, done)

        return launch

    def _wait_for(self, stream: str) -> None:
        self.put(lambda: None, self._event(stream))

    def _event(self, stream: str) -> Callable[[], bool]:
        reached: list[bool] = []
        self.queues[stream].append((lambda: True, lambda: reached.append(True)))
        return lambda: bool(reached)

    # The driver's part.

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        self.put(lambda: ctypes.memmove(to, source, num_bytes))

    def signal(self, address: int, value: int) -> None:
        self.put(lambda: setattr(ctypes.c_int32.from_address(address), "value", value))

    def wait(self, address: int, value: int) -> None:
        self.put(lambda: None, lambda: ctypes.c_int32(ctypes.c_int32.from_address(address).value - value).value >= 0)


class QueueingKernels(PlainKernels):
    """Adds up parts when its operation's turn comes."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def add_parts_rms_norm(
        self, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor
    ) -> None:
        def work() -> None:
            normed_TD, sum_TD = PLAIN.add_rms_norm(parts_PTD.sum(0), residual_TD, weight_D, eps)
            out_TD.copy_(normed_TD)
            residual_TD.copy_(sum_TD)

        self.gpu.put(work)


class Rank:
    """One rank's host program: a model of several layers, each a sum of its own multiple of the normed rows."""

    def __init__(
        self, rank: int, gpu: Gpu, layout: Layout, memories: list[Tensor], words: list[np.ndarray[Any, Any]]
    ) -> None:
        self.rank, self.gpu = rank, gpu
        side_streams = SideStreams(*(gpu.side_stream(stream) for stream in STREAMS[1:]))
        addresses = [memory_X.data_ptr() for memory_X in memories]
        rows = [row.ctypes.data for row in words]
        self.board = SignalBoard(rank, rows, words[rank], cast(Any, None), cast(Any, gpu))
        self.copies = PeerCopies(
            LocalRanks(rank, layout.size), layout, addresses, memories[rank], self.board, side_streams
        )

    def step(self, hidden_TD: Tensor, chunk_rows: list[int], num_layers: int) -> list[Tensor]:
        """Queue a step; the tensors that the main stream will have filled when all is done."""
        residual = self.residual = [chunk_TD.clone() for chunk_TD in hidden_TD.split(chunk_rows)]
        normed: Iterable[Tensor] = [chunk_TD.clone() for chunk_TD in residual]
        buffers = [torch.empty_like(chunk_TD) for chunk_TD in residual]
        for layer in range(num_layers):
            products = self.products(layer, normed, buffers)
            normed = self.copies.add_rms_norm_each(QueueingKernels(self.gpu), products, residual, WEIGHT_D, EPS)
            normed = self.reusing_memory(normed, buffers)
        results = [torch.empty_like(chunk_TD) for chunk_TD in residual]
        for result_TD, normed_TD in zip(results, normed, strict=True):
            self.gpu.put(lambda result_TD=result_TD, normed_TD=normed_TD: result_TD.copy_(normed_TD))
        return results

    def products(self, layer: int, normed: Iterable[Tensor], buffers: list[Tensor]) -> Iterator[Tensor]:
        for normed_TD, buffer_TD in zip(normed, buffers, strict=True):
            self.gpu.put(
                lambda normed_TD=normed_TD, buffer_TD=buffer_TD: buffer_TD.copy_(product(normed_TD, layer, self.rank))
            )
            yield buffer_TD

    def reusing_memory(self, normed: Iterable[Tensor], buffers: list[Tensor]) -> Iterator[Tensor]:
        """As torch's allocator may give the memory of a partial to the main stream's next operation."""
        for normed_TD, buffer_TD in zip(normed, buffers, strict=True):
            self.gpu.put(lambda buffer_TD=buffer_TD: buffer_TD.fill_(torch.nan))
            yield normed_TD


def product(normed_TD: Tensor, layer: int, rank: int) -> Tensor:
    return normed_TD * (rank + 1.5) + layer


def expected(hidden_TD: Tensor, num_layers: int, size: int) -> tuple[Tensor, Tensor]:
    """The norm and the residual."""
    normed_TD, residual_TD = hidden_TD, hidden_TD.clone()
    for layer in range(num_layers):
        total_TD = sum((product(normed_TD, layer, rank) for rank in range(size)), torch.zeros(()).double())
        normed_TD, residual_TD = PLAIN.add_rms_norm(total_TD, residual_TD, WEIGHT_D, EPS)
    return normed_TD, residual_TD


def make(size: int, num_tokens: int, num_queues: int) -> tuple[list[Gpu], list[Rank]]:
    layout = Layout.of(size, num_tokens, WIDTH * 8)
    memories = [torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8) for _ in range(size)]  # NaN
    words = [np.zeros(layout.num_signals, dtype=np.uint32) for _ in range(size)]
    gpus = [Gpu(num_queues) for _ in range(size)]
    return gpus, [Rank(rank, gpu, layout, memories, words) for rank, gpu in enumerate(gpus)]


def run(gpus: list[Gpu], order: random.Random) -> int:
    """Run all queues; returns how many operations could never be done."""
    queues = list({id(queue): queue for gpu in gpus for queue in gpu.queues.values()}.values())
    favours = [order.random() ** 4 for _ in queues]
    while any(queues):
        ready = [index for index, queue in enumerate(queues) if queue and queue[0][0]()]
        if not ready:
            return sum(map(len, queues))
        (chosen,) = order.choices(ready, [favours[index] + 1e-9 for index in ready])
        queues[chosen].popleft()[1]()
    return 0


@pytest.mark.slow
@settings(deadline=None)
@given(
    size=st.integers(2, 4),
    steps=st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=2, max_size=MOST_CHUNKS), st.integers(1, 4)),
        min_size=1,
        max_size=3,
    ),
    num_queues=st.integers(1, len(STREAMS)),
    order=st.randoms(use_true_random=False),
)
def test_every_rank_gets_the_plain_result_in_whatever_order_streams_run(
    size: int, steps: list[tuple[list[int], int]], num_queues: int, order: random.Random
) -> None:
    gpus, ranks = make(size, max(sum(chunk_rows) for chunk_rows, _ in steps), num_queues)
    inputs = [torch.randn(sum(chunk_rows), WIDTH).double() for chunk_rows, _ in steps]
    results = [[rank.step(hidden_TD, *step) for hidden_TD, step in zip(inputs, steps, strict=True)] for rank in ranks]
    assert run(gpus, random.Random(order.random())) == 0
    for index, (hidden_TD, (_, num_layers)) in enumerate(zip(inputs, steps, strict=True)):
        found = [torch.cat(of_rank[index]) for of_rank in results]
        expected_TD, residual_TD = expected(hidden_TD, num_layers, size)
        torch.testing.assert_close(found[0], expected_TD)
        assert all(torch.equal(one, found[0]) for one in found)
    is_own_RT = torch.stack([rank.copies.is_own(rank.residual) for rank in ranks])
    assert is_own_RT.sum(0).tolist() == [1] * len(residual_TD)
    for rank, is_own_T in zip(ranks, is_own_RT, strict=True):
        torch.testing.assert_close(torch.cat(rank.residual)[is_own_T], residual_TD[is_own_T])


@pytest.mark.parametrize("count", [0, LET_GO, (1 << 32) - 2], ids=["first", "after_days", "around_32_bits"])
def test_a_rank_that_is_let_go_ends_its_step_without_the_others(count: int) -> None:
    gpus, ranks = make(3, 16, len(STREAMS))
    ranks[0].board.words[:] = count
    ranks[0].copies._counts = [count] * MOST_CHUNKS
    ranks[0].step(torch.ones(16, WIDTH).double(), [8, 8], 3)
    assert run(gpus[:1], random.Random(0)) > 0
    ranks[0].copies.let_go()
    assert run(gpus[:1], random.Random(0)) == 0


def test_what_another_rank_still_signals_undoes_letting_go_so_it_is_done_again() -> None:
    gpus, ranks = make(3, 16, len(STREAMS))
    copies = ranks[0].copies
    ranks[0].step(torch.ones(16, WIDTH).double(), [8, 8], 3)
    copies.let_go()
    gpus[1].signal(copies.board.at(0, copies.layout.partial_signal(0, 1)), 1)
    assert run(gpus[1:2], random.Random(0)) == 0 and run(gpus[:1], random.Random(0)) > 0
    copies.let_go()
    assert run(gpus[:1], random.Random(0)) == 0


def test_a_partial_whose_rows_lie_apart_is_summed_all_the_same() -> None:
    gpus, (rank,) = make(1, 6, 1)
    partial_TD, residual_TD = torch.randn(WIDTH, 6).double().T, torch.randn(6, WIDTH).double()
    expected_TD = PLAIN.add_rms_norm(partial_TD, residual_TD.clone(), WEIGHT_D, EPS)[0]
    kernels = QueueingKernels(gpus[0])
    norms = rank.copies.add_rms_norm_each(kernels, [partial_TD], [residual_TD], WEIGHT_D, EPS)
    normed_TD = next(norms)
    assert run(gpus, random.Random(0)) == 0 and torch.equal(normed_TD, expected_TD)


def test_what_has_no_room_is_not_taken() -> None:
    _, (rank, _) = make(2, 16, 1)

    def fits(*chunk_rows: int, width: int = WIDTH) -> bool:
        return rank.copies.fits([torch.zeros(num_rows, width).double() for num_rows in chunk_rows])

    assert fits(9, 7) and fits(5, 5, 5, 1)
    assert not fits(4, 4, 4, 2, 2) and not fits(20, 20) and not fits(9, 7, width=WIDTH + 1)
    assert not rank.copies.fits([torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)]), "another dtype"


def test_kernels_that_add_up_no_parts_give_the_same() -> None:
    parts_RPD, residual_PD = torch.randn(2, 4, WIDTH).double(), torch.randn(4, WIDTH).double()
    expected_PD, expected_sum_PD = PLAIN.add_rms_norm(parts_RPD.sum(0), residual_PD.clone(), WEIGHT_D, EPS)
    out_PD = torch.empty_like(residual_PD)
    normaliser(PLAIN, WEIGHT_D, EPS)(parts_RPD, residual_PD, out_PD)
    assert torch.equal(out_PD, expected_PD) and torch.equal(residual_PD, expected_sum_PD)


@pytest.mark.slow
@settings(deadline=None)
@given(size=st.integers(2, 8), num_tokens=st.integers(1, 100), row_bytes=st.integers(1, 64))
def test_nothing_in_the_memory_overlaps(size: int, num_tokens: int, row_bytes: int) -> None:
    layout = Layout.of(size, num_tokens, row_bytes)
    words = []
    for chunk in range(MOST_CHUNKS):
        for source in range(size):
            words += [layout.partial_signal(chunk, source), layout.result_signal(chunk, source)]
    assert len(set(words)) == len(words) and max(words) < layout.num_signals
    assert layout.partial_row(layout.num_rows) == layout.result_row(0)
    assert layout.result_row(layout.num_rows) == layout.num_bytes
