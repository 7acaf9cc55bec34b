"""Answers the lines of a batch, as many at a time as keep the engine busy, and writes each as soon as it
is complete.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hookline.core.batch.rows import InputLine, Row, RowError, answer_line, custom_id_of, parse
from hookline.core.cli.output import say
from hookline.core.errors import ConfigError, EngineError, shown

Post = Callable[[Row], Awaitable[dict[str, Any]]]
"""Calls an endpoint; returns the `response` of an output line."""
RETRY_S = 0.05
"""Seconds before a row is tried again that found the queue full."""
MAX_CUSTOM_IDS = 1_000_000
"""Lines whose custom_ids are compared, which takes 100 MB."""
MAX_TOLD = 5
"""Failures that are reported one by one."""


@dataclass
class Tally:
    """The outcome of the lines. told: the first failures, a line each. num_failed_before: failures of earlier runs."""

    num_answered: int = 0
    num_failed: int = 0
    num_failed_before: int = 0
    num_tokens: int = 0
    told: list[str] = field(default_factory=list)

    def note_earlier(self, num_failed: int) -> None:
        """Note how many lines failed in earlier runs."""
        self.num_failed_before = num_failed

    def count(self, num_tokens: int | None) -> None:
        """Count an answered line, with the tokens of its answer."""
        self.num_answered += 1
        self.num_tokens += num_tokens or 0

    def fail(self, line: InputLine, reason: str) -> None:
        """Count a failed line."""
        self.fail_at(f"line {line.number}", reason)

    def fail_at(self, place: str, reason: str) -> None:
        """Count a failure at this place of the file."""
        self.num_failed += 1
        if len(self.told) < MAX_TOLD:
            self.told.append(f"{place}: {' '.join(reason.split())}")

    def add(self, other: Tally, file: str) -> None:
        """Add the counts of another tally; its failures are reported with the name of its file."""
        self.num_answered += other.num_answered
        self.num_failed += other.num_failed
        self.num_tokens += other.num_tokens
        self.told += [f"{file}, {one}" for one in other.told][: MAX_TOLD - len(self.told)]


def _warn(told: str) -> None:
    say(f"warning: {told}")


class Warnings:
    """Warns of each of these once in a file: two lines have the same custom_id, so that their answers cannot be told
    apart, among the first MAX_CUSTOM_IDS lines; and a line has fields without an effect.
    """

    def __init__(self, warn: Callable[[str], None] = _warn) -> None:
        self._warn = warn
        self._lines: dict[int, int] | None = {}
        self._has_told_ignored = False

    def note_response(self, line: InputLine, response: Mapping[str, Any]) -> None:
        """Note the response of a line."""
        if (headers := response.get("headers")) and not self._has_told_ignored:
            self._has_told_ignored = True
            self._warn(
                f"line {line.number}: {shown(next(iter(headers.values())))} had no effect; `headers` of the "
                "responses name such fields, and further ones are not told"
            )

    def note_custom_id(self, line: InputLine, custom_id: str) -> None:
        """Note the custom_id of a line."""
        if self._lines is None:
            return
        before = self._lines.setdefault(hash(custom_id), line.number)
        if before != line.number:
            self._warn(
                f"lines {before} and {line.number} have the same custom_id={shown(custom_id)}; both are "
                "answered, and further ones are not told"
            )
            self._lines = None
        elif len(self._lines) >= MAX_CUSTOM_IDS:
            self._lines = None


async def run_rows(
    lines: Iterable[InputLine],
    post: Post,
    output: int,
    max_rows: int,
    death: Callable[[], str | None],
    progress: Callable[[Tally], None],
    warn: Callable[[str], None] = _warn,
) -> Tally:
    """Answer all lines. output: a descriptor that is open for appending. death: why the engine is dead, or None. warn:
    is told what a file's owner should know.

    Lines are read when there is room for them, so memory does not grow with the file.
    Raises: EngineError when the engine is dead; lines without an answer by then are not written.
    """
    tally, warnings, room = Tally(), Warnings(warn), asyncio.Semaphore(max_rows)
    async with asyncio.TaskGroup() as tasks:

        async def _answer(line: InputLine) -> None:
            try:
                write(output, await answered(line, post, death, tally, warnings))
            finally:
                room.release()
            progress(tally)

        for line in lines:
            await room.acquire()
            tasks.create_task(_answer(line))
    return tally


async def answered(
    line: InputLine, post: Post, death: Callable[[], str | None], tally: Tally, warnings: Warnings
) -> bytes:
    """Answer a line; returns a line of the output.

    Raises: EngineError when the engine is dead.
    """
    try:
        row = parse(line)
    except RowError as error:
        tally.fail(line, str(error))
        return answer_line(line, custom_id_of(line), None, error)
    warnings.note_custom_id(line, row.custom_id)
    while True:
        response = await post(row)
        status, body = response["status_code"], response["body"]
        if (cause := death()) is not None:
            raise EngineError(f"the engine ended, and what it had not answered is left for another run: {cause}")
        if status != 429:
            break
        await asyncio.sleep(RETRY_S)
    if status == 200:
        tally.count(_num_tokens(body))
    else:
        tally.fail(line, _message(body))
    warnings.note_response(line, response)
    return answer_line(line, row.custom_id, response)


def failures(count: int, retry: str) -> str:
    """The end of the message about earlier answers. retry: how to try failed ones again."""
    return f", {count} of them failures; {retry}" if count else ""


def recount(tally: Tally, answer: dict[str, Any]) -> None:
    """Count an answer from an earlier run, as `answered` counted it."""
    response, error = answer["response"], answer["error"]
    if error is not None:
        place, _, reason = error["message"].partition(": ")
        tally.fail_at(place, reason)
    elif response["status_code"] == 200:
        tally.count(_num_tokens(response["body"]))
    else:
        tally.fail_at(f"line {answer['id'].split('_')[2]}", _message(response["body"]))


def _num_tokens(body: Any) -> int | None:
    usage = (body.get("usage") if isinstance(body, dict) else None) or {}
    return usage.get("completion_tokens", usage.get("output_tokens"))  # the latter of /v1/responses


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else body
    return str(error.get("message")) if isinstance(error, dict) else json.dumps(error)


def write(output: int, line: bytes) -> None:
    """Append a whole line.

    Raises: ConfigError if it cannot be written; the next run cuts off an incomplete line.
    """
    try:
        while line:
            line = line[os.write(output, line) :]
    except OSError as error:
        raise ConfigError(
            f"the output cannot be written: {error.strerror or error}; what is answered is kept for another run"
        ) from error
