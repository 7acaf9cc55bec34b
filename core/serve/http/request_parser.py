"""httptools' request parser, which also reads the bodies of requests with `Upgrade`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httptools

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class RequestParser:
    """The parser of one connection, in place of uvicorn's.

    Java's HTTP client and `curl --http2` send `Upgrade: h2c` with ordinary requests, and a server may ignore it (RFC
    9110, 7.8). httptools considers a message with `Upgrade` complete after its head: the body would be lost, or be read
    as the next request. So this class reads the body with another parser. Until that begins, `should_upgrade` is true,
    and the end of the message that httptools reports is ignored.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._parser = _parser(protocol)

    def feed_data(self, data: bytes) -> None:
        """Parse received data.

        Raises: httptools.HttpParserError.
        """
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
    """Forwards the callbacks of the second parser to a protocol, except those for its artificial head."""

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
    """A head with only the headers that tell the length of the body. headers: with names in lower case."""
    framing = [b"%s: %s\r\n" % one for one in headers if one[0] in (b"content-length", b"transfer-encoding")]
    return b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing)
