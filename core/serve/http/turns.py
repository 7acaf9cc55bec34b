"""Spreads bursts of work over several turns of the event loop, so that other tasks can run in between."""

from __future__ import annotations

import asyncio
from collections import deque


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
