"""A rank's process, as the engine's process sees it: a socket to it, and ways to end it.

Ranks on this host are plain child processes, not multiprocessing's: a script that makes an engine needs no `__main__`
guard. placed.py has the ranks that a plugin has started. `core.executor.monitor` decides whether a rank is lost.
"""

from __future__ import annotations

import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hookline.core.executor.messages import JsonLines, send_message
from hookline.core.util.child_python import python_command
from hookline.core.util.process import ending_of, is_stopped

KILLED_S = 5.0
"""Longest wait in seconds for killed processes to be gone."""
_STANDARD_ERROR = 2


class Peer(ABC):
    """A rank's process behind a socket. line: reads its messages. answers: the socket of rank 0's answers to steps."""

    def __init__(self, rank: int, connection: socket.socket, answers: socket.socket | None = None) -> None:
        self.rank, self.connection, self.answers = rank, connection, answers
        self.line = JsonLines(connection)

    def tell(self, task: dict[str, Any]) -> None:
        """Send the task. That the process is gone is not noticed here, but by the monitor."""
        with suppress(OSError):
            send_message(self.connection, task)

    def send_some(self, data: memoryview) -> memoryview:
        """Send what fits now and return the rest. That the process is gone is not noticed here, but by the monitor."""
        try:
            return data[self.connection.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data
        except OSError:
            return data[:0]

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process, until another one continues it."""
        return False

    @abstractmethod
    def how_it_ended(self) -> str:
        """How a process ended whose socket is closed, in words for an error message."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, a stopped one too; every collective with it breaks off. Does not wait."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for at most timeout_s seconds; returns whether the process is gone, and its GPU's work with it."""

    def close(self) -> None:
        """Close the sockets to the process."""
        self.connection.close()
        if self.answers is not None:
            self.answers.close()


class Child(Peer):
    """A rank that is a child process.

    target: its main function, as "module:function", called with the file descriptors of its sockets. answers: whether
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


def end(peers: Sequence[Peer], patience_s: float) -> None:
    """Wait for processes that have been told to end, and kill those still running after patience_s."""
    deadline = time.monotonic() + patience_s
    for peer in peers:
        try:
            if not peer.wait(max(0.0, deadline - time.monotonic())):
                peer.kill()
                peer.wait(KILLED_S)
        finally:
            peer.close()


def await_end(peers: Sequence[Peer], patience_s: float) -> bool:
    """Wait for at most patience_s seconds; returns whether all processes are gone."""
    deadline = time.monotonic() + patience_s
    return all([peer.wait(max(0.0, deadline - time.monotonic())) for peer in peers])


def kill(peers: Sequence[Peer]) -> None:
    """End processes at once, stopped ones too; their sockets close, which breaks off every collective with them."""
    for peer in peers:
        peer.kill()
