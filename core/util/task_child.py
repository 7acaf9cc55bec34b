"""A child process that is started before its task is known, and imports its modules meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress


class TaskChild:
    """A child process with its own process group, so that its children can be ended with it.

    It reads its task, one line, from standard input; if that ends without a line, no task will come.
    process: its standard output is a pipe to this process. errors: a file with its standard error.
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
        """Send it its task, a text without a line break. If it has ended, a reader of its output finds out."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(task + "\n")
        self.dismiss()

    def dismiss(self) -> None:
        """Close its standard input: a child that waits for a task ends."""
        assert self.process.stdin is not None
        with suppress(OSError):  # the task that it was not there to read any more
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill it and the processes that it made; returns once it has ended."""
        with suppress(ProcessLookupError, PermissionError):  # they ended meanwhile
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Kill it, and close its pipes and files."""
        self.kill()
        self.dismiss()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()
