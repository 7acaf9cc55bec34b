"""How long the parts of an engine's start took, for the log and for records of benchmarks.

The code that starts an engine names the parts. The time of a part inside another counts for the inner part alone; the
time outside of all parts is called the rest. One thread records them. Each part is logged as it ends, and every few
seconds while it goes on, so that users see progress.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

TELL_S = 5.0
"""Seconds between two lines about a part that goes on."""
SHORT_S = 0.05
"""A part that takes less has no line of its own, and is left out of the line about all."""
_log = logging.getLogger("hookline.start")


class StartPhases:
    """Seconds by part, in the order the parts were begun. before: a name for the time since the process was started.
    is_told: whether the parts are logged as they come; one of several ranks is enough.
    """

    def __init__(self, before: str | None = None, *, is_told: bool = True) -> None:
        self._is_told = is_told
        self._depth = 0
        self._progress: Callable[[], str] | None = None
        self._started = time.perf_counter()
        self._inner_s = 0.0
        """Seconds of the parts inside the part that goes on."""
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        """Remarks about events during the start, for the log."""
        if before is not None:
            age_s = process_age_s()
            self._started = time.perf_counter() - age_s
            self.seconds[before] = age_s
            self._tell(before, age_s)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around a part; its time is added to an earlier part of the same name."""
        begun, outer_inner_s = time.perf_counter(), self._inner_s
        self.seconds.setdefault(name, 0.0)
        self._inner_s = 0.0
        self._depth += 1
        done = Event()
        if self._depth == 1 and self._is_told:
            Thread(target=self._tell_on, args=(name, begun, done), name="start-phase", daemon=True).start()
        try:
            yield
        finally:
            done.set()
            self._depth -= 1
            seconds = time.perf_counter() - begun
            self.seconds[name] += seconds - self._inner_s
            self._inner_s = outer_inner_s + seconds
            if not self._depth:
                self._tell(name, seconds)

    def _tell(self, name: str, seconds: float) -> None:
        if self._is_told and seconds >= SHORT_S:
            _log.info("%s: %.1f s%s", name, seconds, self._how_far())

    def _tell_on(self, name: str, begun: float, done: Event) -> None:
        """Log that a part goes on; in a separate thread, since the part may be one long call."""
        while not done.wait(TELL_S):
            _log.info("%s: %.0f s so far%s", name, time.perf_counter() - begun, self._how_far())

    def _how_far(self) -> str:
        words = "" if self._progress is None else self._progress()
        return f" ({words})" if words else ""

    @contextmanager
    def counting(self, progress: Callable[[], str]) -> Iterator[None]:
        """Inside, the lines of the log about the current part end with the words that `progress` returns."""
        self._progress, before = progress, self._progress
        try:
            yield
        finally:
            self._progress = before

    def add(self, waited: str, seconds: Mapping[str, float], notes: Sequence[str]) -> None:
        """Add the parts and notes of another process's start. waited: the part of this process that waited for it."""
        self.seconds[waited] = max(0.0, self.seconds[waited] - sum(seconds.values()))
        self.seconds |= seconds
        self.notes += notes

    def end(self) -> None:
        """Note that the engine is ready; time that no part had is the rest."""
        self.seconds["rest"] = max(0.0, time.perf_counter() - self._started - sum(self.seconds.values()))

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if seconds >= SHORT_S)
        return "; ".join([f"{sum(self.seconds.values()):.1f} s{parts and f' = {parts}'}", *self.notes])


def process_age_s() -> float:
    """Seconds since this process was started, imports included; its processor time where the system cannot tell."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()
