"""A clock that stands still until somebody says how much time has passed."""

from __future__ import annotations


class VirtualClock:
    """Seconds from 0; what an engine's `clock` and `sleep` can be set to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        """The time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let that much time pass."""
        assert seconds >= 0, f"time goes on, not back by {-seconds} s"
        self.now_s += seconds

    def sleep_until(self, when_s: float) -> None:
        """Let time pass until then, if that is not over."""
        self.now_s = max(self.now_s, when_s)
