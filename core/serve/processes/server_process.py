"""A process of the server as the supervisor follows it: ready or not, stopped or not, and why it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from hookline.core.errors import HooklineError
from hookline.core.serve.futures import first_of
from hookline.core.serve.processes.child_process import Child

QUICK_S = 5.0
"""A process that ends sooner than this after its start has a fault that starting it again does not heal."""
MAX_QUICK_ENDS = 3
LOOK_S = 0.5
"""Between two looks at whether a process is stopped."""
STOPPED_LOOKS = 8
"""Looks in a row that find a process stopped, as by SIGSTOP, after which it is killed: nobody would hear of it else."""


class StartError(HooklineError):
    """A process of the server that ended before it was ready."""


class ServerProcess:
    """A child with what it said: that it is ready, and why it cannot go on."""

    def __init__(
        self,
        target: str,
        task: dict[str, Any],
        pass_fds: tuple[int, ...] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.reason: str | None = None
        self.started_s = time.monotonic()
        self.child = Child(target, task, self._hear, pass_fds, environ)
        self._num_stopped = 0

    def _hear(self, news: dict[str, Any]) -> None:
        self.reason = news.get("failed") or news.get("dead") or self.reason
        if "ready" in news and not self.ready.done():
            self.ready.set_result(news)

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self.child.ended.done()

    def look(self) -> None:
        """Kill it if it has been stopped for long. One that computes or waits, for however long, is not stopped."""
        self._num_stopped = self._num_stopped + 1 if self.child.is_stopped else 0
        if self._num_stopped == STOPPED_LOOKS:
            self.reason = f"its process was stopped for {STOPPED_LOOKS * LOOK_S:g} s, as by SIGSTOP"
            self.child.kill()

    async def wait_until_ready(self, what: str) -> dict[str, Any]:
        """What it said when it was ready.

        Raises: StartError if it ended instead.
        """
        await first_of(self.ready, self.child.ended)
        if not self.ready.done():
            await asyncio.shield(self.child.ended)
            raise StartError(self.reason or f"{what} {self.child.how_it_ended()} while starting")
        return self.ready.result()


class QuickEnds:
    """How often in a row a process ended right after its start."""

    def __init__(self) -> None:
        self.count = 0

    def are_too_many(self, process: ServerProcess) -> bool:
        """Note an end; returns whether starting it again heals nothing."""
        self.count = self.count + 1 if time.monotonic() - process.started_s < QUICK_S else 0
        return self.count >= MAX_QUICK_ENDS
