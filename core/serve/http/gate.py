"""Middleware around all endpoints: request ids, API keys, size limits, access logs, and cancellation when the client
leaves.

Pure ASGI. A chunk of a stream costs one call here: only the first message of a response is changed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
import traceback
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hookline.core.contracts import ApiError
from hookline.core.errors import clipped, one_short_line
from hookline.core.serve.access import ACCESS, Access
from hookline.core.serve.errors import response
from hookline.core.serve.http.api_keys import ApiKeys
from hookline.core.serve.http.event_loop import LoopWatch, Turns
from hookline.core.serve.http.metrics import HttpMetrics
from hookline.core.serve.http.surfaces import Surfaces
from hookline.core.serve.settings import ServeConfig

Header: TypeAlias = tuple[bytes, bytes]

OPEN_PATHS = frozenset(("/", "/health", "/ping", "/ready"))
"""Paths that need no key: health checks, and pages without data of their own."""
MAX_BEGUN = 16
"""Requests that may begin in one turn of the event loop. Each computes for some 0.3 ms before it first waits."""
_UNASKED = (b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")
"""Media types that browsers send to other origins without a preflight request."""
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_log = logging.getLogger("hookline")


@dataclass
class Life:
    """The phases of a server's life."""

    is_draining: bool = False
    """Whether the server is ending: it answers the requests that it has, and refuses new ones for completions."""
    watch: LoopWatch = field(default_factory=LoopWatch)
    """How long the event loop was blocked."""


