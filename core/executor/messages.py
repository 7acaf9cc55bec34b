"""The form of messages between an engine's process and a rank's, over a pair of sockets: lines of JSON, and frames.

A rank's process sends lines. It receives one line, its task, and then frames, one for each step: how many int64 words
follow, and the words.
"""

from __future__ import annotations

import enum
import json
import socket
from typing import Any

import numpy as np

from hookline.core.util.arrays import IntArray

_PIECE = 1 << 16


class JsonLines:
    """Splits what arrives on a socket into messages, one JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""

    def receive(self) -> list[dict[str, Any]] | None:
        """Read once, and return the complete messages, perhaps none; None once the other end is closed or gone."""
        try:
            piece = self._connection.recv(_PIECE)
        except OSError:  # not only ConnectionError: a host that is gone is a TimeoutError, or no route to it
            piece = b""
        if not piece:
            return None
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self) -> list[dict[str, Any]]:
        """Wait for messages, and return those that have come.

        Raises: ConnectionError if the other end is closed.
        """
        while (messages := self.receive()) is not None:
            if messages:
                return messages
        raise ConnectionError("the other end is closed")


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message, whole."""
    connection.sendall(json.dumps(message, default=_plain).encode() + b"\n")


def frame_of(words: IntArray) -> memoryview:
    """The bytes of a frame."""
    return memoryview(np.concatenate([np.array([len(words)], dtype=np.int64), words]).tobytes())


def receive_frame(connection: socket.socket) -> IntArray:
    """Wait for the next frame and return its words.

    Raises: ConnectionError if the other end is closed.
    """
    return _receive_words(connection, int(_receive_words(connection, 1)[0]))


def _receive_words(connection: socket.socket, count: int) -> IntArray:
    words = np.empty(count, dtype=np.int64)
    rest = words.data.cast("B")
    while len(rest):
        num_bytes = connection.recv_into(rest)
        if not num_bytes:
            raise ConnectionError("the other end is closed")
        rest = rest[num_bytes:]
    return words


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, enum.Enum) else str(value)
