"""What the processes of one engine tell each other besides steps: lines of JSON over a pair of sockets.

Knows the form, not who sends what. The parent's end also wakes its child for each step, with a byte.
"""

from __future__ import annotations

import enum
import json
import socket
from typing import Any

_PIECE = 1 << 16


class Line:
    """Takes what arrives on a socket apart into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that one read brings, perhaps none; None once the other end is closed."""
        try:
            piece = self._connection.recv(_PIECE)
        except ConnectionError:
            piece = b""
        if not piece:
            return None
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [json.loads(line) for line in lines]

    def first(self) -> dict[str, Any]:
        """Wait for the first message; nothing may follow it yet.

        Raises: ConnectionError if the other end is closed.
        """
        while (messages := self.receive()) is not None:
            if messages:
                return messages[0]
        raise ConnectionError("the other end is closed")


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message, whole."""
    connection.sendall(json.dumps(message, default=_plain).encode() + b"\n")


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, enum.Enum) else str(value)
