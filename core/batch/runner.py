"""Answers the lines of a batch: as many at a time as keep the engine busy, each written down as soon as it is whole."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hookline.core.batch.rows import Line, Row, RowError, answer_line, custom_id_of, parse
from hookline.core.errors import EngineError

Post = Callable[[Row], Awaitable[tuple[int, str, Any]]]
"""Asks an endpoint: the status, the request's id and the body, parsed."""
RETRY_S = 0.05
"""Pause before a row that the queue was full for is tried again."""
MAX_TOLD = 5
"""Failures that are told one by one."""


@dataclass
class Tally:
    """What became of the lines. told: the first failures, in a line each."""

    num_answered: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    told: list[str] = field(default_factory=list)

    def fail(self, line: Line, reason: str) -> None:
        """One more that failed."""
        self.num_failed += 1
        if len(self.told) < MAX_TOLD:
            self.told.append(f"line {line.number}: {' '.join(reason.split())}")


async def run_rows(
    lines: Iterable[Line],
    post: Post,
    output: int,
    max_rows: int,
    death: Callable[[], str | None],
    progress: Callable[[Tally], None],
) -> Tally:
    """Answer all lines. output: a descriptor that is open for appending. death: why the engine is dead, or None.

    Lines are read when there is room for them, so memory does not grow with the file.
    Raises: EngineError when the engine is dead; what it had not answered is not written.
    """
    tally, room = Tally(), asyncio.Semaphore(max_rows)
    async with asyncio.TaskGroup() as tasks:

        async def answer(line: Line) -> None:
            try:
                write(output, await _answer(line, post, death, tally))
            finally:
                room.release()
            progress(tally)

        for line in lines:
            await room.acquire()
            tasks.create_task(answer(line))
    return tally


async def _answer(line: Line, post: Post, death: Callable[[], str | None], tally: Tally) -> bytes:
    try:
        row = parse(line)
    except RowError as error:
        tally.fail(line, str(error))
        return answer_line(line, custom_id_of(line), None, error)
    while True:
        status, request_id, body = await post(row)
        if (cause := death()) is not None:
            raise EngineError(f"the engine ended, and what it had not answered is left for another run: {cause}")
        if status != 429:
            break
        await asyncio.sleep(RETRY_S)
    if status == 200:
        tally.num_answered += 1
        usage = body.get("usage") if isinstance(body, dict) else None
        tally.num_tokens += (usage or {}).get("completion_tokens") or 0
    else:
        tally.fail(line, _message(body))
    response = {"status_code": status, "request_id": request_id, "body": body}
    return answer_line(line, row.custom_id, response)


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else body
    return str(error.get("message")) if isinstance(error, dict) else json.dumps(error)


def write(output: int, line: bytes) -> None:
    """Append a whole line."""
    while line:
        line = line[os.write(output, line) :]
