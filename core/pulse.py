"""Signs of life of the ranks, in shared memory: beats of a thread, and how far a rank has got with its work.

A stopped or dead process beats no more; one that beats and gets no further is stuck, or slow. Knows no processes.
"""

from __future__ import annotations

from core.step import IntArray

BEAT_S = 0.2
"""Seconds between two beats."""
PULSE_WORDS = 2
"""Words of shared memory for each rank: beats, then progress."""


class Pulse:
    """One rank's words: only the rank itself writes them."""

    def __init__(self, words: IntArray, rank: int) -> None:
        self._words = words[rank * PULSE_WORDS : (rank + 1) * PULSE_WORDS]

    def beat(self) -> None:
        """Say that the process runs."""
        self._words[0] += 1

    def advance(self) -> None:
        """Say that the work has got further: another collective was reached, or a step ended."""
        self._words[1] += 1

    @property
    def beats(self) -> int:
        """Beats so far."""
        return int(self._words[0])

    @property
    def progress(self) -> int:
        """How far the rank has got, in collectives and steps: ranks that wait for each other differ by little."""
        return int(self._words[1])
