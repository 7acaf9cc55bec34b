"""httptools' parser of requests, which also reads the bodies of requests that ask for another protocol."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httptools

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class RequestParser:
    """The parser of one connection, in place of the one that uvicorn makes.

    Java's HTTP client and `curl --http2` send `Upgrade: h2c` along with ordinary requests, and a server may answer
    them as if it were not there (RFC 9110, 7.8). httptools ends a message with `Upgrade` at its head: its body would
    be lost, and what comes of it later be read as the next request. Here another parser reads the body. Until it does,
    `should_upgrade` is true, and the end of the message that is told then is none.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._parser = _parser(protocol)

    def feed_data(self, data: bytes) -> None:
        """Read what has come. Raises: httptools.HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._parser = _parser(_AfterHead(self._protocol))
                self._parser.feed_data(_same_framing(self._protocol.headers))
            else:
                return

    def get_http_version(self) -> str:
        """As of httptools."""
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        """As of httptools."""
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        """As of httptools."""
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """As of httptools."""
        return self._parser.should_upgrade()


class _AfterHead:
    """Tells a protocol what a parser finds after its first head."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._is_after = False

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._is_after:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        if self._is_after:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if self._is_after:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._is_after:
            self._protocol.on_headers_complete()
        self._is_after = True

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._protocol.on_body(body)

    def on_chunk_header(self) -> None:
        """See httptools; uvicorn's own protocol has none."""
        self._protocol.on_chunk_header()  # type: ignore[attr-defined]

    def on_message_complete(self) -> None:
        """See httptools."""
        self._protocol.on_message_complete()


def _parser(tells: Any) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(tells)
    with suppress(AttributeError):  # before httptools 0.6.3
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it: such data is left unread
    return parser


def _same_framing(headers: list[tuple[bytes, bytes]]) -> bytes:
    """A head of nothing but what says how long the body is. headers: with their names in small letters."""
    framing = [b"%s: %s\r\n" % one for one in headers if one[0] in (b"content-length", b"transfer-encoding")]
    return b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing)
