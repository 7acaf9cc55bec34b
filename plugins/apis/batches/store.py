"""Files and batches in a folder: their objects in SQLite, which several front ends share, and the files beside it."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hookline.core.contracts import ApiError
from hookline.core.errors import ConfigError

Values = dict[str, Any]
FILE, BATCH = "file", "batch"
OBJECT_BYTES = 4096
"""Bytes that every object counts besides its file, so that the number of empty objects is bounded, too."""
_TABLE = """CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, kind TEXT NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER, json TEXT NOT NULL)"""


class Store:
    """max_bytes: of all files and objects together. Methods take well under a millisecond.

    Raises: ConfigError if the folder cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(folder / "objects.sqlite", isolation_level=None, timeout=10)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(_TABLE)
            self._db.execute("CREATE INDEX IF NOT EXISTS ends ON objects (kind, expires_at)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"serve.apis.batches.folder={folder} cannot be used: {error}") from error

    def path(self, id: str) -> Path:
        """Where a file's content lies. id: of an object of this store, or with a suffix."""
        return self._folder / id

    def new_id(self, prefix: str) -> str:
        """A random id of 96 bits, which no client can guess."""
        return f"{prefix}{secrets.token_hex(12)}"

    def check_room(self, num_bytes: int) -> None:
        """Raises: ApiError with status 413 if there is no room for so many bytes."""
        (used,) = self._db.execute("SELECT coalesce(sum(bytes), 0) FROM objects").fetchone()
        if used + num_bytes + OBJECT_BYTES > self._max_bytes:
            raise ApiError(
                413,
                f"{num_bytes} bytes do not fit: the store holds {used} of {self._max_bytes} bytes; delete files",
                code="storage_full",
            )

    def put(self, kind: str, values: Values, expires_at: int | None) -> Values:
        """Add an object, or replace the object with its id."""
        size = OBJECT_BYTES + int(values.get("bytes", 0))
        self._db.execute(
            "INSERT INTO objects (id, kind, bytes, expires_at, json) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET bytes=excluded.bytes, expires_at=excluded.expires_at, json=excluded.json",
            (values["id"], kind, size, expires_at, json.dumps(values)),
        )
        return values

    def get(self, kind: str, id: str, param: str = "id") -> Values:
        """An object. Raises: ApiError with status 404 that names param, where the request has the id."""
        found = self._db.execute("SELECT json FROM objects WHERE id = ? AND kind = ?", (id, kind)).fetchone()
        if found is None:
            raise ApiError(404, f"There is no {kind} {id[:80]!r}", param=param, code="not_found")
        values: Values = json.loads(found[0])
        return values

    def change(self, id: str, change: Callable[[Values], None]) -> Values:
        """Change a batch in a transaction. Raises: as `get`."""
        with self._transaction():
            values = self.get(BATCH, id)
            change(values)
            self._db.execute("UPDATE objects SET json = ? WHERE id = ?", (json.dumps(values), id))
        return values

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def open_batches(self) -> list[Values]:
        """Batches that have not ended, which is when they begin to expire."""
        rows = self._db.execute(
            "SELECT json FROM objects WHERE kind = ? AND expires_at IS NULL ORDER BY number", (BATCH,)
        )
        return [json.loads(one) for (one,) in rows]

    def page(
        self, kind: str, limit: int, after: str | None, *, newest_first: bool = True, purpose: str | None = None
    ) -> list[Values]:
        """At most `limit` objects of a kind that follow the object with the id `after`. purpose: of files."""
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        where = "" if after is None else f"AND number {sign} (SELECT number FROM objects WHERE id = ?)"
        where += "" if purpose is None else " AND json_extract(json, '$.purpose') = ?"
        rows = self._db.execute(
            f"SELECT json FROM objects WHERE kind = ? {where} ORDER BY number {order} LIMIT ?",
            (kind, *(one for one in (after, purpose) if one is not None), limit),
        )
        return [json.loads(one) for (one,) in rows]

    def delete(self, id: str) -> None:
        """Delete an object and its file."""
        self._db.execute("DELETE FROM objects WHERE id = ?", (id,))
        self.path(id).unlink(missing_ok=True)

    def purge(self) -> None:
        """Delete expired objects and their files."""
        for (id,) in self._db.execute("SELECT id FROM objects WHERE expires_at <= ?", (int(time.time()),)).fetchall():
            self.delete(id)
