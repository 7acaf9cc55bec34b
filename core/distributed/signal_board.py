"""Words in host memory by which the streams of one host's GPUs signal each other.

They lie in host memory so that a process can end its streams' waits by itself: a kernel or copy launched for that might
queue on the GPU behind those very waits, since streams share a few hardware queues.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from hookline.core.distributed.cuda_driver import Driver
from hookline.core.distributed.ranks import LocalRanks, bytes_of_all
from hookline.core.errors import HooklineError
from hookline.core.util.arrays import IntArray
from hookline.core.util.shared_memory import WORD, SharedWords

SIGNAL_BYTES = 4
ROW_BYTES = 4096
"""A rank's words begin at a multiple of this, a page, so that GPUs do not disturb each other."""
_TOLD_BYTES = 96


@dataclass(frozen=True)
class SignalBoard:
    """A row of words of each rank, zero at first, as one rank sees them.

    addresses: of the rows, in order of rank, for `Driver.signal` and `Driver.wait`. words: its own row; the host's
    writes to it take effect at once, even while the GPU is busy.
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
    memory, start = _shared_words(ranks, row_bytes * ranks.size, device), 0
    found: SignalBoard | None = None
    try:
        if memory is not None:
            with suppress(HooklineError):
                start = driver.register(memory.words.ctypes.data, row_bytes * ranks.size)
        if ranks.smallest(start != 0):
            assert memory is not None
            addresses = [start + rank * row_bytes for rank in range(ranks.size)]
            words = memory.words.view("uint32").reshape(ranks.size, -1)[ranks.rank]
            board = SignalBoard(ranks.rank, addresses, words, memory, driver)
            found = board if _signals_arrive(ranks, board, num_words) else None
    finally:
        if memory is not None:
            memory.close()  # its file: all ranks have opened it, or none needs it
            if start and found is None:
                driver.unregister(memory.words.ctypes.data)
    return found


def _shared_words(ranks: LocalRanks, num_bytes: int, device: torch.device) -> SharedWords | None:
    """Memory that rank 0 makes and the others open by its file; None if this rank has none."""
    mine, told = None, b""
    if ranks.rank == 0:
        with suppress(OSError):
            mine = SharedWords.create(num_bytes // WORD)
            told = f"{os.fstat(mine.fd).st_ino} /proc/{os.getpid()}/fd/{mine.fd}".encode()
    try:
        first = bytes_of_all(ranks, told.ljust(_TOLD_BYTES, b"\0"), device)[0]
    except BaseException:
        if mine is not None:
            mine.close()
        raise
    return mine if ranks.rank == 0 else _opened(first.rstrip(b"\0").decode(), num_bytes)


def _opened(told: str, num_bytes: int) -> SharedWords | None:
    """The memory whose file has this number and path; None if this process cannot open it, as in another container."""
    number, _, path = told.partition(" ")
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_ino == int(number):
            return SharedWords(fd, num_bytes // WORD)
    except (OSError, ValueError):  # of another file, which is too short
        pass
    os.close(fd)
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
