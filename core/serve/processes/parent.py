"""The supervisor as its child processes see it: a socket pair for lines of JSON. A child ends with its supervisor.

The first line is the child's task, later ones are orders; the child reports in the other direction. When either end is
closed, the other notices.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hookline.core.executor.messages import JsonLines, send_message

_PR_SET_PDEATHSIG = 1
SUPERVISOR = "supervisor"
"""Key of the task that holds the supervisor's process id."""


class Parent:
    """The connection to the supervisor, by a file descriptor. `task` is the first received line."""

    def __init__(self, descriptor: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the supervisor handles it
        self.connection = socket.socket(fileno=descriptor)
        self._lines = JsonLines(self.connection)
        self.task, *self._orders = self._lines.wait()
        self._pid: int = self.task[SUPERVISOR]  # our parent may be another one by now, since the supervisor has died

    def tell(self, **message: Any) -> None:
        """Send a line; may be called from any thread."""
        with suppress(OSError):
            send_message(self.connection, message)

    @property
    def is_gone(self) -> bool:
        """Whether the supervisor has ended."""
        return os.getppid() != self._pid

    def follow(self, on_order: Callable[[dict[str, Any] | None], None]) -> None:
        """Call `on_order` on the running event loop with each further line, and with None once the parent is gone."""
        loop = asyncio.get_running_loop()

        def _receive() -> None:
            messages = self._lines.receive()
            if messages is None:
                loop.remove_reader(self.connection.fileno())
                on_order(None)
            for message in messages or ():
                on_order(message)

        loop.add_reader(self.connection.fileno(), _receive)
        for order in self._orders:
            on_order(order)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
