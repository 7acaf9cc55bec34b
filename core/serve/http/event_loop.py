"""The event loop: bursts of work are spread over several turns of it, and how long one task blocks it is measured."""

from __future__ import annotations

import asyncio
import time
from collections import deque

TICK_S = 0.02
"""Seconds between two measurements of a LoopWatch."""


class Turns:
    """Lets at most `burst` coroutines continue in each turn of the loop, in the order in which they came."""

    def __init__(self, burst: int) -> None:
        self._burst = self._num_free = burst
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False

    async def take(self) -> None:
        """Wait until this coroutine may continue, which is at once unless there is a burst."""
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._begin)
        if self._num_free and not self._waiting:
            self._num_free -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self) -> None:
        """Begin a new turn of the loop."""
        is_quiet = self._num_free == self._burst and not self._waiting
        self._num_free = self._burst
        while self._waiting and self._num_free:
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited has gone
                turn.set_result(None)
                self._num_free -= 1
        self._is_counting = not is_quiet
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin)


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
