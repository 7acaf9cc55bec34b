"""Runs a batch over folders: finds the rows without answers, has them answered here or on Ray, and joins parts to
files.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hookline.core.batch.input_folder import PARQUET, files_in
from hookline.core.batch.output_folder import OutputFolder
from hookline.core.batch.parts import Part, Source, check_parquet_name, parquet_file, source_of
from hookline.core.batch.runner import Tally, failures
from hookline.core.batch.settings import ON_RAY, BatchRun, check_all_used
from hookline.core.data.requests import prompts_of
from hookline.core.data.tables import columns_of
from hookline.core.errors import ConfigError, clipped

if TYPE_CHECKING:
    from hookline.core.plugin.host import PluginHost


class Progress:
    """A progress bar over all rows, and the tally of the rows of this run."""

    def __init__(self, num_rows: int, num_done: int) -> None:
        from tqdm import tqdm

        is_shown = sys.stderr is not None and sys.stderr.isatty()
        options = {"unit": "row", "dynamic_ncols": True, "leave": False, "file": sys.stderr, "disable": not is_shown}
        self.bar: Any = tqdm(total=num_rows, initial=num_done, **options)
        self.tally = Tally()

    def row(self) -> None:
        """Count an answered row."""
        self.bar.update(1)

    def part(self, part: Part, tally: Tally) -> None:
        """Count a written part. rows: number of its rows if they were not counted one by one."""
        self.tally.add(tally, part.file)
        self.bar.set_postfix_str(f"{self.tally.num_tokens} tokens, {self.tally.num_failed} failed", refresh=False)


class Finisher:
    """Joins the parts of a file as soon as the last of them is written. May be called from several threads."""

    def __init__(self, output: OutputFolder, sources: Sequence[Source], left: Sequence[Part]) -> None:
        self._output, self._sources = output, {source.file: source for source in sources}
        self._missing, self._lock = Counter(part.file for part in left), threading.Lock()

    def start(self) -> None:
        """Join the files whose parts are all written already."""
        for source in self._sources.values():
            if not self._missing[source.file]:
                self._output.finish(source)

    def part(self, part: Part) -> None:
        """Note that a part is written."""
        with self._lock:
            self._missing[part.file] -= 1
            if not self._missing[part.file]:
                self._output.finish(self._sources[part.file])


def answer_folder(run: BatchRun, host: PluginHost, say: Callable[[str], None]) -> Tally:
    """Answer the rows that have no answer in the output folder yet.

    Raises: HooklineError for whatever prevents it.
    """
    output = OutputFolder(run.output)
    with output.locked():
        files = files_in(run.input, run.follow_links)
        check_all_used(run, any(file.endswith(PARQUET) for file in files))
        output.check_free(files)
        sources = [source_of(run.input, file, run.part_rows) for file in files]
        for file in files:
            check_columns(run, file)
        output.agree(sources, {name: getattr(run, name) for name in ("part_rows", "task", "prefix")})
        output.forget_deaths()
        left = [part for source in sources for part in output.left(source)]
        num_rows = sum(source.num_rows for source in sources)
        num_done = num_rows - sum(part.num_rows for part in left)
        num_failed = sum(output.num_failed(source, run.prefix) for source in sources) if num_done else 0
        if num_done:
            retry = "to try those again, remove the files they are in, which are then answered anew"
            say(f"{run.output} has the answers of {num_done} rows already{failures(num_failed, retry)}")
        progress, finisher = Progress(num_rows, num_done), Finisher(output, sources, left)
        progress.tally.note_earlier(num_failed)
        finisher.start()
        try:
            if left:
                (_on_ray if run.executor == ON_RAY else _here)(run, host, left, progress, finisher)
        finally:
            progress.bar.close()
        return progress.tally


def check_columns(run: BatchRun, file: str) -> None:
    """Check the columns of parquet files before anything starts.

    Raises: ConfigError.
    """
    if not file.endswith(PARQUET):
        return
    check_parquet_name(run.output / file)
    names = parquet_file(run.input / file).schema_arrow.names
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{run.input / file} has several columns '{clipped(twice[0])}'; give each a name of its own")
    wanted = prompts_of(run.task)
    if not set(names) & set(wanted):
        raise ConfigError(
            f"{run.input / file} has no column {' or '.join(wanted)}, which batch.task={run.task} reads; its columns: "
            f"{clipped(', '.join(names))}"
        )
    for name in columns_of(run.task):
        if run.prefix + name in names:
            raise ConfigError(
                f"{run.input / file} has a column '{run.prefix + name}' already; set batch.prefix=answer_"
            )


def parts_at_once(run: BatchRun) -> int:
    """Number of parts that an engine answers at a time: as many as fill it, and another for when the last rows of a
    part finish.
    """
    return math.ceil(run.max_rows / run.part_rows) + 1


def _here(run: BatchRun, host: PluginHost, parts: Sequence[Part], progress: Progress, finisher: Finisher) -> None:
    from hookline.core.batch.part_answers import PartAnswers

    async def _work() -> None:
        answers = PartAnswers(run, host)
        try:
            await answer_parts(answers.answer, parts, parts_at_once(run), progress, finisher)
        finally:
            await answers.aclose()

    try:
        asyncio.run(_work())
    except BaseExceptionGroup as group:  # of a task group: its first error is the cause
        raise group.exceptions[0] from None


async def answer_parts(
    answer: Callable[..., Any], parts: Sequence[Part], at_once: int, progress: Progress, finisher: Finisher
) -> None:
    """Answer parts by one engine, `at_once` of them at a time, in order."""
    room = asyncio.Semaphore(at_once)
    async with asyncio.TaskGroup() as tasks:

        async def _answer(part: Part) -> None:
            try:
                tally = await answer(part, lambda tally: progress.row())
            finally:
                room.release()
            progress.part(part, tally)
            await asyncio.to_thread(finisher.part, part)

        for part in parts:
            await room.acquire()
            tasks.create_task(_answer(part))


def _on_ray(run: BatchRun, host: PluginHost, parts: Sequence[Part], progress: Progress, finisher: Finisher) -> None:
    from hookline.core.batch.ray_parts import answered_on_ray

    for part, tally in answered_on_ray(run, host, parts, parts_at_once(run)):
        progress.bar.update(part.num_rows)
        progress.part(part, tally)
        finisher.part(part)
