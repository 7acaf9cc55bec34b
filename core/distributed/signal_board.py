"""Words in host memory by which the streams of one host's GPUs signal each other.

They lie in host memory so that a process can end its streams' waits by itself: what it launched for that might lie in a
queue of the GPU behind those very waits, since streams share a few queues.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hookline.core.distributed.cuda_driver import Driver
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import HooklineError
from hookline.core.util.arrays import IntArray
from hookline.core.util.shared_memory import WORD, SharedWords

SIGNAL_BYTES = 4
ROW_BYTES = 4096
"""A rank's words begin at a multiple of this, a page, so that GPUs do not disturb each other."""
_PATH_BYTES = 64


@dataclass(frozen=True)
class SignalBoard:
    """A row of words of each rank, zero at first, as one rank sees them. words: its own row, to be written at once.

    addresses: of the rows, in order of rank, for `Driver.signal` and `Driver.wait`.
    """

    rank: int
    addresses: list[int]
    words: IntArray
    memory: SharedWords
    driver: Driver

    def at(self, rank: int, word: int) -> int:
        """The address of a rank's word."""
        return self.addresses[rank] + word * SIGNAL_BYTES

    def close(self) -> None:
        """Give the memory back; no stream may use it afterwards."""
        self.driver.unregister(self.memory.words.ctypes.data)


def share_board(ranks: LocalRanks, num_words: int, device: torch.device, driver: Driver) -> SignalBoard | None:
    """A board with `num_words` words for each rank; None unless signals arrive from each rank at every other.

    One further word for each rank is used to find that out.
    """
    row_bytes = -(-(num_words + ranks.size) * SIGNAL_BYTES // ROW_BYTES) * ROW_BYTES
    memory = _shared_words(ranks, row_bytes * ranks.size, device)
    start = 0
    try:
        if memory is not None:
            start = driver.register(memory.words.ctypes.data, row_bytes * ranks.size)
    except HooklineError:
        start = 0
    is_shared = ranks.smallest(start != 0)
    if memory is None:
        return None
    memory.close()  # all ranks have it now
    addresses = [start + rank * row_bytes for rank in range(ranks.size)]
    words = memory.words.view("uint32").reshape(ranks.size, -1)[ranks.rank]
    board = SignalBoard(ranks.rank, addresses, words, memory, driver)
    if is_shared and _signals_arrive(ranks, board, num_words):
        return board
    if start:
        board.close()
    return None


def _shared_words(ranks: LocalRanks, num_bytes: int, device: torch.device) -> SharedWords | None:
    """Memory that rank 0 makes and the others open by its file; None if this rank cannot."""
    mine, path = None, b""
    if ranks.rank == 0:
        mine = SharedWords.create(num_bytes // WORD)
        path = f"/proc/{os.getpid()}/fd/{mine.fd}".encode()
    path_X = torch.frombuffer(bytearray(path.ljust(_PATH_BYTES, b"\0")), dtype=torch.uint8).to(device)
    first_X = ranks.all_gather_last(path_X.unsqueeze(0)).view(ranks.size, _PATH_BYTES)[0].cpu()
    if mine is not None:
        return mine
    try:
        return SharedWords(os.open(bytes(first_X.tolist()).rstrip(b"\0"), os.O_RDWR), num_bytes // WORD)
    except (OSError, ValueError):
        return None


def _signals_arrive(ranks: LocalRanks, board: SignalBoard, first_word: int) -> bool:
    """Whether a stream of each rank can write words of the others' rows, and wait for words of its own."""
    driver, others = board.driver, [rank for rank in range(ranks.size) if rank != ranks.rank]
    is_written = _is_done(driver.signal, [board.at(other, first_word + ranks.rank) for other in others])
    if not ranks.smallest(is_written):
        return False
    have_come = all(board.words[first_word + other] == 1 for other in others)
    have_come = have_come and _is_done(driver.wait, [board.at(ranks.rank, first_word + other) for other in others])
    return bool(ranks.smallest(have_come))


def _is_done(call: Callable[[int, int], None], addresses: Sequence[int]) -> bool:
    """Whether the driver can do this with these words and the value 1."""
    try:
        for address in addresses:
            call(address, 1)
    except HooklineError:
        return False
    torch.cuda.synchronize()
    return True
