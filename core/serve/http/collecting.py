"""Schedules Python's garbage collection in a front end: with a thousand open streams a full collection takes 0.1 s,
during which no stream gets anything.

Streams leave no reference cycles, so their memory is freed without a collection. Full collections therefore wait for a
moment with few open requests; if none comes, until the process has grown, which means that there are cycles after all.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections.abc import Callable

LOOK_S = 5.0
"""Seconds between two checks whether few requests are open."""
QUIET = 32
"""Most open requests at which a collection is run; it takes a few milliseconds then."""
GROWTH_BYTES = 256 * 2**20
"""Growth of the process since the last collection after which the next one is run in any case."""
NEVER = 1_000_000


def most_bytes() -> int:
    """The largest memory use of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class QuietCollector:
    """Runs collections when few requests are open. num_open: returns the number of open requests. num_bytes: returns
    the process' largest size so far.
    """

    def __init__(self, num_open: Callable[[], int], num_bytes: Callable[[], int] = most_bytes) -> None:
        self._num_open, self._num_bytes = num_open, num_bytes
        self._searched_at = 0
        """The process' size at the last collection."""

    def start(self) -> None:
        """Begin on the running event loop. Objects that exist by now are frozen, and not searched again."""
        self._search()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._wait()

    def look(self) -> None:
        """Run a collection if few requests are open, or if the process has grown too much."""
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
