"""A process of the server as the supervisor follows it: ready or not, stopped or not, and why it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from hookline.core.errors import HooklineError
from hookline.core.serve.futures import first_of
from hookline.core.serve.processes.child_process import Child

MAX_ENDS = 5
"""Ends of a part within WITHIN_S, after which it is not started again: that does not heal what ends it."""
WITHIN_S = 300.0
"""Counted while the part is ready: its starts are left out, or a slow one would never reach MAX_ENDS."""
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
        self._ready_s: float | None = None
        self._ended_s: float | None = None
        self.child = Child(target, task, self._hear, pass_fds, environ)
        self.child.ended.add_done_callback(self._note_end)
        self._num_stopped = 0

    def _note_end(self, _: object) -> None:
        self._ended_s = time.monotonic()

    def _hear(self, news: dict[str, Any]) -> None:
        self.reason = news.get("failed") or news.get("dead") or self.reason
        if "ready" in news and not self.ready.done():
            self._ready_s = time.monotonic()
            self.ready.set_result(news)

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self.child.ended.done()

    @property
    def served_s(self) -> float:
        """How long it was ready, once it is gone; 0 if it never was."""
        return 0.0 if self._ready_s is None or self._ended_s is None else self._ended_s - self._ready_s

    def look(self) -> None:
        """Kill it if it has been stopped for long. One that computes or waits, for however long, is not stopped."""
        if self.has_ended:
            return
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


class Restarts:
    """Whether a part of the server whose process has ended is started again, and when: at once after its first end
    within WITHIN_S, then after 1, 2 and 4 seconds, and not after MAX_ENDS.
    """

    def __init__(self) -> None:
        self._served_s = 0.0
        self._ends_s: list[float] = []

    def delay_s(self, served_s: float) -> float | None:
        """Note an end; returns how long to wait before the next start, None to give up.

        served_s: how long the process that has ended was ready.
        """
        self._served_s += served_s
        self._ends_s = [one for one in self._ends_s if self._served_s - one < WITHIN_S] + [self._served_s]
        num_ends = len(self._ends_s)
        if num_ends >= MAX_ENDS:
            return None
        return 0.0 if num_ends == 1 else 2.0 ** (num_ends - 2)


def told_ends(what: str) -> str:
    """Why a part is not started again."""
    return f"{what} has ended {MAX_ENDS} times within {WITHIN_S:g} s of service, and is not started again"
