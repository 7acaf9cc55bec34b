"""The signal for a server to drain, and to end at once."""

from __future__ import annotations

import asyncio
import logging

_log = logging.getLogger("hookline")


class Stopping:
    """Called once, the server drains; called again, it ends at once. To be used on the server's event loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.drain_s: asyncio.Future[float] = loop.create_future()
        """Done when the server must drain; the result is the seconds that running requests have."""
        self.at_once: asyncio.Future[None] = loop.create_future()
        """Done when the server must end at once."""

    def tell(self, drain_s: float) -> None:
        """Drain, or end at once if called before. drain_s: seconds that running requests have."""
        if not self.drain_s.done():
            self.drain_s.set_result(drain_s)
        elif not self.at_once.done():
            self.at_once.set_result(None)


def tell_of_signal(*, is_again: bool, drain_s: float) -> None:
    """Log what a signal to end has begun, and how to force it. drain_s: seconds that running requests have."""
    if is_again:
        _log.info("ending at once: requests that still run end with an error")
    else:
        _log.info(
            "stopping: requests that run have up to %g s (serve.drain_s); Ctrl-C again ends them at once", drain_s
        )
