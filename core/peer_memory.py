"""Device memory that kernels of one host's GPUs exchange rows through: each rank has a block, and all addresses.

What kernels write there, and how they wait for each other, is theirs to know; `core.contracts.Exchange` says what they
make of it.
Legend: R ranks, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.cuda_driver import Driver
from core.parallel import Ranks
from core.peer_blocks import PeerBlocks, share_blocks

HEADER_BYTES = 128
"""Of a block, zero until its rank is let go."""
WORD_BYTES = 4
"""Of what says that."""
NUM_COPIES = 2
"""Of each slot: the kernels of one exchange fill the other while slower ranks are still in the exchange before."""
MIN_SLOT_BYTES = 2048
EMPTY = 0xFF
"""What each byte of data is at first."""


@dataclass(frozen=True)
class PeerMemory:
    """One rank's view. A slot takes what one program exchanges at a time.

    slot_bytes: most of a slot that come from one rank, a multiple of 16.
    addresses_R: (R,) int64, each rank's block: a header, whose first 4 bytes become nonzero when the rank is let go,
    then data, (slots, copies, R + 1, slot_bytes), of which all bytes are 0xFF at first.
    counts_S: (slots,) int64, how often this rank has used each slot so far.
    """

    rank: int
    size: int
    num_slots: int
    slot_bytes: int
    addresses_R: Tensor
    counts_S: Tensor
    let_go: Callable[[], None] = field(default=lambda: None)
    """Frees kernels of this rank that wait for others, from another stream; what they compute is then worthless."""
    close: Callable[[], None] = field(default=lambda: None)


def block_bytes(size: int, num_slots: int, slot_bytes: int) -> int:
    """Bytes of a rank's block."""
    return HEADER_BYTES + num_slots * NUM_COPIES * (size + 1) * slot_bytes


def share_memory(
    ranks: Ranks, num_slots: int, slot_bytes: int, device: torch.device, driver: Driver
) -> PeerMemory | None:
    """Allocate a block on every rank and open all of them everywhere; None if some GPU cannot be reached.

    Raises: CapacityError if there is no room.
    """
    blocks = share_blocks(ranks, block_bytes(ranks.size, num_slots, slot_bytes), device, driver)
    if blocks is None:
        return None
    try:
        return _emptied(ranks, num_slots, slot_bytes, device, blocks)
    except BaseException:
        blocks.close()
        raise


def _emptied(ranks: Ranks, num_slots: int, slot_bytes: int, device: torch.device, blocks: PeerBlocks) -> PeerMemory:
    """The blocks as memory for exchanges, once every rank's is as it must be before the first."""

    def fill_header(value: int) -> None:
        blocks.driver.fill(blocks.addresses[ranks.rank], value, HEADER_BYTES // WORD_BYTES)

    fill_header(0)  # so that what the driver needs for it is loaded: beside a kernel that waits it might not be
    blocks.memory(device)[HEADER_BYTES:] = EMPTY
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ranks.smallest(True)  # nobody sends anything before that
    return PeerMemory(
        ranks.rank,
        ranks.size,
        num_slots,
        slot_bytes,
        torch.tensor(blocks.addresses, dtype=torch.int64, device=device),
        torch.zeros(num_slots, dtype=torch.int64, device=device),
        lambda: fill_header(1),
        blocks.close,
    )
