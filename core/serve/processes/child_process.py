"""Processes of a server, on both sides: started by the supervisor, and ended with it whatever ends it.

Supervisor and child share a pair of sockets for lines of JSON: the task first, then orders down and news up. Its end
tells each that the other has gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hookline.core.executor.messages import JsonLines, send_message
from hookline.core.util.child_python import python_command
from hookline.core.util.process import is_stopped

CLOSED_S = 5.0
"""For a process to end once it has closed its socket."""
_STANDARD_ERROR = 2
_PR_SET_PDEATHSIG = 1
_SUPERVISOR = "supervisor"
"""Key of the task that holds the supervisor's process id."""


class Child:
    """A process as its parent sees it. on_news: called with each line that it sends. environ: further variables."""

    def __init__(
        self,
        target: str,
        task: Mapping[str, Any],
        on_news: Callable[[dict[str, Any]], None],
        pass_fds: tuple[int, ...] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
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
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its exit code, once it has ended."""
        self._loop.add_reader(self._connection.fileno(), self._receive)
        self.tell({**task, _SUPERVISOR: os.getpid()})

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether it does nothing until a signal lets it go on."""
        return is_stopped(self.pid)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a line; a process that has gone is found out about otherwise."""
        try:
            send_message(self._connection, message)
        except OSError:
            pass

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    async def end(self, patience_s: float) -> None:
        """Wait for it to end by itself, and kill it if it does not."""
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), patience_s)
        except TimeoutError:
            self.kill()
            await self.ended

    def how_it_ended(self) -> str:
        """In words."""
        code = self.ended.result()
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")

    def _receive(self) -> None:
        messages = self._lines.receive()
        if messages is None:  # its last act, or it was killed
            self._loop.remove_reader(self._connection.fileno())
            self._loop.run_in_executor(None, self._wait).add_done_callback(self._note_end)
            return
        for message in messages:
            self._on_news(message)

    def _wait(self) -> int:
        try:
            return self._process.wait(CLOSED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _note_end(self, code: asyncio.Future[int]) -> None:
        self._connection.close()
        self.ended.set_result(code.result())


class Parent:
    """The supervisor as its child sees it. `task` is the first line."""

    def __init__(self, descriptor: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the supervisor says what follows
        self.connection = socket.socket(fileno=descriptor)
        self._lines = JsonLines(self.connection)
        self.task, *self._orders = self._first()
        self._pid: int = self.task[_SUPERVISOR]  # our parent may be another one by now, since the supervisor has died

    def _first(self) -> list[dict[str, Any]]:
        while (messages := self._lines.receive()) is not None:
            if messages:
                return messages
        raise ConnectionError("the supervisor has ended")

    def tell(self, **message: Any) -> None:
        """Send a line; may be called from any thread."""
        try:
            send_message(self.connection, message)
        except OSError:
            pass

    @property
    def is_gone(self) -> bool:
        """Whether the supervisor has ended."""
        return os.getppid() != self._pid

    def follow(self, on_order: Callable[[dict[str, Any] | None], None]) -> None:
        """Call `on_order` on the running event loop with each further line, and with None once the parent is gone."""
        loop = asyncio.get_running_loop()

        def receive() -> None:
            messages = self._lines.receive()
            if messages is None:
                loop.remove_reader(self.connection.fileno())
                on_order(None)
            for message in messages or ():
                on_order(message)

        loop.add_reader(self.connection.fileno(), receive)
        for order in self._orders:
            on_order(order)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
