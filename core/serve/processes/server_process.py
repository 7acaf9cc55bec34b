"""A child process of the supervisor: its task, its messages, whether it is ready, and how it ended."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hookline.core.errors import HooklineError
from hookline.core.executor.messages import JsonLines, send_message
from hookline.core.serve.processes.parent import SUPERVISOR
from hookline.core.util.child_python import python_command
from hookline.core.util.process import ending_of, is_stopped

MAX_ENDS = 5
"""A process that ended so often within WITHIN_S is not started again, since restarts do not remove the cause."""
WITHIN_S = 300.0
"""Seconds of readiness: the time of starts does not count, or a slow starter would never reach MAX_ENDS."""
LOOK_S = 0.5
"""Seconds between two checks whether a process is stopped."""
STOPPED_LOOKS = 8
"""After so many checks in a row that find it stopped, as by SIGSTOP, a process is killed: its clients would wait."""
CLOSED_S = 5.0
"""Seconds that a process has to end once it has closed its socket."""
_STANDARD_ERROR = 2


class StartError(HooklineError):
    """A process of the server that ended before it was ready."""


class ServerProcess:
    """A process that was started with a task; see `core.serve.processes.parent` for its side.

    target: its main function, as "module:function". pass_fds: file descriptors that it inherits. environ: further
    variables.
    """

    def __init__(
        self,
        target: str,
        task: Mapping[str, Any],
        pass_fds: tuple[int, ...] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        """Its `ready` message."""
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its exit code, once it has ended."""
        self.reason: str | None = None
        """Why it cannot go on, from its own message."""
        self._ready_s: float | None = None
        self._ended_s: float | None = None
        self._num_stopped = 0
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python_command(target, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR,  # standard output is the supervisor's
                pass_fds=(theirs.fileno(), *pass_fds),
                env={**os.environ, **(environ or {})},
            )
        self._lines = JsonLines(self._connection)
        self._loop.add_reader(self._connection.fileno(), self._receive)
        self.tell({**task, SUPERVISOR: os.getpid()})

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message. A message to a process that has ended is lost; see `ended`."""
        with suppress(OSError):
            send_message(self._connection, message)

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self.ended.done()

    @property
    def served_s(self) -> float:
        """How long it was ready, once it is gone; 0 if it never was."""
        return 0.0 if self._ready_s is None or self._ended_s is None else self._ended_s - self._ready_s

    def how_it_ended(self) -> str:
        """In words, once it is gone."""
        return ending_of(self.ended.result())

    def look(self) -> None:
        """Kill the process if it has been stopped for long. Computing or waiting, for however long, is not stopped."""
        if self.has_ended:
            return
        self._num_stopped = self._num_stopped + 1 if is_stopped(self._process.pid) else 0
        if self._num_stopped == STOPPED_LOOKS:
            self.reason = f"its process was stopped for {STOPPED_LOOKS * LOOK_S:g} s, as by SIGSTOP"
            self._process.kill()

    async def wait_until_ready(self, what: str) -> dict[str, Any]:
        """Its `ready` message.

        Raises: StartError if it ended instead.
        """
        await asyncio.wait((self.ready, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self.ready.done():
            raise StartError(self.reason or f"{what} {self.how_it_ended()} while starting")
        return self.ready.result()

    async def end(self, patience_s: float) -> None:
        """Wait for it to end by itself, and kill it if it does not."""
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), patience_s)
        except TimeoutError:
            self._process.kill()
            await self.ended

    def _receive(self) -> None:
        messages = self._lines.receive()
        if messages is None:  # its last act, or it was killed
            self._loop.remove_reader(self._connection.fileno())
            self._loop.run_in_executor(None, self._wait).add_done_callback(self._note_end)
        for news in messages or ():
            self.reason = news.get("failed") or news.get("dead") or self.reason
            if "ready" in news and not self.ready.done():
                self._ready_s = time.monotonic()
                self.ready.set_result(news)

    def _wait(self) -> int:
        try:
            return self._process.wait(CLOSED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _note_end(self, code: asyncio.Future[int]) -> None:
        self._connection.close()
        self._ended_s = time.monotonic()
        self.ended.set_result(code.result())


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
