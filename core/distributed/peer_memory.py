"""Device memory that the GPUs of one host share: a block of each rank, which all others can read and write.

Copies between GPUs and kernels that exchange rows use it. Such kernels decide themselves on the layout of the memory
and on how they wait for each other; `core.contracts.Exchange` says what they compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hookline.core.contracts import EMPTY, HEADER_BYTES, NUM_COPIES, PeerMemory
from hookline.core.distributed.cuda_driver import HANDLE_BYTES, Driver
from hookline.core.distributed.ranks import LocalRanks, bytes_of_all
from hookline.core.errors import HooklineError


@dataclass(frozen=True)
class PeerBlocks:
    """The shared blocks as one rank sees them: addresses in this process, in order of rank."""

    rank: int
    addresses: list[int]
    num_bytes: int
    driver: Driver

    def memory(self, device: torch.device) -> Tensor:
        """The block of this rank as a tensor of bytes; valid until `close`."""
        return torch.as_tensor(_Bytes(self.addresses[self.rank], self.num_bytes), device=device)

    def close(self) -> None:
        """Close the others' blocks and free this rank's."""
        for rank, address in enumerate(self.addresses):
            if rank != self.rank:
                self.driver.close(address)
        self.driver.free(self.addresses[self.rank])


def all_reach_each_other(ranks: LocalRanks, device: torch.device) -> bool:
    """Whether each rank's GPU can read every other one's memory. False unless GPUs are numbered as the ranks are."""
    if not getattr(ranks, "shares_host", True):
        return False
    others = [device.index - ranks.rank + rank for rank in range(ranks.size) if rank != ranks.rank]
    return bool(ranks.smallest(all(torch.cuda.can_device_access_peer(device, other) for other in others)))


def share_blocks(ranks: LocalRanks, num_bytes: int, device: torch.device, driver: Driver) -> PeerBlocks | None:
    """Allocate a zeroed block on every rank and open all of them everywhere; None if some GPU cannot reach another.

    Raises: CapacityError if there is no room.
    """
    addresses = [0] * ranks.size
    addresses[ranks.rank] = driver.allocate(num_bytes)
    blocks = PeerBlocks(ranks.rank, addresses, num_bytes, driver)
    try:
        _open_others(ranks, addresses, device, driver)
        if ranks.smallest(all(addresses)):
            return blocks
    except BaseException:
        blocks.close()
        raise
    blocks.close()
    return None


def _open_others(ranks: LocalRanks, addresses: list[int], device: torch.device, driver: Driver) -> None:
    """Fill in the addresses of the other ranks' blocks; 0 if one cannot be reached, or its rank could not share it."""
    try:
        mine = driver.handle(addresses[ranks.rank])
    except HooklineError:
        mine = bytes(HANDLE_BYTES)
    for rank, theirs in enumerate(bytes_of_all(ranks, mine, device)):
        if rank != ranks.rank and any(theirs):
            addresses[rank] = driver.open(theirs)


class _Bytes:
    """Device memory that torch can make a tensor of without a copy, by __cuda_array_interface__."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def block_bytes(size: int, num_slots: int, slot_bytes: int) -> int:
    """Bytes of a rank's block."""
    return HEADER_BYTES + num_slots * NUM_COPIES * (size + 1) * slot_bytes


def share_memory(
    ranks: LocalRanks, num_slots: int, slot_bytes: int, device: torch.device, driver: Driver
) -> PeerMemory | None:
    """Allocate a block on every rank and open all of them everywhere; None if some GPU cannot be reached or signalled.

    Raises: CapacityError if there is no room.
    """
    blocks = share_blocks(ranks, block_bytes(ranks.size, num_slots, slot_bytes), device, driver)
    if blocks is None:
        return None
    try:
        peers = _emptied(ranks, num_slots, slot_bytes, device, blocks)
    except BaseException:
        blocks.close()
        raise
    if peers is None:
        blocks.close()
    return peers


def _emptied(
    ranks: LocalRanks, num_slots: int, slot_bytes: int, device: torch.device, blocks: PeerBlocks
) -> PeerMemory | None:
    """The blocks as memory for exchanges, after every rank has filled its own as the first exchange expects it.

    None if some rank cannot be let go.
    """
    here = blocks.addresses[ranks.rank]
    try:
        blocks.driver.signal(here, 0)
        can_let_go = True
    except HooklineError:
        can_let_go = False
    blocks.memory(device)[HEADER_BYTES:] = EMPTY
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if not ranks.smallest(can_let_go):  # no rank sends anything before this
        return None
    return PeerMemory(
        ranks.rank,
        ranks.size,
        num_slots,
        slot_bytes,
        torch.tensor(blocks.addresses, dtype=torch.int64, device=device),
        torch.zeros(num_slots, dtype=torch.int64, device=device),
        partial(blocks.driver.signal, here, 1),
        blocks.close,
    )
