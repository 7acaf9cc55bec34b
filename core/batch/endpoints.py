"""Calls the server's endpoints without a server: the application of `hookline serve`, in this process."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from hookline.core.batch.rows import Row
from hookline.core.serve.access import ACCESS, Access
from hookline.core.serve.endpoints.body import IGNORED_HEADER

App = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""
_IGNORED = IGNORED_HEADER.lower().encode()


def posting(app: App, *, access_log: bool = False) -> Callable[[Row], Awaitable[dict[str, Any]]]:
    """A function that sends a row to the application's endpoint; it returns `status_code`, `request_id`, the parsed
    `body`, and `headers` if one names fields that had no effect.

    access_log: whether each row has a line in it, as a request has.
    """

    async def _post(row: Row) -> dict[str, Any]:
        access = Access()
        ACCESS.set(access)  # of this row's task; not of the request during which its batch began
        request_id = secrets.token_hex(12)
        sent: list[MutableMapping[str, Any]] = []
        received = iter([{"type": "http.request", "body": row.body, "more_body": False}])

        async def _receive() -> MutableMapping[str, Any]:
            return next(received, None) or await _never()

        async def _send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await app(_scope(row, request_id), _receive, _send)
        data = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
        found = {"status_code": sent[0]["status"], "request_id": request_id, "body": _parsed(data)}
        if access_log:
            access.log("batch", "POST", row.path, found["status_code"], request_id)
        ignored = [value.decode() for name, value in sent[0]["headers"] if name == _IGNORED]
        return {**found, "headers": {IGNORED_HEADER: ignored[0]}} if ignored else found

    return _post


async def _never() -> MutableMapping[str, Any]:
    """ASGI's receive; the client of a batch never disconnects."""
    future: asyncio.Future[MutableMapping[str, Any]] = asyncio.get_running_loop().create_future()
    return await future


def _scope(row: Row, request_id: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": row.path,
        "raw_path": row.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(row.body)).encode()),
            (b"x-request-id", request_id.encode()),
        ],
        "client": None,
        "server": None,
        "state": {"request_id": request_id},
    }


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return {"error": {"message": data.decode(errors="replace")}}
