"""How long the parts of an engine's start took, for the log and for records of benchmarks.

The code that starts an engine names the parts. They do not overlap; the time outside of them is called the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StartPhases:
    """Seconds by part, in the order the parts were begun. before: the part until now since the process was started."""

    def __init__(self, before: str | None = None) -> None:
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        """What happened within the parts."""
        if before is not None:
            age_s = process_age_s()
            self._started = time.perf_counter() - age_s
            self.seconds[before] = age_s

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around a part; one of the same name as an earlier one is added to it."""
        begun = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begun

    def end(self) -> None:
        """Note that the engine is ready; time that no part had is the rest."""
        self.seconds["rest"] = max(0.0, time.perf_counter() - self._started - sum(self.seconds.values()))

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return "; ".join([f"{sum(self.seconds.values()):.1f} s = {parts}", *self.notes])


def process_age_s() -> float:
    """Seconds since this process was started, imports included; its processor time where the system cannot tell."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()
