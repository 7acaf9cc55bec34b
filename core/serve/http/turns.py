"""Work that comes in bursts, a little of it at each turn of the event loop, so that the rest has its turns, too."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets at most `burst` coroutines go on at each turn of the loop, in the order they came."""

    def __init__(self, burst: int) -> None:
        self._burst = self._num_free = burst
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False

    async def take(self) -> None:
        """Wait for a turn; without a burst there is nothing to wait for."""
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
        """A new turn of the loop."""
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
