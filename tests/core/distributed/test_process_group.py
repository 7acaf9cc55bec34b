"""Sums on a side stream, without a GPU: a stand-in for the stream computes a sum when somebody waits for it."""

from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.core.contracts import AttentionSpec, Runtime
from hookline.core.distributed import process_group
from hookline.core.distributed import ranks as rows
from hookline.core.distributed.aborts import Releases
from hookline.core.distributed.process_group import LOOPBACK, ProcessRanks, behind_secret, join, listen
from hookline.core.errors import RankError
from hookline.core.layers import RowParallelLinear
from hookline.core.testing.plain_kernels import PlainKernels

KERNELS = PlainKernels(None, cast(AttentionSpec, None))
WIDTH, EPS = 6, 1e-6


class Doubling:
    """A torch.distributed backend over two ranks that hold the same."""

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        tensors[0].mul_(2)


class LateSideStream:
    """Does all work when it is waited for, unless it is never waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, work: Any) -> Any:
        index = sum(entry.startswith("start") for entry in self.log)
        self.log.append(f"start {index}")

        def wait() -> None:
            self.log.append(f"wait {index}")
            work()

        return wait


def make(side_stream: LateSideStream | None) -> tuple[ProcessRanks, RowParallelLinear]:
    ranks = ProcessRanks(0, 2, Doubling(), side_stream=cast(Any, side_stream))
    layer = RowParallelLinear(2 * WIDTH, WIDTH, Runtime(torch.device("cpu"), torch.float64, ranks, KERNELS), bias=True)
    generator = torch.Generator().manual_seed(1)
    for weight in (layer.weight_OD, layer.bias_O):
        assert weight is not None
        weight.copy_(torch.randint(-3, 4, weight.shape, generator=generator))  # so that products are exact
    return ranks, layer


class Aborted:
    """A torch.distributed backend that is ended, as often as one likes."""

    def abort(self) -> None:
        pass


def test_what_ranks_share_is_given_back_once() -> None:
    given_back: list[str] = []
    shared = [lambda name=name: given_back.append(name) for name in ("exchange", "copies")]
    ranks = ProcessRanks(0, 2, Aborted(), shared=cast(Any, shared))
    ranks.close()
    ranks.close()
    assert given_back == ["copies", "exchange"]


def test_an_abort_that_does_not_end_keeps_neither_who_asks_for_it_nor_close_and_leaves_what_a_stuck_gpu_uses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    passing = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: clock.append(clock.pop() + seconds))
    monkeypatch.setattr(process_group, "time", passing)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(query=lambda: is_done))
    is_done, end, freed = False, Event(), list[int]()
    released, releases = list[int](), Releases()
    monkeypatch.setattr(Releases, "__call__", lambda self: released.append(len(self._calls)))
    releases._calls.append(lambda: None)
    groups = [SimpleNamespace(abort=lambda: end.wait(60)) for _ in range(2)]
    for group in groups:
        ranks = ProcessRanks(0, 2, group, releases=releases, shared=[lambda: freed.append(1)])
        ranks.abort()
        with pytest.raises(RankError, match="was aborted"):
            ranks.all_reduce(torch.ones(1))
        ranks.close()
        assert ("nccl is not closed" if is_done else "the GPU does not get done") in caplog.text
        assert ranks.group is None and len(freed) == is_done
        is_done = True
    assert released[:50] == [1] * 50, "again and again"
    assert not releases._calls, "but not once the memory may be gone"
    ranks.abort()
    released.clear()
    ranks.close()
    assert not released, "a second call does nothing"
    end.set()


def test_a_rank_is_let_go_before_its_memory_is_freed_even_if_nobody_was_seen_to_be_lost() -> None:
    calls: list[str] = []
    ranks = ProcessRanks(0, 2, Aborted(), shared=[lambda: calls.append("freed")])
    ranks.releases.add(lambda: calls.append("let go"))
    ranks.close()
    assert calls == ["let go", "freed"]


def test_a_device_that_computes_nothing_any_more_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(process_group, "CLOSE_S", 0.01)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(query=fail))
    end, freed = Event(), list[int]()
    ranks = ProcessRanks(0, 2, SimpleNamespace(abort=lambda: end.wait(60)), shared=[lambda: freed.append(1)])
    ranks.close()
    assert freed and ranks.group is None
    end.set()


@settings(deadline=None)
@given(num_rows=st.integers(0, 20), num_chunks=st.integers(1, 5), tile=st.integers(1, 4))
def test_chunks_whose_sums_are_taken_aside_equal_the_whole(num_rows: int, num_chunks: int, tile: int) -> None:
    x_TD, residual_TO = torch.randint(-3, 4, (2, num_rows, WIDTH)).double()
    weight_O = torch.linspace(0.5, 1.5, WIDTH).double()
    _, plain = make(None)
    expected_TO, expected_sum_TO = plain.add_rms_norm(x_TD, residual_TO.clone(), weight_O, EPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "ROW_TILE", tile)
        ranks, layer = make(LateSideStream())
        residual = rows.cut(residual_TO, num_chunks)
        partials = map(layer.local, rows.cut_like(x_TD, residual))
        normed_TO = rows.whole(ranks.add_rms_norm_each(KERNELS, partials, residual, weight_O, EPS))
    torch.testing.assert_close(normed_TO, expected_TO)
    assert torch.equal(rows.whole(residual), expected_sum_TO)


def test_every_sum_starts_before_the_first_is_waited_for_and_none_is_waited_for_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "ROW_TILE", 1)
    side_stream = LateSideStream()
    ranks, _ = make(side_stream)
    residual = rows.cut(torch.zeros(3, WIDTH).double(), 3)
    partials = rows.cut_like(torch.ones(3, WIDTH).double(), residual)
    norms = ranks.add_rms_norm_each(KERNELS, partials, residual, torch.ones(WIDTH).double(), EPS)
    for index, _ in enumerate(norms):
        side_stream.log.append(f"took {index}")
    starts = [f"start {index}" for index in range(3)]
    assert side_stream.log == [*starts, "wait 0", "took 0", "wait 1", "took 1", "wait 2", "took 2"]


def test_few_rows_and_cpu_ranks_are_not_cut() -> None:
    side_stream, _ = make(LateSideStream())
    plain, _ = make(None)
    assert [side_stream.num_chunks(num_rows) for num_rows in (0, 4095, 4096, 12288, 1 << 30)] == [
        1,
        1,
        2,
        3,
        rows.MOST_CHUNKS,
    ]
    assert plain.num_chunks(1 << 30) == 1


def test_who_reaches_the_store_without_its_secret_changes_none_of_the_engine_s_keys() -> None:
    store = listen()
    engine, stranger = behind_secret(store, "a secret"), join(LOOPBACK, store.port)
    engine.set("rank0", "address")
    for place in (stranger, behind_secret(stranger, "a guess")):
        place.set("rank0", "elsewhere")
    assert engine.get("rank0") == b"address"
