"""When a server is to end, and how fast."""

from __future__ import annotations

import asyncio


class Stopping:
    """Told once, a server drains; told again, it ends at once. Made and told on the event loop that serves."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.drain_s: asyncio.Future[float] = loop.create_future()
        """Done when the server is told to end: the seconds that requests have left."""
        self.at_once: asyncio.Future[None] = loop.create_future()
        """Done when it was told again."""

    def tell(self, drain_s: float) -> None:
        """End. The first time, requests that run have this many seconds."""
        if not self.drain_s.done():
            self.drain_s.set_result(drain_s)
        elif not self.at_once.done():
            self.at_once.set_result(None)
