"""Facts about processes: which process made an object, whether a process is stopped, how it ended, and how this process
was called and on how many cores it may run.

A fork copies objects, but neither the threads nor the ranks behind them.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

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


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process, so that it does nothing until it is continued.

    Linux only; elsewhere False.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")


def ending_of(code: int) -> str:
    """How a process ended, in words. code: its exit code, or minus the number of the signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # one of the real-time signals, of which only the first and the last have names
        name = f"signal {-code}"
    return f"was killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")


def called_as(command: str) -> str:
    """How to call a command: `python -m core.X` if this process was started like that, else `hookline X`."""
    is_module = Path(sys.argv[0]).parent.parts[-2:] == ("core", "commands")
    return f"python -m core.{command}" if is_module else f"hookline {command}"


def num_usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
