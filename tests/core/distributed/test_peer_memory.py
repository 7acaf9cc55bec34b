"""What the ranks' blocks hold before the first exchange, and how a rank is let go, by plain memory and a driver."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hookline.core.contracts import EMPTY, HEADER_BYTES, NUM_COPIES, PeerMemory
from hookline.core.distributed.cuda_driver import HANDLE_BYTES
from hookline.core.distributed.peer_memory import PeerBlocks, block_bytes, share_memory
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import RankError
from hookline.core.testing.model_suite.thread_ranks import ThreadRanks, on_ranks

CPU = torch.device("cpu")


class PlainDriver:
    """A rank's block is a tensor, which starts as something other than it should; all ranks see it by its address."""

    def __init__(self, unreachable: bool = False) -> None:
        self.unreachable = unreachable

    def allocate(self, num_bytes: int) -> int:
        self.block = torch.full((num_bytes,), 0x55, dtype=torch.uint8)
        return self.block.data_ptr()

    def handle(self, address: int) -> bytes:
        return address.to_bytes(HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        return 0 if self.unreachable else int.from_bytes(handle, "little")

    def close(self, address: int) -> None:
        pass

    def free(self, address: int) -> None:
        self.is_freed = True

    def fill(self, address: int, value: int, num_words: int) -> None:
        assert address == self.block.data_ptr()
        self.block[: 4 * num_words].view(torch.int32).fill_(value)


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
