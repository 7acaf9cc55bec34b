"""Signs of life of the ranks, in shared memory: beats of a thread, and how far a rank has got with its work.

A stopped or dead process beats no more; one that beats and gets no further is stuck, or slow, or compiles. Knows no
processes.
"""

from __future__ import annotations

from typing import Protocol

from core.compilers import is_compiling
from core.step import IntArray

BEAT_S = 0.2
"""Seconds between two beats."""
PULSE_WORDS = 4
"""Words of shared memory for each rank: beats, progress of the host, progress of its device, whether it compiles."""


class Marks(Protocol):
    """Counts the marks that a device has got to; see `core.device_marks`."""

    def mark(self) -> None:
        """Put a mark into the work that the device still has to do."""
        ...

    def num_reached(self) -> int:
        """How many of them the device has passed; another thread asks."""
        ...


class Pulse:
    """One rank's words: only the rank itself writes them."""

    def __init__(self, words: IntArray, rank: int) -> None:
        self._words = words[rank * PULSE_WORDS : (rank + 1) * PULSE_WORDS]
        self._marks: Marks | None = None

    def beat(self) -> None:
        """Say that the process runs and what else a thread beside the work can tell."""
        self._words[0] += 1
        self._words[3] = is_compiling()
        if self._marks is not None:
            self._words[2] = self._marks.num_reached()

    def advance(self) -> None:
        """Say that the work has got further: a step ended, or `reach_collective`."""
        self._words[1] += 1

    def reach_collective(self) -> None:
        """Say that the next collective is reached; a device behind the host says so when it gets there."""
        self.advance()
        if self._marks is not None:
            self._marks.mark()

    def follow(self, marks: Marks) -> None:
        """Count what the device reaches as well."""
        self._marks = marks

    @property
    def beats(self) -> int:
        """Beats so far."""
        return int(self._words[0])

    @property
    def progress(self) -> int:
        """How far the rank has got, in collectives and steps: ranks that wait for each other differ by little."""
        return int(self._words[1] + self._words[2])

    @property
    def is_compiling(self) -> bool:
        """Whether the rank was compiling at its last beat."""
        return bool(self._words[3])
