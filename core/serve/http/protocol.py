"""uvicorn's protocol of a connection, with limits for the time and the size of a request and for unread responses.

Only the connection can enforce these limits; none of them costs a chunk of a stream anything. It also adds what uvicorn
lacks: bodies of requests with `Upgrade`, responses without chunks for HTTP/1.0, and the check for exactly one Host.
Trailers are read and dropped: none of the headers that the server reads may be a trailer (RFC 9110, 6.5.1).
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hookline.core.contracts import ApiError
from hookline.core.serve.http.request_parser import RequestParser
from hookline.core.serve.http.surfaces import Surfaces
from hookline.core.serve.settings import ServeConfig

_REFUSAL = """\
HTTP/1.1 {status} {phrase}\r
content-type: application/json\r
x-request-id: {id}\r
connection: close\r
content-length: {length}\r
\r
"""


FRAME_BYTES = 12
"""Bytes of a chunk's size line, in hexadecimal digits, and of its line ends. They do not count as the head of a
request."""
PROBE_S = 1.0
"""Seconds between two checks whether a client that has half-closed its connection is still there."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one HTTP connection, with limits; `limited` makes the class for a server's settings."""

    settings: ServeConfig
    surfaces: Surfaces

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self._num_framing_bytes = 0
        """Bytes received for the current message besides its body: its head, incomplete lines, chunk extensions and
        trailers. Where a message ended in the middle of a read, up to one read more."""
        self._num_field_bytes = 0
        """The exact bytes of the target, the headers and the trailers of the current message."""
        self._is_in_head, self._is_in_message, self._is_refused = True, False, False
        self._is_begun = False
        """Whether the head of the current message is complete, so that `cycle` belongs to this message."""
        self._receiving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._begin_to_receive()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end_receiving()
        self._end_unread()
        if self._probing is not None:
            self._probing.cancel()
        super().connection_lost(exc)
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]  # no circle is left for Python to find

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._is_refused:
            return
        self._begin_to_receive()
        self._num_framing_bytes += len(data)
        super().data_received(data)
        if self._num_framing_bytes > self.settings.max_header_bytes:
            self._refuse_head()
        if not self._is_in_message and self._is_answering:
            self._end_receiving()  # it was no request, but the empty line that may follow a body

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP. msg: uvicorn's message."""
        self._refuse(400, msg)

    def on_message_begin(self) -> None:
        """See httptools."""
        self._is_in_head, self._is_in_message, self._is_begun = True, True, False
        self._num_field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. A trailer counts, too."""
        self._count_field(len(name) + len(value) + len(b":\r\n"))
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._is_in_head = False
        version = self.parser.get_http_version()
        if (num_hosts := sum(name == b"host" for name, _ in self.headers)) != 1 and (num_hosts or version == "1.1"):
            self._refuse(400, f"the request has {num_hosts} Host headers; it needs one")
        if not self._is_refused:
            super().on_headers_complete()
            self._is_begun = True
            if version == "1.0":
                self.cycle.__class__ = _WithoutChunks

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._forgive(len(body))
        if not self._is_refused:
            super().on_body(body)

    def on_chunk_header(self) -> None:
        """See httptools."""
        self._forgive(FRAME_BYTES)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self.parser.should_upgrade():
            return  # see RequestParser
        self._end_receiving()
        if not self._is_refused:
            super().on_message_complete()
        self._is_in_message = self._is_begun = False
        self._num_framing_bytes = 0

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """See asyncio.Protocol. A client that half-closes its connection still gets its response; see `_probe`.

        TLS has no half-closed connections, and an HTTP/1.0 client cannot be probed before its response begins.
        """
        is_half = self._is_answering and not self._is_in_message and self.scheme == "http"
        if not is_half or self.scope["http_version"] == "1.0":
            return None
        self.cycle.keep_alive = False  # of the last request; uvicorn closes behind it
        self._probing = self.loop.call_later(PROBE_S, self._probe)
        return True

    def _probe(self) -> None:
        """Find out whether a client that half-closed its connection is still there: if it is gone, the connection is
        reset when something is sent. Before the response begins, an interim response (100) is sent for this purpose.
        """
        if self._is_answering and not self.transport.is_closing():
            if not self.cycle.response_started and not self.pipeline:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._probing = self.loop.call_later(PROBE_S, self._probe)

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the client does not read, and data waits to be sent."""
        super().pause_writing()
        self._end_unread()
        self._unread = self.loop.call_later(self.settings.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._end_unread()
        super().resume_writing()

    def _begin_to_receive(self) -> None:
        if self._receiving is None:
            self._receiving = self.loop.call_later(self.settings.receive_s, self.transport.abort)

    def _end_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def _is_answering(self) -> bool:
        """Whether a request has come whose response is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _forgive(self, num_bytes: int) -> None:
        """Exclude bytes from the count, but never more than were received: otherwise small chunks would save up an
        allowance for a large trailer.
        """
        self._num_framing_bytes = max(self._num_framing_bytes - num_bytes, 0)

    def _count_field(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > self.settings.max_header_bytes:
            self._refuse_head()
            raise _TooLarge  # ends the parser, which may hold a whole read of such fields

    def _refuse_head(self) -> None:
        limit = self.settings.max_header_bytes
        more = "" if self._is_in_head else ", with its trailers and the extensions of its chunks,"
        self._refuse(431, f"the head of the request{more} is larger than serve.max_header_bytes={limit}")

    def _refuse(self, status: int, message: str) -> None:
        """Stop reading. Close the connection once all earlier responses are complete and this request got an error."""
        if self._is_refused:
            return
        self._is_refused = True
        if self._is_answering and not self._is_begun:
            self._end_receiving()
            self.cycle.keep_alive = False  # of the last request that waits for its answer; uvicorn closes behind it
            return
        is_unanswered = not (self._is_begun and (self.cycle.response_started or self.pipeline))
        if self._is_begun:
            self.cycle.disconnected = True  # nothing more is written for it
            self.cycle.message_event.set()
        if is_unanswered:
            path = getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")  # as much of it as has come
            body = msgspec.json.encode(self.surfaces.of(path).errors.body(ApiError(status, message)))
            phrase = HTTPStatus(status).phrase
            head = _REFUSAL.format(status=status, phrase=phrase, id=uuid.uuid4().hex, length=len(body))
            self.transport.write(head.encode() + body)
        self.transport.close()


class _TooLarge(Exception):
    """Refuse a message whose head, chunk extensions or trailers exceed the settings."""


class _WithoutChunks(RequestResponseCycle):
    """A response in HTTP/1.0: one of unknown length ends when the connection is closed."""

    _is_endless = False

    async def send(self, message: Any) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start":
            self._is_endless = not any(name == b"content-length" for name, _ in message.get("headers", ()))
            if self._is_endless:
                self.chunked_encoding, self.expected_content_length = False, sys.maxsize
        elif self._is_endless and not message.get("more_body", False):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def limited(settings: ServeConfig, surfaces: Surfaces) -> type[LimitedProtocol]:
    """The protocol of a server with these settings and surfaces."""
    return type("Protocol", (LimitedProtocol,), {"settings": settings, "surfaces": surfaces})
