"""`Stopwatch` measures the time of code without the time in which other processes kept the processors busy."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
"""Linux's count of the time in which some task of the machine waited for a processor."""


class Stopwatch:
    """Measures from its making on, in the thread that made it."""

    def __init__(self) -> None:
        self._wall_s, self._thread_s, self._stalled_s = time.perf_counter(), time.thread_time(), _stalled_s()

    @property
    def seconds(self) -> float:
        """The elapsed time, without the time in which a task of the machine waited for a processor; at least the
        processor time of this thread.

        If Linux does not count the waiting time, all elapsed time.
        """
        undisturbed_s = time.perf_counter() - self._wall_s - (_stalled_s() - self._stalled_s)
        return max(time.thread_time() - self._thread_s, undisturbed_s)


def _stalled_s() -> float:
    with suppress(OSError, ValueError):
        return int(PRESSURE.read_text().split("\n", 1)[0].rpartition("total=")[2]) / 1e6
    return 0.0
