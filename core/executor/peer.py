"""One rank in a process of its own, as the engine's process sees it: told what to do, heard, ended.

Knows no tensors and judges nobody; `core.executor.monitor` does. How the process came to be is its subclasses' matter.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hookline.core.executor.messages import JsonLines, send_message


class Peer(ABC):
    """A rank's process behind a socket. `line` brings its messages; `answers`, of rank 0 alone, those of its steps."""

    def __init__(self, rank: int, connection: socket.socket, answers: socket.socket | None = None) -> None:
        self.rank, self.connection, self.answers = rank, connection, answers
        self.line = JsonLines(connection)

    def tell(self, task: dict[str, Any]) -> None:
        """Send the task; a process that has gone already is found out about later."""
        with suppress(OSError):
            send_message(self.connection, task)

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
        return False

    @abstractmethod
    def how_it_ended(self) -> str:
        """Cause of death, for a process whose socket is closed."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, a stopped one too; every collective with it breaks off. Does not wait."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Whether the process is gone within so many seconds, and with it what it had its GPU do."""

    def close(self) -> None:
        """Give back what connects this process with it."""
        self.connection.close()
        if self.answers is not None:
            self.answers.close()


def end(peers: Sequence[Peer], patience_s: float) -> None:
    """Wait for processes that have been told to end, and kill those that do not."""
    deadline = time.monotonic() + patience_s
    for peer in peers:
        try:
            if not peer.wait(max(0.0, deadline - time.monotonic())):
                peer.kill()
                peer.wait(KILLED_S)
        finally:
            peer.close()


KILLED_S = 5.0
"""Longest wait for killed processes to be gone."""


def await_end(peers: Sequence[Peer], patience_s: float) -> bool:
    """Whether all processes are gone within so many seconds."""
    deadline = time.monotonic() + patience_s
    return all([peer.wait(max(0.0, deadline - time.monotonic())) for peer in peers])


def kill(peers: Sequence[Peer]) -> None:
    """End processes at once, stopped ones too; their sockets close, and so every collective with them breaks off."""
    for peer in peers:
        peer.kill()
