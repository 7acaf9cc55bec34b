"""Measures how long the event loop is blocked by a single task."""

from __future__ import annotations

import asyncio
import time

TICK_S = 0.02


class LoopWatch:
    """Measures how late a timer runs. Only time in which the loop's thread computed is counted, not the time that other
    processes took from its core.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        """The longest that the loop was blocked so far."""
        self._due_s = self._cpu_s = 0.0

    def start(self) -> None:
        """Begin on the running event loop; `longest_s` counts from now on."""
        self._cpu_s = time.thread_time()
        self._wait()

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + TICK_S
        loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        late_s, cpu_s = asyncio.get_running_loop().time() - self._due_s, time.thread_time()
        self.longest_s = max(self.longest_s, min(late_s, cpu_s - self._cpu_s))
        self._cpu_s = cpu_s
        self._wait()
