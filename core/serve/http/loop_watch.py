"""How long an event loop was kept from its other work: the figure behind "nothing blocks the loop"."""

from __future__ import annotations

import asyncio
import time

TICK_S = 0.02


class LoopWatch:
    """Looks, again and again, how late its turn comes.

    Only time in which the loop's thread computed counts: what other processes took of its core is not its fault.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        """The longest without a turn so far."""
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
