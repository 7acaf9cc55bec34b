"""The processes of the further ranks, as their parent sees them: started, told what to do, ended.

They are plain child processes, not multiprocessing's: a script that makes an engine needs no `__main__` guard. Knows no
tensors and judges nobody; `core.executor.monitor` does.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from hookline.core.executor.messages import JsonLines, send_message
from hookline.core.util.child_python import python_command
from hookline.core.util.process import is_stopped

_STANDARD_ERROR = 2


class Child:
    """The process of one rank. `line` brings its messages.

    target: what it runs, as "module:function", with its socket's number as argument.
    """

    def __init__(self, rank: int, memory_fd: int, target: str) -> None:
        self.rank = rank
        self.connection, theirs = socket.socketpair()
        with theirs:
            command = python_command(target, str(theirs.fileno()))
            # Only results go to standard output, and those are the parent's.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR,
                pass_fds=(theirs.fileno(), memory_fd),
            )
        self.line = JsonLines(self.connection)

    def tell(self, task: dict[str, Any]) -> None:
        """Send the task; a process that has gone already is found out about later."""
        try:
            send_message(self.connection, task)
        except OSError:
            pass

    def send_some(self, data: memoryview) -> memoryview:
        """Send what fits now and return the rest; a process that has gone is found out about later."""
        try:
            return data[self.connection.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data
        except OSError:
            return data[:0]

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, so that it does nothing until another one lets it go on."""
        return is_stopped(self.process.pid)

    def how_it_ended(self) -> str:
        """Cause of death, for a process whose socket is closed."""
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")

    def __str__(self) -> str:
        return f"pid {self.process.pid}"


def end(children: Sequence[Child], patience_s: float) -> None:
    """Wait for processes that have been told to end, and kill those that do not."""
    deadline = time.monotonic() + patience_s
    for child in children:
        try:
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        finally:
            child.connection.close()


def await_end(children: Sequence[Child], patience_s: float) -> bool:
    """Whether all processes are gone within so many seconds, and with them what they had their GPUs do."""
    deadline = time.monotonic() + patience_s
    try:
        for child in children:
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def kill(children: Sequence[Child]) -> None:
    """End processes at once, stopped ones too; their sockets close, and so every collective with them breaks off."""
    for child in children:
        child.process.kill()
