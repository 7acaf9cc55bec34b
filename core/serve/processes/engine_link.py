"""A front end's side of the socket to the engine's process: sends messages, and hands on received messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from hookline.core.errors import EngineError
from hookline.core.serve.processes.messages import FromEngine, Hello, Message, decode_from_engine, encode

MAX_UNSENT = 10_000
"""Messages kept for an engine that does not read: far more than there can be open requests."""
MAX_RECEIVED = 16
"""Most messages read in one turn of the event loop, so that other tasks run in between."""


class EngineLink:
    """Connected on the running event loop; `take` gets the received messages, in order.

    name: of this connection, unique among front ends and never used again.
    """

    def __init__(self, address: str, name: str, take: Callable[[list[FromEngine]], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, name.encode())
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, MAX_UNSENT)
        self._socket.connect(address)
        self._fd = int(self._socket.get(zmq.FD))
        self._is_closed = False
        self._loop.add_reader(self._fd, self._receive)
        self.send(Hello())

    def send(self, message: Message) -> None:
        """Send a message, without waiting.

        Raises: EngineError if the engine's process has read nothing for long; the encoder's errors.
        """
        if self._is_closed:
            return
        data = encode(message)
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineError("the engine's process takes no more requests") from None
        self._loop.call_soon(self._receive)  # sending may take the mark off the descriptor that says there is news

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=0)

    def _receive(self) -> None:
        """Read all waiting messages: the socket's descriptor becomes readable once, not once a message."""
        if self._is_closed:
            return
        messages: list[FromEngine] = []
        try:
            while len(messages) < MAX_RECEIVED:
                messages.append(decode_from_engine(self._socket.recv(zmq.NOBLOCK)))
            self._loop.call_soon(self._receive)
        except zmq.Again:
            pass
        if messages:
            self._take(messages)
