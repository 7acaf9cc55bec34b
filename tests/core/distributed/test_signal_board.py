"""Words that ranks share, as threads with a driver that writes host memory at once."""

import ctypes
import os
from tempfile import TemporaryFile
from typing import Any, cast

import pytest
import torch

from hookline.core.distributed import signal_board
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.distributed.signal_board import ROW_BYTES, SignalBoard, share_board
from hookline.core.errors import HooklineError, RankError
from hookline.core.testing.model_suite.thread_ranks import ThreadRanks, on_ranks
from hookline.core.util.shared_memory import SharedWords

CPU = torch.device("cpu")


class HostDriver:
    """Rank 1's lacks one call, or its writes get lost."""

    def __init__(self, rank: int, lacking: str = "") -> None:
        self.lacking = lacking if rank == 1 else ""
        self.registered: dict[int, int] = {}
        self.waited: list[int] = []

    def register(self, address: int, num_bytes: int) -> int:
        self._need("register")
        self.registered[address] = num_bytes
        return address

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def signal(self, address: int, value: int) -> None:
        self._need("signal")
        if self.lacking != "arrival":
            ctypes.c_uint32.from_address(address).value = value

    def wait(self, address: int, value: int) -> None:
        self._need("wait")
        assert ctypes.c_uint32.from_address(address).value == value, "it would wait for ever"
        self.waited.append(address)

    def _need(self, name: str) -> None:
        if self.lacking == name:
            raise HooklineError(f"no {name} here")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)


def share(ranks: LocalRanks, lacking: str = "") -> tuple[SignalBoard | None, HostDriver]:
    driver = HostDriver(ranks.rank, lacking)
    return share_board(ranks, 100, CPU, cast(Any, driver)), driver


def test_what_one_rank_writes_the_others_see_in_their_rows_and_memory_is_given_back() -> None:
    def work(ranks: LocalRanks) -> tuple[list[int], int]:
        board, driver = share(ranks)
        assert board is not None and not board.words[:100].any() and len(driver.waited) == 2
        assert set(driver.registered.values()) == {3 * ROW_BYTES} and board.memory.fd == -1
        ranks.smallest(0)  # all have looked
        for other in range(3):
            driver.signal(board.at(other, 10 + ranks.rank), (1 << 32) - 1 - ranks.rank)
        ranks.smallest(0)
        board.close()
        return board.words[10:14].tolist(), len(driver.registered)

    assert on_ranks(3, work) == [([(1 << 32) - 1, (1 << 32) - 2, (1 << 32) - 3, 0], 0)] * 3


@pytest.mark.parametrize("lacking", ("register", "signal", "arrival", "wait"))
def test_if_signals_do_not_get_from_each_rank_to_each_there_is_no_board(lacking: str) -> None:
    found = on_ranks(2, lambda ranks: share(ranks, lacking))
    assert [board for board, _ in found] == [None, None] and not any(driver.registered for _, driver in found)


@pytest.mark.parametrize("path", ("/nowhere", "/proc/{pid}/fd/{other}", "/dev/null"))
def test_where_one_rank_cannot_open_the_memory_there_is_no_board(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """As in a container of its own, where another file may have its path."""
    with TemporaryFile() as other:
        other.truncate(1 << 20)
        elsewhere = path.format(pid=os.getpid(), other=other.fileno())
        opened = signal_board._opened
        monkeypatch.setattr(signal_board, "_opened", lambda told, num: opened(f"{told.split()[0]} {elsewhere}", num))
        open_before = len(os.listdir("/proc/self/fd"))
        found = on_ranks(2, share)
        assert len(os.listdir("/proc/self/fd")) == open_before
    assert [board for board, _ in found] == [None, None] and not any(driver.registered for _, driver in found)


def test_where_no_memory_can_be_made_there_is_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(num_words: int) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(SharedWords, "create", fail)
    assert [board for board, _ in on_ranks(2, share)] == [None, None]


@pytest.mark.parametrize("collective", range(4))
def test_a_rank_that_is_lost_meanwhile_leaves_nothing_registered_or_open(collective: int) -> None:
    class Losing(ThreadRanks):
        def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
            self.count()
            return x

        def smallest(self, value: int) -> int:
            self.count()
            return value

        def count(self) -> None:
            if len(counted) == collective:
                raise RankError("a collective broke off")
            counted.append(1)

    counted: list[int] = []
    driver, open_before = HostDriver(0), len(os.listdir("/proc/self/fd"))
    with pytest.raises(RankError):
        share_board(Losing(0, 1, None), 100, CPU, cast(Any, driver))
    assert not driver.registered and len(os.listdir("/proc/self/fd")) == open_before
