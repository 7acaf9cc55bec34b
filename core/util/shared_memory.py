"""A piece of memory that the processes of one engine share: 64-bit words behind a file descriptor without a name.

It is gone with the processes that hold it, however they end, and no other engine can open it. Each word is written by
one process and read by the others, without locks: this needs a processor that lets others see stores in the order in
which they were made, as x86-64 does, or a system call in between.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from hookline.core.util.arrays import IntArray

WORD = 8
"""Bytes of a word."""


class SharedWords:
    """The memory behind a descriptor, perhaps an inherited one.

    words: the memory as an int64 array. fd: the descriptor, by which another process attaches the memory.
    """

    def __init__(self, fd: int, num_words: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, num_words * WORD)
        self.words: IntArray = np.frombuffer(self._memory, dtype=np.int64)

    @classmethod
    def create(cls, num_words: int) -> SharedWords:
        """New memory, all zeros."""
        fd = _nameless_file()
        os.ftruncate(fd, num_words * WORD)
        return cls(fd, num_words)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last array over it. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hookline")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
