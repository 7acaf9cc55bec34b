"""How an engine reads the time and how it waits."""

from __future__ import annotations

import time
from collections.abc import Callable


class Times:
    """The clock and the sleep of one engine, shared by its parts, so that they can be replaced for all at once."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        """Seconds. All times of the engine are its."""
        self.sleep: Callable[[float], None] = time.sleep
        """Waits for a number of seconds."""

    def read(self) -> float:
        """The time, by whatever `now` is at present: for parts that keep this method."""
        return self.now()
