"""`Stopwatch`: how long something takes by itself, whatever else the machine is busy with."""

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
        """The time that has passed, without that in which a task of the machine waited for a processor; at least the
        processor time of this thread.

        Where Linux does not count the former, it is the time that has passed.
        """
        undisturbed_s = time.perf_counter() - self._wall_s - (_stalled_s() - self._stalled_s)
        return max(time.thread_time() - self._thread_s, undisturbed_s)


def _stalled_s() -> float:
    with suppress(OSError, ValueError):
        return int(PRESSURE.read_text().split("\n", 1)[0].rpartition("total=")[2]) / 1e6
    return 0.0
