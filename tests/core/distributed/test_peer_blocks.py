"""Blocks that ranks share, as threads with a driver that hands out numbers."""

from typing import Any, cast

import pytest
import torch

from hookline.core.distributed import peer_memory as peer_blocks
from hookline.core.distributed.cuda_driver import HANDLE_BYTES
from hookline.core.distributed.peer_memory import PeerBlocks, share_blocks, signals_arrive
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import HooklineError, RankError
from hookline.core.testing.model_suite.thread_ranks import on_ranks

CPU = torch.device("cpu")


class FakeDriver:
    """Rank r's block lies at (r + 1) * 1000; others see it 7 further."""

    def __init__(self, rank: int, unreachable: int = -1, words: dict[int, int] | None = None) -> None:
        self.rank, self.unreachable, self.words = rank, unreachable, {} if words is None else words
        self.closed: list[int] = []
        self.waited: list[int] = []

    def allocate(self, num_bytes: int) -> int:
        return (self.rank + 1) * 1000

    def handle(self, address: int) -> bytes:
        return address.to_bytes(HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        return 0 if address == (self.unreachable + 1) * 1000 else address + 7

    def close(self, address: int) -> None:
        self.closed.append(address)

    def free(self, address: int) -> None:
        self.closed.append(-address)

    def signal(self, address: int, value: int) -> None:
        if self.rank == self.unreachable:
            raise HooklineError("no signals here")
        self.words[address - 7] = value

    def wait(self, address: int, value: int) -> None:
        if self.rank == self.unreachable - 2:
            raise HooklineError("no waits here")
        self.waited.append(address)


def test_every_rank_has_every_block_by_its_own_addresses_and_gives_them_back() -> None:
    def work(ranks: LocalRanks) -> tuple[list[int], list[int]]:
        driver = FakeDriver(ranks.rank)
        blocks = share_blocks(ranks, 64, CPU, cast(Any, driver))
        assert blocks is not None
        blocks.close()
        return blocks.addresses, driver.closed

    assert on_ranks(3, work) == [
        ([1000, 2007, 3007], [2007, 3007, -1000]),
        ([1007, 2000, 3007], [1007, 3007, -2000]),
        ([1007, 2007, 3000], [1007, 2007, -3000]),
    ]


def test_one_that_cannot_be_reached_is_nothing_for_all_and_everything_is_given_back() -> None:
    def work(ranks: LocalRanks) -> tuple[Any, list[int]]:
        driver = FakeDriver(ranks.rank, unreachable=1)
        return share_blocks(ranks, 64, CPU, cast(Any, driver)), driver.closed

    assert on_ranks(2, work) == [(None, [0, -1000]), (None, [1007, -2000])]


def test_a_block_without_a_handle_is_one_that_nobody_reaches() -> None:
    class WithoutHandle(FakeDriver):
        def handle(self, address: int) -> bytes:
            if self.rank == 1:
                raise HooklineError("no handle here")
            return super().handle(address)

    def work(ranks: LocalRanks) -> tuple[Any, list[int]]:
        driver = WithoutHandle(ranks.rank)
        return share_blocks(ranks, 64, CPU, cast(Any, driver)), driver.closed

    assert on_ranks(2, work) == [(None, [0, -1000]), (None, [1007, -2000])]


def test_blocks_are_given_back_where_another_rank_is_lost_meanwhile() -> None:
    driver = FakeDriver(0)

    class Lost(LocalRanks):
        def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
            raise RankError("a collective broke off")

    with pytest.raises(RankError):
        share_blocks(Lost(0, 2), 64, CPU, cast(Any, driver))
    assert driver.closed == [0, -1000]


class PlainBlocks(PeerBlocks):
    """Its memory is what signals were written."""

    def memory(self, device: torch.device) -> torch.Tensor:
        words = torch.zeros(16, dtype=torch.int32)
        for address, value in cast(Any, self.driver).words.items():
            if 0 <= address - self.addresses[self.rank] < 64:
                words[(address - self.addresses[self.rank]) // 4] = value
        return words.view(torch.uint8)


@pytest.mark.parametrize(
    ("unreachable", "are_lost", "arrive"), [(-1, False, True), (0, False, False), (-1, True, False), (2, False, False)]
)
def test_signals_are_tried_before_anything_waits_for_one(
    monkeypatch: pytest.MonkeyPatch, unreachable: int, are_lost: bool, arrive: bool
) -> None:
    monkeypatch.setattr(peer_blocks.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(peer_blocks.torch.cuda, "current_device", lambda: 0)
    words: dict[int, int] = {}

    def work(ranks: LocalRanks) -> tuple[bool, list[int]]:
        driver = FakeDriver(ranks.rank, unreachable, {} if are_lost else words)
        addresses = [(rank + 1) * 1000 + 7 * (rank != ranks.rank) for rank in range(2)]
        blocks = PlainBlocks(ranks.rank, addresses, 64, cast(Any, driver))
        return signals_arrive(ranks, blocks, [8, 12]), driver.waited

    found = on_ranks(2, work)
    assert [does_arrive for does_arrive, _ in found] == [arrive, arrive]
    assert not arrive or [waited for _, waited in found] == [[1012], [2008]]
