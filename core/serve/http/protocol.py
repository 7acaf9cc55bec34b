"""uvicorn's protocol of a connection, with limits on how long and how large a request may be, and on unread answers.

They are here since only the connection knows of them; none of them costs a chunk of a stream anything.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hookline.core.serve.errors import ApiError
from hookline.core.serve.http.error_forms import form_of
from hookline.core.serve.settings import ServeConfig

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
)


class LimitedProtocol(HttpToolsProtocol):
    """One connection; `limited` makes the class of a server's settings."""

    settings: ServeConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._is_in_head, self._is_refused = True, False
        self._receiving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._begin_to_receive()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end_receiving()
        self._end_unread()
        super().connection_lost(exc)
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]  # no circle is left for Python to find

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._is_refused:
            return
        self._begin_to_receive()
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > self.settings.max_header_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """See httptools."""
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """See httptools."""
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._is_in_head, self._head_bytes = False, 0
        if num_bytes > self.settings.max_header_bytes:
            self._refuse_head()
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._end_receiving()
        if not self._is_refused:
            super().on_message_complete()

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the client does not read what waits for it."""
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

    def _refuse_head(self) -> None:
        self._is_refused = True
        message = f"the head of the request is larger than serve.max_header_bytes={self.settings.max_header_bytes}"
        path = getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")  # as much of it as has come
        body = msgspec.json.encode(form_of(path).body(ApiError(431, message)))
        self.transport.write(_TOO_LARGE % (len(body), body))
        self.transport.close()


def limited(settings: ServeConfig) -> type[LimitedProtocol]:
    """The protocol of a server with these settings."""
    return type("Protocol", (LimitedProtocol,), {"settings": settings})
