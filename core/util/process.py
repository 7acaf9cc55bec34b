"""Which process an object belongs to: a fork copies objects, but neither the threads nor the ranks behind them."""

from __future__ import annotations

import os

from hookline.core.errors import HooklineError


class Home:
    """Remembers the process it was made in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a copy in a forked child."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise HooklineError in a forked child."""
        if self.is_elsewhere:
            raise HooklineError(
                f"this engine belongs to process {self._pid}, and this is {os.getpid()}, a fork of it: its threads and "
                "ranks are not here. Make a new engine after the fork"
            )
