"""What the ranks' blocks hold before the first exchange, and how a rank is let go, by plain memory and a driver."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hookline.core.contracts import EMPTY, HEADER_BYTES, NUM_COPIES, PeerMemory
from hookline.core.distributed.cuda_driver import HANDLE_BYTES
from hookline.core.distributed.peer_memory import PeerBlocks, block_bytes, share_memory
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import HooklineError, RankError
from hookline.core.testing.model_suite.thread_ranks import ThreadRanks, on_ranks

CPU = torch.device("cpu")


class PlainDriver:
    """A rank's block is a tensor, whose data start as what they should not; all ranks see it by its address."""

    def __init__(self, unreachable: bool = False, signals: bool = True) -> None:
        self.unreachable, self.signals, self.is_freed = unreachable, signals, False

    def allocate(self, num_bytes: int) -> int:
        self.block = torch.full((num_bytes,), 0x55, dtype=torch.uint8)
        self.block[:HEADER_BYTES] = 0
        return self.block.data_ptr()

    def handle(self, address: int) -> bytes:
        return address.to_bytes(HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        return 0 if self.unreachable else int.from_bytes(handle, "little")

    def close(self, address: int) -> None:
        pass

    def free(self, address: int) -> None:
        self.is_freed = True

    def signal(self, address: int, value: int) -> None:
        assert address == self.block.data_ptr()
        if not self.signals:
            raise HooklineError("the CUDA driver has no cuStreamWriteValue32_v2")
        self.block[:4].view(torch.int32).fill_(value)


@pytest.fixture(autouse=True)
def plain_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerBlocks, "memory", lambda blocks, device: cast(Any, blocks.driver).block)


def share(ranks: LocalRanks, driver: PlainDriver) -> PeerMemory | None:
    return share_memory(ranks, 10, 2048, CPU, cast(Any, driver))


def test_a_block_is_a_header_then_two_copies_of_each_slot_with_a_place_for_each_rank_and_one_for_sums() -> None:
    assert block_bytes(3, 10, 2048) == HEADER_BYTES + 10 * NUM_COPIES * (3 + 1) * 2048


def test_data_are_empty_at_first_and_the_header_says_when_a_rank_is_let_go() -> None:
    def work(ranks: LocalRanks) -> list[int]:
        driver = PlainDriver()
        peers = share(ranks, driver)
        assert peers is not None and peers.counts_S.tolist() == [0] * 10
        assert len(driver.block) == block_bytes(2, 10, 2048) and not driver.block[:HEADER_BYTES].any()
        assert (driver.block[HEADER_BYTES:] == EMPTY).all()
        assert peers.addresses_R[ranks.rank] == driver.block.data_ptr()
        peers.let_go()
        assert driver.block[:4].view(torch.int32).item() == 1 and (driver.block[HEADER_BYTES:] == EMPTY).all()
        return [int(address) for address in peers.addresses_R]

    first, second = on_ranks(2, work)
    assert first == second and len(set(first)) == 2


def test_blocks_that_cannot_be_opened_are_no_memory() -> None:
    assert on_ranks(2, lambda ranks: share(ranks, PlainDriver(unreachable=ranks.rank == 1))) == [None, None]


def test_memory_by_which_some_rank_could_not_be_let_go_is_given_back_on_all() -> None:
    drivers = [PlainDriver(), PlainDriver(signals=False)]
    assert on_ranks(2, lambda ranks: share(ranks, drivers[ranks.rank])) == [None, None]
    assert all(driver.is_freed for driver in drivers)


def test_a_rank_that_is_lost_before_all_are_ready_leaves_no_block_behind() -> None:
    class Losing(ThreadRanks):
        def smallest(self, value: int) -> int:
            if value is True and self.rank == 0 and len(seen) == 1:
                raise RankError("a collective broke off")
            seen.append(value)
            return super().smallest(value)

    seen: list[int] = []
    driver = PlainDriver()
    meeting = SimpleNamespace(exchange=lambda rank, part: [part])
    with pytest.raises(RankError):
        share_memory(Losing(0, 1, meeting), 10, 2048, CPU, cast(Any, driver))
    assert driver.is_freed
