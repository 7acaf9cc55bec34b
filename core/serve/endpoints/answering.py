"""Responses: whole, or as a stream of server-sent events.

The status of a stream is decided when its first event is ready, so that a request which is refused gets the status of
its error; later errors are sent as events. These are pure ASGI applications: Starlette's queue in between would cost
more than making an event. When a client leaves, the gate cancels what runs here, which closes the request's generation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hookline.core.contracts import ApiError, ErrorForm
from hookline.core.errors import HooklineError, one_short_line
from hookline.core.serve.access import note_reason
from hookline.core.serve.errors import api_error, response

_log = logging.getLogger("hookline")
_EVENTS = "text/event-stream"
_STREAM = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_KEEP_ALIVE = b": keep-alive\n\n"
_SMALLEST_COMPRESSED = 1024
"""Bytes of an answer below which compressing it saves too little."""


def told(error: BaseException, max_model_len: int) -> ApiError:
    """The error as it is sent to the client. Details that the client must not see go to the log."""
    failure = api_error(error, max_model_len)
    note_reason(failure.message)
    if failure.status >= 500 and failure is not error:  # an ApiError tells the client all, and the access log has it
        trace = None if isinstance(error, HooklineError) else error
        _log.error("a request ended with status %d: %s", failure.status, one_short_line(error), exc_info=trace)
    return failure


def json_response(values: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a JSON body; its encoder is ten times as fast as Python's own."""
    return Response(msgspec.json.encode(values), headers=dict(headers or {}), media_type="application/json")


class EventStream(Response):
    """Sends the events that a generator yields, each a whole frame or several.

    close: ends what the events are made of; called however the stream ends. keep_alive_s: seconds of silence after
    which a comment is sent, if these are server-sent events; None never sends one. max_model_len: for the words of an
    error.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        form: ErrorForm,
        max_model_len: int,
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive_s: float | None = None,
    ) -> None:
        has_comments = form.stream_type.startswith(_EVENTS)
        self._events, self._close, self._keep_alive_s = events, close, keep_alive_s if has_comments else None
        self._form, self._max_model_len = form, max_model_len
        self.status_code, self.background = 200, None
        type = (b"content-type", form.stream_type.encode())
        self._head = [type, *_STREAM, *((k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items())]
        self._is_started, self._is_silent = False, True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        keeper = asyncio.ensure_future(self._keep_alive(send)) if self._keep_alive_s is not None else None
        try:
            await self._send_all(scope, receive, send)
        finally:
            if keeper is not None:
                keeper.cancel()
            await self._events.aclose()
            await self._close()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for event in self._events:
                if not self._is_started:
                    await self._start(send)
                self._is_silent = False
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            failure = told(error, self._max_model_len)
            if not self._is_started:
                self._is_started = True
                await response(failure, self._form)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self._form.frames(failure), "more_body": True})
        await self._start(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._head})

    async def _keep_alive(self, send: Send) -> None:
        assert self._keep_alive_s is not None
        with suppress(OSError):
            while True:
                await asyncio.sleep(self._keep_alive_s)
                if self._is_silent:
                    await self._start(send)
                    await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
                self._is_silent = True


@dataclass(frozen=True)
class Answers:
    """An endpoint for a Route: errors of its handler become responses in the API's form.

    gzip: whether answers are compressed for clients that accept it; streams never are, as each event is to arrive when
    it is made. It is an ASGI application because Starlette wraps a function of a request, and this costs each event of
    a stream.
    """

    handler: Callable[[Request], Awaitable[Response]]
    form: ErrorForm
    max_model_len: int
    gzip: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Raises: ClientDisconnect if the client has left and no response can reach it."""
        made: ASGIApp
        try:
            made = await self.handler(Request(scope, receive, send))
        except ClientDisconnect:
            raise
        except Exception as error:
            made = response(told(error, self.max_model_len), self.form)
        if self.gzip and not isinstance(made, EventStream):
            made = GZipMiddleware(made, _SMALLEST_COMPRESSED)
        await made(scope, receive, send)
