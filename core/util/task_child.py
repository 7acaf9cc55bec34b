"""A child process that is started before its task is known, and imports meanwhile what it will need."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress


class TaskChild:
    """A child process with a process group of its own, in which its processes can be ended with it.

    It reads its task, one line, from standard input; where that ends without one, no task will come.
    process: its standard output is a pipe to us. errors: a file with what it writes to standard error.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start it. environment: in place of this process's."""
        self.errors = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
                errors="replace", env=environment, process_group=0,
            )  # fmt: skip
        except BaseException:
            self.errors.close()
            raise

    def give(self, task: str) -> None:
        """Tell it its task, without a line break. If it has ended, whoever waits for its output will find out."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(task + "\n")
        self.dismiss()

    def dismiss(self) -> None:
        """No task comes, or no other: a child that waits for one ends."""
        assert self.process.stdin is not None
        with suppress(OSError):  # the task that it was not there to read any more
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill it and the processes that it made; returns once it has ended."""
        with suppress(ProcessLookupError, PermissionError):  # they ended meanwhile
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Kill it, and close what led to it and from it."""
        self.kill()
        self.dismiss()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()
