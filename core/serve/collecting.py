"""When Python looks for garbage in a front end: with a thousand open streams a full search stops them all for 0.2 s.

What streams leave behind is free without a search, since they form no circles. So full searches wait for quiet moments.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

LOOK_S = 5.0
"""Between two looks for a quiet moment."""
QUIET = 32
"""So many open requests are still quiet: a search takes a few milliseconds."""
LONGEST_S = 600.0
"""After which a search does not wait for a quiet moment any more."""
NEVER = 1_000_000


class QuietCollector:
    """Searches in quiet moments. num_open: how many requests are open."""

    def __init__(self, num_open: Callable[[], int]) -> None:
        self._num_open, self._waited_s = num_open, 0.0

    def start(self) -> None:
        """Begin on the running event loop. What is there now stays, and is not looked through again."""
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._wait()

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._waited_s += LOOK_S
        if self._num_open() <= QUIET or self._waited_s >= LONGEST_S:
            gc.collect()
            self._waited_s = 0.0
        self._wait()
