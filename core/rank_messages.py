"""What the processes of one engine tell each other besides steps: lines of JSON over a pair of sockets.

Knows the form, not who sends what. The parent's end also wakes its child for each step, with a byte.
"""

from __future__ import annotations

import enum
import json
import socket
from dataclasses import asdict
from typing import Any

from core.config import Config, Option
from core.registry import KINDS

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


def config_tree(config: Config, kernels: str) -> dict[str, Any]:
    """The configuration as the plain tree that `core.config.validate` reads again in another process; no observers.

    kernels: the entry that was chosen, since one process chooses for all.
    """
    options: dict[str, Option] = {kind: getattr(config, kind) for kind in KINDS}
    tree: dict[str, Any] = {kind: _option(option) for kind, option in options.items()}
    tree["kernels"]["name"] = kernels
    plain = {"tp": config.tp, "seed": config.seed, "dtype": config.dtype, "device": config.device}
    return {**tree, **plain, "engine": asdict(config.engine)}


def _option(option: Option) -> dict[str, Any]:
    return {"name": option.name, **({} if option.config is None else asdict(option.config))}


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, enum.Enum) else str(value)
