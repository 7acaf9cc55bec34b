"""When Python looks for garbage in a front end: with a thousand open streams a full search stops them all for 0.1 s.

What streams leave behind is free without a search, since they form no circles. So full searches wait for quiet moments,
and while none comes, for the memory to grow: then there may be something to find.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections.abc import Callable

LOOK_S = 5.0
"""Between two looks for a quiet moment."""
QUIET = 32
"""Most open requests in a moment that counts as quiet: a search takes a few milliseconds then."""
GROWTH_BYTES = 256 * 2**20
"""Growth of the process since the last search after which the next one waits no longer."""
NEVER = 1_000_000


def most_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class QuietCollector:
    """Searches in quiet moments. num_open: how many requests are open. num_bytes: the process' largest size so far."""

    def __init__(self, num_open: Callable[[], int], num_bytes: Callable[[], int] = most_bytes) -> None:
        self._num_open, self._num_bytes = num_open, num_bytes
        self._searched_at = 0
        """The size at the last search."""

    def start(self) -> None:
        """Begin on the running event loop. What is there now stays, and is not looked through again."""
        self._search()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._wait()

    def look(self) -> None:
        """Search if the moment is quiet, or if it must be."""
        if self._num_open() <= QUIET or self._num_bytes() >= self._searched_at + GROWTH_BYTES:
            self._search()

    def _search(self) -> None:
        gc.collect()
        self._searched_at = self._num_bytes()

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(LOOK_S, self._tick)

    def _tick(self) -> None:
        self.look()
        self._wait()
