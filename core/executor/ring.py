"""A broadcast ring in shared memory: one writer, several readers, messages of any length.

A message is an array of int64, and every reader gets every message, in order. One longer than the ring goes through it
in pieces. The writer waits for the slowest reader, so nothing is lost. Knows no processes: how to wait, and when to
give up, is the caller's.
Layout, in words: the number of words written; for each reader the number it has taken; then the ring itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hookline.core.util.arrays import IntArray

Wait = Callable[[], None]
"""Waits a moment; raises to give up."""


def ring_words(num_readers: int, capacity: int) -> int:
    """Words of shared memory that a ring takes."""
    return 1 + num_readers + capacity


class RingWriter:
    """The writing end. `words` is the memory of `ring_words`, all zeros at first."""

    def __init__(self, words: IntArray, num_readers: int) -> None:
        self._written, self._taken = words[:1], words[1 : 1 + num_readers]
        self._ring = words[1 + num_readers :]

    def send(self, message: IntArray, published: Wait, wait: Wait) -> None:
        """Write a message, in as many pieces as it takes.

        published: called after each piece, to wake readers that sleep. wait: called while there is no room.
        """
        stream = np.concatenate([np.array([len(message)], dtype=np.int64), message])
        while len(stream):
            count = self._offer(stream)
            stream = stream[count:]
            (published if count else wait)()

    def _offer(self, stream: IntArray) -> int:
        """Write what there is room for and return how many words that was."""
        written, capacity = int(self._written[0]), len(self._ring)
        room = capacity - (written - int(self._taken.min()))
        count = min(room, len(stream))
        start = written % capacity
        first = min(count, capacity - start)
        self._ring[start : start + first] = stream[:first]
        self._ring[: count - first] = stream[first:count]
        self._written[0] = written + count
        return count


class RingReader:
    """The end of reader `index`."""

    def __init__(self, words: IntArray, num_readers: int, index: int) -> None:
        self._written, self._taken = words[:1], words[1 + index : 2 + index]
        self._ring = words[1 + num_readers :]

    def receive(self, wait: Wait) -> IntArray:
        """The next message, an array of its own. wait: called while nothing is there."""
        length = int(self._next(1, wait)[0])
        return self._next(length, wait)

    def _next(self, count: int, wait: Wait) -> IntArray:
        """The next `count` words of the stream."""
        words, have = np.empty(count, dtype=np.int64), 0
        while have < count:
            taken = self._take(words[have:])
            have += taken
            if not taken:
                wait()
        return words

    def _take(self, out: IntArray) -> int:
        """Fill `out` with what is there and return how many words that was."""
        taken, capacity = int(self._taken[0]), len(self._ring)
        count = min(int(self._written[0]) - taken, len(out))
        start = taken % capacity
        first = min(count, capacity - start)
        out[:first] = self._ring[start : start + first]
        out[first:count] = self._ring[: count - first]
        self._taken[0] = taken + count
        return count
