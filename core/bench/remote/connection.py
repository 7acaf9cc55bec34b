"""HTTP/1.1 over asyncio for a client that reads thousands of streams over reused connections.

llhttp (httptools) parses, and data goes to a Reader at once, without waking a coroutine for each chunk.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Protocol, cast

import httptools

from hookline.core.bench.remote.settings import Address
from hookline.core.errors import clipped


class Reader(Protocol):
    """Receives one response."""

    def on_status(self, status: int) -> None:
        """The answer's status and headers have arrived."""

    def on_data(self, data: bytes) -> None:
        """A part of its body has arrived."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_failure(self, reason: str) -> None:
        """The response broke off; no further method is called."""


class Connection(asyncio.Protocol):
    """A connection, which carries one request at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._request = b""
        self._begun = self._framed = self._keeps = False
        self._uses = 0

    def send(self, request: bytes, reader: Reader) -> None:
        """Send a request whose answer goes to the reader."""
        assert self._transport is not None and self._reader is None
        self._reader, self._request, self._begun, self._framed = reader, request, False, False
        self._uses += 1
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close at once; the reader is not called again."""
        self._reader = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._reader is None:
            self.abort()  # a response without a request
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._pool.forget(self)
        reader, self._reader = self._reader, None
        if reader is None:
            return
        if not self._begun and self._uses > 1:
            # The server closed an idle connection while we sent: it never saw the request.
            self._pool.send(self._request, reader)
        elif self._begun and not self._framed and error is None:
            reader.on_end()  # a body without a length ends with its connection
        else:
            reader.on_failure("the connection closed before the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._keeps = self._parser.should_keep_alive()
        if self._reader is not None:
            self._reader.on_status(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        if self._reader is not None:
            self._reader.on_data(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        reader, self._reader = self._reader, None
        if self._keeps:
            self._pool.put_back(self)
        elif self._transport is not None:
            self._transport.close()
        if reader is not None:
            reader.on_end()

    def _fail(self, reason: str) -> None:
        reader = self._reader
        self.abort()
        if reader is not None:
            reader.on_failure(reason)


class ConnectionPool:
    """The connections to one server, as many as there are concurrent requests; of idle ones the last used is taken
    first.
    """

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self._address = address
        self._idle: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._all: set[Connection] = set()
        self._tls = ssl.create_default_context() if address.secure else None
        key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._head = f"Host: {address.authority}\r\nUser-Agent: hookline-bench\r\nAccept: */*\r\n{key}"
        self._resolved: tuple[str, int] | None = None

    def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """A whole request in bytes."""
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {self._address.prefix}{path} HTTP/1.1\r\n{self._head}{more}{kind}\r\n".encode() + body

    def send(self, request: bytes, reader: Reader) -> None:
        """Send a request over an idle connection or a new one; failures reach the reader."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                connection.send(request, reader)
                return
        task = asyncio.get_running_loop().create_task(self._open(request, reader))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def put_back(self, connection: Connection) -> None:
        """The connection is idle."""
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """The connection has ended."""
        self._all.discard(connection)

    async def close(self) -> None:
        """Close every connection; readers are not called again."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in list(self._all):
            connection.abort()
        self._all.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    async def _open(self, request: bytes, reader: Reader) -> None:
        loop = asyncio.get_running_loop()
        try:
            host, port = await self._resolve()
            name = self._address.host if self._tls is not None else None
            _, connection = await loop.create_connection(
                lambda: Connection(self), host, port, ssl=self._tls, server_hostname=name
            )
        except OSError as error:
            reader.on_failure(f"no connection: {clipped(getattr(error, 'strerror', None) or str(error))}")
            return
        self._all.add(connection)
        connection.send(request, reader)

    async def _resolve(self) -> tuple[str, int]:
        """The address that answers, looked up once: a look-up takes a thread, and may take long."""
        if self._resolved is None:
            loop, address = asyncio.get_running_loop(), self._address
            transport, _ = await loop.create_connection(asyncio.Protocol, address.host, address.port)
            host, port = transport.get_extra_info("peername")[:2]
            transport.close()
            self._resolved = host, port
        return self._resolved
