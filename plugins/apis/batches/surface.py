"""The routes of OpenAI's files and batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route, Router

from hookline.core.contracts import ApiError, ApiRoute, ApiSurface
from hookline.core.errors import ConfigError
from hookline.core.serving import BATCH_PATHS, Answers, ServedEngine, invalid, json_response, posting
from hookline.plugins.apis.batches.runs import OPEN, Runs
from hookline.plugins.apis.batches.store import BATCH, FILE, Store, Values
from hookline.plugins.apis.openai.errors import OPENAI_ERRORS
from hookline.plugins.apis.openai.surface import OpenAI

DAY_S = 86_400
FORM_BYTES = 64 * 1024
"""Of an upload beside its file."""


class BatchRequest(msgspec.Struct, kw_only=True):
    """A batch to be answered."""

    input_file_id: str
    """The file with the requests, one a line."""
    endpoint: str
    """Of all requests."""
    completion_window: str = "24h"
    """How long the batch may take: a number of hours, minutes or seconds, as 24h, 10m, 30s."""
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None
    """`{"anchor": "created_at", "seconds": N}`: when the answers expire."""


class Batches(ApiSurface):
    """`/v1/files` and `/v1/batches` over a local folder."""

    errors = OPENAI_ERRORS

    def __init__(self, config: Any, engine: ServedEngine) -> None:
        try:
            import python_multipart  # noqa: F401
        except ImportError:
            raise ConfigError("serve.apis: batches needs the package python-multipart, which takes uploads") from None
        self._config = config
        self._store = Store(Path(config.folder).expanduser(), config.max_bytes)
        max_len = engine.facts.max_model_len
        routes = [
            Route(one.path, Answers(one.endpoint, OPENAI_ERRORS, max_len), methods=[one.method])
            for one in OpenAI(None, engine).routes()
            if one.path in BATCH_PATHS
        ]
        self._post = posting(Router(routes), access_log=engine.settings.access_log)
        self._death = lambda: engine.client.death
        self._made: Runs | None = None

    @property
    def _runs(self) -> Runs:
        config = self._config
        if self._made is None:  # on the event loop
            self._made = Runs(self._store, self._post, self._death, config.max_rows, config.max_bytes, config.keep_s)
        return self._made

    def routes(self) -> Sequence[ApiRoute]:
        """See ApiSurface."""
        upload_bytes = self._config.max_file_bytes + FORM_BYTES
        return [
            ApiRoute("POST", "/v1/files", self._upload, "Upload a file", max_body_bytes=upload_bytes),
            ApiRoute("GET", "/v1/files", self._files, "The files"),
            ApiRoute("GET", "/v1/files/{id}", self._file, "A file's object"),
            ApiRoute("DELETE", "/v1/files/{id}", self._delete, "Delete a file"),
            ApiRoute("GET", "/v1/files/{id}/content", self._content, "A file's content"),
            ApiRoute("POST", "/v1/batches", self._create, "Answer a file of requests", BatchRequest),
            ApiRoute("GET", "/v1/batches", self._batches, "The batches"),
            ApiRoute("GET", "/v1/batches/{id}", self._batch, "How far a batch is"),
            ApiRoute("POST", "/v1/batches/{id}/cancel", self._cancel, "End a batch and keep its answers"),
        ]

    def _look(self) -> None:
        """Delete expired objects, and resume batches that an earlier process left unfinished."""
        self._store.purge()
        self._runs.go_on()

    async def _upload(self, request: Request) -> Response:
        self._look()
        async with request.form(max_files=1, max_fields=8, max_part_size=FORM_BYTES) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise invalid("file must be a file, in a body of multipart/form-data", "file")
            if not isinstance(purpose, str) or not purpose:
                raise invalid("purpose must be a text, as batch", "purpose")
            size = file.size or 0
            if size > self._config.max_file_bytes:
                raise ApiError(413, f"the file has {size} bytes; at most {self._config.max_file_bytes} are taken")
            self._store.check_room(size)
            now, after_s = int(time.time()), _seconds(form.get("expires_after[seconds]"), self._config.keep_s)
            values: Values = {
                "id": self._store.new_id("file-"),
                "object": "file",
                "bytes": size,
                "created_at": now,
                "expires_at": now + after_s,
                "filename": str(file.filename or "file")[:255],
                "purpose": purpose[:64],
                "status": "processed",
            }
            with self._store.path(values["id"]).open("xb") as kept:
                while piece := await file.read(2**20):
                    kept.write(piece)
        return json_response(self._store.put(FILE, values, values["expires_at"]))

    async def _files(self, request: Request) -> Response:
        return self._listed(FILE, request, request.query_params.get("purpose"))

    async def _batches(self, request: Request) -> Response:
        return self._listed(BATCH, request, None)

    def _listed(self, kind: str, request: Request, purpose: str | None) -> Response:
        self._look()
        asked = request.query_params
        limit = asked.get("limit", "20")
        if not (limit.isascii() and limit.isdecimal() and 0 < int(limit[:6]) <= 10_000):
            raise invalid(f"limit={limit[:40]!r} must be a number from 1 to 10000", "limit")
        newest_first, most = asked.get("order", "desc") != "asc", int(limit[:6])
        found = self._store.page(kind, most + 1, asked.get("after"), newest_first=newest_first, purpose=purpose)
        page = found[:most]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": page, "has_more": len(found) > len(page), **ends})

    async def _file(self, request: Request) -> Response:
        self._look()
        return json_response(self._store.get(FILE, request.path_params["id"]))

    async def _delete(self, request: Request) -> Response:
        self._look()
        id = self._store.get(FILE, request.path_params["id"])["id"]
        self._store.delete(id)
        return json_response({"id": id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        self._look()
        file = self._store.get(FILE, request.path_params["id"])
        return FileResponse(self._store.path(file["id"]), media_type="application/octet-stream")

    async def _create(self, request: Request) -> Response:
        self._look()
        try:
            asked = msgspec.json.decode(await request.body(), type=BatchRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise invalid(str(error)) from None
        if asked.endpoint not in BATCH_PATHS:
            raise invalid(f"endpoint={asked.endpoint[:80]!r} is not one of {', '.join(BATCH_PATHS)}", "endpoint")
        pairs = (asked.metadata or {}).items()
        if len(pairs) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in pairs):
            raise invalid(
                "metadata holds at most 16 pairs, of keys up to 64 and values up to 512 characters", "metadata"
            )
        expires = asked.output_expires_after
        if expires is not None:
            expires = {"anchor": "created_at", "seconds": _seconds(expires.get("seconds"), self._config.keep_s)}
        self._store.get(FILE, asked.input_file_id, "input_file_id")
        self._store.check_room(0)
        now = int(time.time())
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        batch: Values = {
            "id": self._store.new_id("batch_"),
            "object": "batch",
            "endpoint": asked.endpoint,
            "errors": None,
            "input_file_id": asked.input_file_id,
            "completion_window": asked.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + _window_s(asked.completion_window),
            **{f"{one}_at": None for one in times},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": asked.metadata,
            "output_expires_after": expires,
        }
        self._store.put(BATCH, batch, None)
        self._runs.go_on()
        return json_response(batch)

    async def _batch(self, request: Request) -> Response:
        self._look()
        return json_response(self._store.get(BATCH, request.path_params["id"]))

    async def _cancel(self, request: Request) -> Response:
        self._look()

        def _cancelled(batch: Values) -> None:
            if batch["status"] not in OPEN:
                raise ApiError(409, f"the batch is {batch['status']}; there is nothing to cancel", code="conflict")
            batch.update(status="cancelling", cancelling_at=int(time.time()))

        return json_response(self._store.change(request.path_params["id"], _cancelled))


def _seconds(given: Any, otherwise: int) -> int:
    if given is None:
        return otherwise
    try:
        seconds = int(given)
    except (TypeError, ValueError):
        seconds = 0
    if not 0 < seconds <= otherwise:
        raise invalid(f"expires_after.seconds must be a number from 1 to {otherwise}", "expires_after")
    return seconds


def _window_s(window: str) -> int:
    number, unit_s = window[:-1], {"h": 3600, "m": 60, "s": 1}.get(window[-1:], 0)
    seconds = int(number[:9]) * unit_s if number.isascii() and number.isdecimal() else 0
    if not 0 < seconds <= 30 * DAY_S:
        message = f"completion_window={window[:40]!r} is no time such as 24h, 10m or 30s, up to 30 days"
        raise invalid(message, "completion_window")
    return seconds
