"""How an engine reads the time and how it waits."""

from __future__ import annotations

import time
from collections.abc import Callable


class Times:
    """One per engine, shared by its parts, so that both can be replaced for all of them at once."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        """Seconds. All times of the engine are its."""
        self.sleep: Callable[[float], None] = time.sleep
        """Waits for so many seconds."""

    def read(self) -> float:
        """The time; for who is given a function once, and must follow when `now` is replaced."""
        return self.now()
