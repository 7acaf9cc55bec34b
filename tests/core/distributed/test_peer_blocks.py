"""Blocks that ranks share, as threads with a driver that hands out numbers."""

from typing import Any, cast

import pytest
import torch

from hookline.core.distributed.cuda_driver import HANDLE_BYTES
from hookline.core.distributed.peer_memory import share_blocks
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import HooklineError, RankError
from hookline.core.testing.model_suite.thread_ranks import on_ranks

CPU = torch.device("cpu")


class FakeDriver:
    """Rank r's block lies at (r + 1) * 1000; others see it 7 further."""

    def __init__(self, rank: int, unreachable: int = -1) -> None:
        self.rank, self.unreachable = rank, unreachable
        self.closed: list[int] = []

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