class Gate:
    """The ASGI application around `app`. A request is cancelled when its client leaves.

    keys: empty if none is needed. surfaces: how their errors are written, and what their routes allow. headers: of each
    response, in place of X-Request-Id, where a proxy in front sets it.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeConfig,
        keys: ApiKeys,
        life: Life,
        surfaces: Surfaces,
        metrics: HttpMetrics,
        headers: Sequence[Header] | None = None,
    ) -> None:
        self._app, self._settings, self._keys, self._life, self._metrics = app, settings, keys, life, metrics
        self._surfaces, self._key_headers = surfaces, surfaces.key_headers
        self._headers = headers
        self.num_open = 0
        """Requests whose response is not complete."""
        self._receiving: set[_Passage] = set()
        """Requests whose body is not complete."""
        self._unfinished = Unfinished(max(settings.max_unfinished_bytes, settings.max_body_bytes))
        self._turns = Turns(MAX_BEGUN)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return
        scope["app"] = self  # makes Starlette's routes raise errors in place of answering them
        passage = _Passage(
            scope, receive, send, self._settings, self._surfaces, self._headers, self._receiving, self._unfinished
        )
        self.num_open += 1
        self._is_idle.clear()
        try:
            await self._turns.take()
            refusal = self._refusal(scope, passage)
            app = self._app if refusal is None else refusal
            await passage.run(app)
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._is_idle.set()
            self._metrics.count(scope, passage.status, passage.seconds)
            if self._settings.access_log and not (passage.is_good and scope["path"] in self._settings.quiet_paths):
                passage.log()

    async def wait_until_idle(self, timeout_s: float, sooner: asyncio.Future[None] | None = None) -> None:
        """Wait until every response is complete, the time is up, or `sooner` is done."""
        idle: asyncio.Future[Any] = asyncio.ensure_future(self._is_idle.wait())
        waits = [idle] if sooner is None else [idle, sooner]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()

    def drain(self) -> None:
        """Refuse new requests for completions, and those whose body is not complete."""
        self._life.is_draining = True
        for passage in list(self._receiving):
            passage.refuse(_stopping())

    def _refusal(self, scope: Scope, passage: _Passage) -> ASGIApp | None:
        """The application that refuses the request, or None if the request may go on."""
        error = self._fault(scope, passage)
        return None if error is None else response(error, self._surfaces.form_of(scope))

    def _fault(self, scope: Scope, passage: _Passage) -> ApiError | None:
        if len(self._keys):
            if scope["path"] not in OPEN_PATHS and not self._keys.accept(scope["headers"], self._key_headers):
                return _unauthorized()
        elif self._headers is None and (name := foreign_host(scope, self._settings.hosts)):
            return _foreign(name)
        if self._life.is_draining and scope["method"] == "POST":
            return _stopping()
        is_of_page, type = False, b""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and (error := passage.excess(int(value))) is not None:
                return error
            if name == b"origin":
                is_of_page = not {"*", value.decode("latin-1")} & set(self._settings.cors_origins)
            elif name == b"content-type":
                type = value.partition(b";")[0].strip().lower()
        if is_of_page and scope["method"] == "POST" and type in _UNASKED:
            message = "a page in a browser must send its body with Content-Type: application/json"
            return ApiError(415, message, code="unsupported_media_type")
        return None


class _Passage:
    """A request on its way through the gate. receiving: the gate's set of requests whose body is incomplete."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        settings: ServeConfig,
        surfaces: Surfaces,
        headers: Sequence[Header] | None,
        receiving: set[_Passage],
        unfinished: Unfinished,
    ) -> None:
        self._receiving, self._unfinished, self._task = receiving, unfinished, asyncio.current_task()
        self._refusal: ApiError | None = None
        self._scope, self._receive, self._send, self._surfaces = scope, receive, send, surfaces
        self._own_limit, self._limit = surfaces.max_body_bytes(scope), settings.max_body_bytes
        self._access = Access()
        ACCESS.set(self._access)
        self._num_bytes, self._status = 0, 0
        self._is_complete = self._is_answered = False
        self._has_left = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self.id = _request_id(scope["headers"])
        self._headers = surfaces.id_headers(scope, self.id) if headers is None else headers
        scope.setdefault("state", {})["request_id"] = self.id.decode()

    async def run(self, app: ASGIApp) -> None:
        """Run the application. No error leaves this method."""
        try:
            await app(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            refusal = self._refusal
            if not self._has_left.is_set() and refusal is None:
                raise
            assert self._task is not None
            self._task.uncancel()
            if refusal is not None:
                await self._answer(refusal)
        except ClientDisconnect:  # the response has begun
            self._has_left.set()
        except HTTPException as error:
            allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
            message = f"this path takes {', '.join(allowed)} alone" if allowed != [""] else error.detail
            failure = ApiError(error.status_code, message, headers=error.headers)
            await self._answer(failure)
        except Exception as error:
            await self._answer_fault(error)
        finally:
            self._unfinished.forget(self)
            watch, self._watch = self._watch, None  # leave no reference cycle
            self._task = None
            if watch is not None:
                watch.cancel()

    def refuse(self, error: ApiError) -> None:
        """Answer with this error although the body is incomplete."""
        assert self._task is not None
        self._receiving.discard(self)
        self._unfinished.forget(self)
        self._refusal = error
        self._task.cancel()

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI's send, which adds our headers to the first message."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        elif not message.get("more_body", False):
            self._is_answered = True
        return self._send(message)

    async def receive(self) -> Message:
        """ASGI's receive. It counts the bytes of the body, and then watches for the client to disconnect."""
        if self._is_complete:
            await self._has_left.wait()
            return {"type": "http.disconnect"}
        self._receiving.add(self)
        try:
            message = await self._receive()
        finally:
            self._receiving.discard(self)
        self._num_bytes += len(message.get("body", b""))
        if (error := self.excess(self._num_bytes)) is not None:
            raise error
        if message.get("more_body", False):
            self._unfinished.hold(self, self._num_bytes)
        elif message["type"] == "http.request":
            self._is_complete = True
            self._unfinished.forget(self)
            assert self._task is not None
            self._watch = asyncio.get_running_loop().create_task(self._watch_for_end(self._task))
        return message

    def excess(self, num_bytes: int) -> ApiError | None:
        """The error of a body of this size; None if the endpoint takes it."""
        if self._own_limit is not None:
            what = f"the {self._own_limit} bytes that this endpoint takes"
            return None if num_bytes <= self._own_limit else _too_large(what)
        return None if num_bytes <= self._limit else _too_large(f"serve.max_body_bytes={self._limit}")

    async def _watch_for_end(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_answered:  # other messages only report that nothing more can be sent
            self._has_left.set()
            task.cancel()

    async def _answer(self, error: ApiError) -> None:
        """Send an error in the form of the API that the request belongs to."""
        await response(error, self._surfaces.form_of(self._scope))(self._scope, self.receive, self.send)

    async def _answer_fault(self, error: Exception) -> None:
        """Answer a bug: the log gets its place, and the client the number of the request."""
        shown = "".join(traceback.format_exception(error)[-3:])
        _log.error("request %s failed: %s\n%s", self.id.decode(), one_short_line(error), shown)
        if not self._status:
            message = f"an error of the server; its log has more under request id {self.id.decode()}"
            failure = ApiError(500, message, "server_error", code="internal_error")
            await self._answer(failure)

    @property
    def status(self) -> int:
        """The status that was answered with; 0 if no answer began."""
        return self._status

    @property
    def seconds(self) -> float:
        """How long it has been under way."""
        return time.monotonic() - self._access.started_s

    @property
    def is_good(self) -> bool:
        """Whether it was answered without an error."""
        return 0 < self._status < 400 and not self._has_left.is_set()

    def log(self) -> None:
        """Write the request's line to the access log."""
        client = (self._scope.get("client") or ("-",))[0]
        status = "left" if self._has_left.is_set() else self._status or "-"
        self._access.log(client, self._scope["method"], self._scope["path"], status, self.id.decode())


class Unfinished:
    """The memory taken by incomplete bodies, which is limited so that clients who never end their bodies cannot fill
    it.

    Above `most` bytes the largest incomplete body is refused, so that small requests are not affected by large ones.
    """

    def __init__(self, most: int) -> None:
        self._most, self._sizes, self._sum = most, dict[_Passage, int](), 0

    def hold(self, passage: _Passage, num_bytes: int) -> None:
        """Note the size of a request's body so far.

        Raises: ApiError if the bodies together exceed the limit and this one is the largest.
        """
        self._sum += num_bytes - self._sizes.get(passage, 0)
        self._sizes[passage] = num_bytes
        while self._sum > self._most:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            if largest is passage:
                self.forget(passage)
                raise _too_many(self._most)
            largest.refuse(_too_many(self._most))

    def forget(self, passage: _Passage) -> None:
        """Forget a request whose body is complete or which has ended."""
        self._sum -= self._sizes.pop(passage, 0)


def foreign_host(scope: Scope, known: Sequence[str]) -> str:
    """The Host of a request over loopback if it is not a name of this machine; else "".

    A web page can make its own domain resolve to 127.0.0.1, and its scripts then reach this server under that domain
    (DNS rebinding). Names without a dot are never public, so they are accepted.
    """
    address = (scope.get("server") or ("",))[0]
    if "*" in known or not _is_loopback(address):
        return ""
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    plain = name.lower().removesuffix(".")
    if "." not in plain or plain.endswith(".localhost") or plain in map(str.lower, known) or _is_address(plain):
        return ""
    return name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=64)
def _is_loopback(name: str) -> bool:
    """Of an address of this machine, of which there are few; never of a name that a client gave."""
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()


def _unauthorized() -> ApiError:
    message = "the API key is missing or wrong; send it as: Authorization: Bearer KEY"
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, "authentication_error", code="invalid_api_key", headers=headers)


def _foreign(name: str) -> ApiError:
    message = (
        f"the server has no key, and is asked over loopback as {clipped(name)!r}, which may be a page's own name: use "
        "localhost, set a key, or name it in serve.hosts"
    )
    return ApiError(403, message, "permission_error", code="foreign_host")


def _too_many(most: int) -> ApiError:
    headers = {"Retry-After": "1", "Connection": "close"}
    message = (
        f"bodies that have not come whole take more than serve.max_unfinished_bytes={most}; this one is the largest"
    )
    return ApiError(503, message, "server_error", code="too_many_bodies", headers=headers)


def _stopping() -> ApiError:
    headers = {"Connection": "close"}
    return ApiError(503, "the server is stopping", "server_error", code="stopping", headers=headers)


def _too_large(limit: str) -> ApiError:
    return ApiError(413, f"the body is larger than {limit}", code="body_too_large", headers={"Connection": "close"})
