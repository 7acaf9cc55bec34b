"""Answers parts of a batch over folders by one engine: lines as a server would, rows of tables by their columns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from hookline.core.batch.endpoints import posting
from hookline.core.batch.input_folder import PARQUET
from hookline.core.batch.output_folder import OutputFolder
from hookline.core.batch.parts import Part, PartTables, lines_of_part
from hookline.core.batch.rows import InputLine
from hookline.core.batch.runner import Tally, Warnings, answered
from hookline.core.data.admission import Admission
from hookline.core.data.requests import RowReader
from hookline.core.data.row_answers import RowAnswers, engine_for_rows
from hookline.core.data.tables import Answer, rows_of, with_answers
from hookline.core.errors import ConfigError, one_short_line
from hookline.core.plugin.host import PluginHost
from hookline.core.serve.http.app import surfaces_of
from hookline.core.serve.in_process import InProcessClient

if TYPE_CHECKING:
    from hookline.core.batch.settings import BatchRun

CHARACTERS_A_TOKEN = 4
"""Characters that count as one token, to estimate a line's tokens for admission without tokenizing it."""


class PartAnswers:
    """Answers parts, several at a time. All methods must be called in the same event loop."""

    def __init__(self, run: BatchRun, host: PluginHost) -> None:
        from starlette.applications import Starlette

        self._run = run
        self._output = OutputFolder(run.output)
        reader = RowReader(run.task, run.sampling, seed=run.config.seed)
        self._llm = engine_for_rows(run.config, host, reader.wants_forms)
        self._client = InProcessClient(self._llm, run.serve)
        self._post = posting(Starlette(routes=surfaces_of(self._client, run.serve, host).routes))
        self._admission = Admission.of(self._llm.llm, run.max_rows)
        self._rows = RowAnswers(self._llm, reader, self._admission)
        self._tables = PartTables(run.input)
        self._warnings = "", Warnings()

    async def answer(self, part: Part, progress: Callable[[Tally], None] = lambda tally: None) -> Tally:
        """Answer a part and write its answers. progress: called after each row.

        Raises: EngineError if the engine is dead; then nothing is written.
        """
        tally = Tally()
        answering = self._table if part.file.endswith(PARQUET) else self._lines
        self._output.write(part, await answering(part, tally, progress))
        return tally

    async def _lines(self, part: Part, tally: Tally, progress: Callable[[Tally], None]) -> bytes:
        async def _answer(line: InputLine) -> bytes:
            async with self._admission.room(len(line.text or b"") // CHARACTERS_A_TOKEN):
                found = await answered(line, self._post, lambda: self._client.death, tally, warnings)
            progress(tally)
            return found

        if self._warnings[0] != part.file:
            self._warnings = part.file, Warnings()
        warnings = self._warnings[1]
        lines = list(lines_of_part(self._run.input, part))
        return b"".join(await _all([_answer(line) for line in lines]))

    async def _table(self, part: Part, tally: Tally, progress: Callable[[Tally], None]) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        def _count(answer: Answer) -> None:
            if answer.get("error") is None:
                tally.count(answer.get("num_completion_tokens"))
            progress(tally)

        table = self._tables.table_of(part)
        answers = await self._rows.answers(rows_of(table), _count)
        for number, answer in enumerate(answers, start=part.first + 1):
            if (error := answer.get("error")) is not None:
                tally.fail_at(f"row {number}", error)
        file = pa.BufferOutputStream()
        try:
            pq.write_table(with_answers(table, answers, self._run.task, self._run.prefix), file)
        except pa.ArrowException as error:  # a type of column that pyarrow can read but not write
            cause = one_short_line(error)
            raise ConfigError(f"the rows of {self._run.input / part.file} cannot be written again: {cause}") from error
        found: bytes = file.getvalue().to_pybytes()
        return found

    async def aclose(self) -> None:
        """Release the engine."""
        await self._client.aclose()


async def _all(coroutines: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """Wait for all; if one fails, the others are cancelled."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
