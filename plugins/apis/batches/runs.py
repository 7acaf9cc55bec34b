"""Batches while they are answered, by the code of `hookline batch`, in the process that was asked first.

The answers so far lie in a file that this process locks. What a process leaves unfinished goes on when any process is
next asked for something: from the lines that have no answer.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import BinaryIO

from hookline.core.errors import EngineError, HooklineError, one_short_line
from hookline.core.serving import (
    BatchRow,
    Done,
    InputLine,
    RowError,
    answer_line,
    custom_id_of,
    has_failed,
    lines_of,
    run_rows,
)
from hookline.plugins.apis.batches.store import BATCH, FILE, Store, Values

Post = Callable[[BatchRow], Awaitable[Values]]
_log = logging.getLogger("hookline")
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that has not ended."""
TOLD_S = 0.5
"""Seconds between two looks at a batch's state while it is answered."""


class Runs:
    """death: why the engine is dead, or None. keep_s: seconds until a batch and its answers expire."""

    def __init__(
        self, store: Store, post: Post, death: Callable[[], str | None], max_rows: int, max_bytes: int, keep_s: int
    ) -> None:
        self._store, self._post, self._death = store, post, death
        self._max_rows, self._max_bytes, self._keep_s = max_rows, max_bytes, keep_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(1)

    def go_on(self) -> None:
        """Answer all open batches that no process answers."""
        for id in (batch["id"] for batch in self._store.open_batches()):
            if id not in self._tasks:
                self._tasks[id] = asyncio.get_running_loop().create_task(self._run(id))
                self._tasks[id].add_done_callback(partial(self._forget, id))

    def _forget(self, id: str, _: object) -> None:
        self._tasks.pop(id, None)

    async def _run(self, id: str) -> None:
        work = self._store.path(f"{id}.work")
        with os.fdopen(os.open(work, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0) as answers:
            try:
                fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return  # another process answers it
            async with self._room:
                if self._store.get(BATCH, id)["status"] in OPEN and not await self._has_ended(id, answers):
                    return
            work.unlink(missing_ok=True)

    async def _has_ended(self, id: str, answers: BinaryIO) -> bool:
        """Answer a batch; whether it has ended. Without an engine it has not, and goes on later."""
        has_ended, told = True, ""
        try:
            await self._answer(id, answers)
        except* EngineError:
            has_ended = False
        except* (HooklineError, OSError) as group:
            told = one_short_line(group.exceptions[0])
        if told:
            self._end(id, "failed", [{"code": "batch_failed", "message": told, "line": None, "param": None}])
        return has_ended

    async def _answer(self, id: str, answers: BinaryIO) -> None:
        batch = self._store.change(id, _begin)
        with self._store.path(batch["input_file_id"]).open("rb") as input:
            total = await asyncio.to_thread(lambda: sum(1 for _ in lines_of(input)))
            run = _Run(self._store, batch, total, answers, self._max_bytes)
            await run_rows(
                run.open_lines(input),
                run.posting(self._post),
                answers.fileno(),
                self._max_rows,
                self._death,
                lambda _: run.look(),
                partial(_log.warning, "%s: %s", id),
            )
            if run.has_expired:
                run.expire_rest(input)
        status = "expired" if run.has_expired else "cancelled" if run.is_cancelled else "completed"
        self._store.change(id, lambda now: now.update(status="finalizing", finalizing_at=int(time.time())))
        counts = await asyncio.to_thread(self._split, batch, answers)
        ids = {kind: f"file-{id}-{kind}" if counts[kind] else None for kind in ("output", "error")}
        for kind, file_id in ids.items():
            if file_id is not None:
                self._put_file(file_id, f"{id}_{kind}.jsonl", batch)
        self._store.change(
            id,
            lambda now: now.update(
                {f"{kind}_file_id": file_id for kind, file_id in ids.items()},
                request_counts={"total": total, "completed": counts["output"], "failed": counts["error"]},
            ),
        )
        full = [{"code": "storage_full", "message": "the store is full; delete files", "line": None, "param": None}]
        self._end(id, "failed" if run.is_full else status, full if run.is_full else None)

    def _split(self, batch: Values, answers: BinaryIO) -> dict[str, int]:
        """Write answers and failures into files of their own; returns how many there are of each."""
        counts = {"output": 0, "error": 0}
        paths = {kind: self._store.path(f"file-{batch['id']}-{kind}") for kind in counts}
        with (
            open(answers.fileno(), "rb", closefd=False) as lines,
            paths["output"].open("wb") as good,
            paths["error"].open("wb") as bad,
        ):
            lines.seek(0)
            for line in lines:
                kind = "error" if has_failed(line) else "output"
                (bad if kind == "error" else good).write(line)
                counts[kind] += 1
        for kind, count in counts.items():
            if not count:
                paths[kind].unlink()
        return counts

    def _put_file(self, id: str, name: str, batch: Values) -> None:
        now, after_s = int(time.time()), (batch.get("output_expires_after") or {}).get("seconds", self._keep_s)
        values = {
            "id": id,
            "object": "file",
            "bytes": self._store.path(id).stat().st_size,
            "created_at": now,
            "expires_at": now + after_s,
            "filename": name,
            "purpose": "batch_output",
            "status": "processed",
        }
        self._store.put(FILE, values, now + after_s)

    def _end(self, id: str, status: str, errors: list[Values] | None = None) -> None:
        now = int(time.time())

        def _ended(batch: Values) -> None:
            batch.update({"status": status, f"{status}_at": now})
            batch["errors"] = None if errors is None else {"object": "list", "data": errors}

        self._store.put(BATCH, self._store.change(id, _ended), now + self._keep_s)


def _begin(batch: Values) -> None:
    if batch["status"] == "validating":
        batch.update(status="in_progress", in_progress_at=int(time.time()))


class _Run:
    """A batch while its lines are answered: the lines that are left, its counts, and its early end."""

    def __init__(self, store: Store, batch: Values, total: int, answers: BinaryIO, max_bytes: int) -> None:
        self._store, self._id, self._endpoint = store, batch["id"], batch["endpoint"]
        self._expires_at, self._total, self._answers, self._max_bytes = batch["expires_at"], total, answers, max_bytes
        self._done, self._next_s = Done.read(answers, store.path(batch["id"])), 0.0
        self._num_answered = self._done.count - self._done.num_failed
        self._num_failed = self._done.num_failed
        self.is_cancelled = batch["status"] == "cancelling"
        self.has_expired = self.is_full = False

    def open_lines(self, input: BinaryIO) -> Iterator[InputLine]:
        """The lines without an answer, until the batch is cancelled or expires."""
        input.seek(0)
        for line in lines_of(input):
            self.look()
            if self.is_cancelled or self.has_expired or self.is_full:
                return
            if not self._done.holds(line):
                yield line

    def posting(self, post: Post) -> Post:
        """`post` for rows of the batch's endpoint alone, which counts them."""

        async def _post(row: BatchRow) -> Values:
            if row.path != self._endpoint:
                message = f"url={row.path} is not the batch's endpoint, {self._endpoint}"
                error = {"message": message, "type": "invalid_request_error"}
                return {"status_code": 400, "request_id": "", "body": {"error": error}}
            response = await post(row)
            status = response["status_code"]
            if status == 503:
                raise EngineError("the engine is not there")
            self._num_answered += status == 200
            self._num_failed += status not in (200, 429)
            return response

        return _post

    def look(self) -> None:
        """Look whether the batch is to end, and tell how far it is, every now and then."""
        now_s = time.time()
        if now_s < self._next_s:
            return
        self._next_s = now_s + TOLD_S
        counts = {"total": self._total, "completed": self._num_answered, "failed": self._num_failed}
        batch = self._store.change(self._id, lambda now: now.update(request_counts=counts))
        self.is_cancelled = batch["status"] == "cancelling"
        self.has_expired = not self.is_cancelled and now_s >= self._expires_at
        self.is_full = os.fstat(self._answers.fileno()).st_size > self._max_bytes // 2

    def expire_rest(self, input: BinaryIO) -> None:
        """Say of each line without an answer that the batch has expired."""
        done = Done.read(self._answers, self._store.path(self._id))
        input.seek(0)
        expired = RowError("batch_expired", "the batch expired before this line was answered")
        for line in lines_of(input):
            if not done.holds(line):
                self._answers.write(answer_line(line, custom_id_of(line), None, expired))
