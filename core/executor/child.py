"""The processes of ranks on this host, started by the engine's process.

They are plain child processes, not multiprocessing's: a script that makes an engine needs no `__main__` guard.
"""

from __future__ import annotations

import socket
import subprocess

from hookline.core.executor.peer import Peer
from hookline.core.util.child_python import python_command
from hookline.core.util.process import ending_of, is_stopped

_STANDARD_ERROR = 2


class Child(Peer):
    """A rank that is a child process.

    target: what it runs, as "module:function", with the file descriptors of its sockets as arguments. answers: whether
    it has a second socket, for the answers of rank 0.
    """

    def __init__(self, rank: int, memory_fd: int, target: str, *, answers: bool = False) -> None:
        pairs = [socket.socketpair() for _ in range(1 + answers)]
        super().__init__(rank, *(ours for ours, _ in pairs))
        theirs = [one.fileno() for _, one in pairs]
        try:
            # Only results go to standard output, and those are the parent's.
            self.process = subprocess.Popen(
                python_command(target, *map(str, theirs)),
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR,
                pass_fds=(*theirs, memory_fd),
            )
        finally:
            for _, one in pairs:
                one.close()

    @property
    def is_stopped(self) -> bool:
        """See Peer."""
        return is_stopped(self.process.pid)

    def how_it_ended(self) -> str:
        """See Peer."""
        try:
            return ending_of(self.process.wait(timeout=2))
        except subprocess.TimeoutExpired:
            return "closed its connection"

    def kill(self) -> None:
        """See Peer."""
        self.process.kill()

    def wait(self, timeout_s: float) -> bool:
        """See Peer."""
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __str__(self) -> str:
        return f"pid {self.process.pid}"
