"""Device memory that the GPUs of one host read from each other directly: each rank has a block, and all addresses.

Plain allocations shared by the driver's own handles: no file, no multicast. What kernels write there, and how they wait
for each other, is theirs to know; `core.contracts.Exchange` says what they make of it.
Legend: R ranks, S slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.errors import HooklineError
from core.parallel import Ranks

HANDLE_BYTES = 64
HEADER_BYTES = 128
"""Of a block, zero until its rank is let go."""
NUM_COPIES = 2
"""Of each slot: the kernels of one exchange fill the other while slower ranks are still in the exchange before."""
MIN_SLOT_BYTES = 2048
_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True)
class PeerMemory:
    """One rank's view. A slot takes what one program exchanges at a time, at most `slot_bytes`, a multiple
    of 16, from each rank.

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
    """Frees kernels of this rank that wait for others, from another thread; what they compute is then worthless."""
    close: Callable[[], None] = field(default=lambda: None)


def block_bytes(size: int, num_slots: int, slot_bytes: int) -> int:
    """Bytes of a rank's block."""
    return HEADER_BYTES + num_slots * NUM_COPIES * (size + 1) * slot_bytes


def share_memory(ranks: Ranks, num_slots: int, slot_bytes: int, device: torch.device) -> PeerMemory | None:
    """Allocate a block on every rank and open all of them everywhere; None if some GPU cannot reach another.

    Raises: CapacityError if there is no room.
    """
    others = [device.index - ranks.rank + rank for rank in range(ranks.size) if rank != ranks.rank]
    if not ranks.smallest(all(torch.cuda.can_device_access_peer(device, other) for other in others)):
        return None
    driver, num_bytes = _Driver(), block_bytes(ranks.size, num_slots, slot_bytes)
    mine = driver.allocate(num_bytes)
    handles_X = torch.frombuffer(bytearray(driver.handle(mine)), dtype=torch.uint8).to(device)
    handles = ranks.all_gather_last(handles_X.unsqueeze(0)).view(ranks.size, HANDLE_BYTES).cpu()
    opened = {rank: driver.open(bytes(handles[rank].tolist())) for rank in range(ranks.size) if rank != ranks.rank}
    reachable = ranks.smallest(all(opened.values()))
    addresses = [mine if rank == ranks.rank else opened[rank] for rank in range(ranks.size)]

    def close() -> None:
        for address in opened.values():
            driver.close(address)
        driver.free(mine)

    if not reachable:
        close()
        return None
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fill_header(value: int) -> None:
        with torch.cuda.device(device):
            driver.fill(mine, value, HEADER_BYTES // 4, side.cuda_stream)

    fill_header(0)  # so that the driver has loaded what it needs for it: beside a kernel that waits it might not
    side.synchronize()

    return PeerMemory(
        ranks.rank,
        ranks.size,
        num_slots,
        slot_bytes,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(num_slots, dtype=torch.int64, device=device),
        lambda: fill_header(1),
        close,
    )


class _Driver:
    """The few calls of the CUDA driver that torch does not offer; the current context is torch's."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def allocate(self, num_bytes: int) -> int:
        """A block as PeerMemory says; returns its address."""
        address = ctypes.c_uint64()
        self._check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._check("cuMemsetD8_v2", address, ctypes.c_ubyte(0xFF), ctypes.c_size_t(num_bytes))
        self._check("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(HEADER_BYTES))
        torch.cuda.synchronize()
        return address.value

    def handle(self, address: int) -> bytes:
        """What another process needs to open this memory."""
        handle = _Handle()
        self._check("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address of another process's memory here; 0 if it cannot be reached."""
        address = ctypes.c_uint64()
        code = self._cuda.cuIpcOpenMemHandle_v2(
            ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        return 0 if code else address.value

    def fill(self, address: int, value: int, num_words: int, stream: int) -> None:
        """Fill with a 32-bit value, on a stream."""
        words = ctypes.c_size_t(num_words)
        self._cuda.cuMemsetD32Async(ctypes.c_uint64(address), ctypes.c_uint(value), words, ctypes.c_void_p(stream))

    def close(self, address: int) -> None:
        """Close another process's memory."""
        if address:
            self._cuda.cuIpcCloseMemHandle(ctypes.c_uint64(address))

    def free(self, address: int) -> None:
        """Free our own."""
        self._cuda.cuMemFree_v2(ctypes.c_uint64(address))

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise HooklineError(f"the CUDA driver's {name} failed with code {code} while ranks shared memory")


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)
