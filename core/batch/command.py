"""From a command line to a file of answers: what `hookline batch` does. Bare at import, as its package says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from hookline.core.cli.command import guarded, is_sweep
from hookline.core.cli.output import say

if TYPE_CHECKING:
    from hookline.core.batch.rows import Done, InputLine
    from hookline.core.batch.runner import Tally
    from hookline.core.batch.settings import BatchRun
    from hookline.core.plugin.host import PluginHost
    from hookline.core.serve.engine_client import EngineClient


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return guarded(_run, arguments, name="batch")


def _run(arguments: list[str]) -> int:
    from hookline.core.batch.settings import BatchKeys, split_files, validate_batch
    from hookline.core.config.compose import compose
    from hookline.core.errors import ConfigError
    from hookline.core.plugin.host import PluginHost

    host = PluginHost.load()
    host.log_problems()
    files, others = split_files(arguments)
    if is_sweep(others):
        raise ConfigError("a batch runs one configuration; leave out -m (--multirun)")
    jobs = compose(others, host, BatchKeys, "batch")
    return execute(validate_batch(files, jobs[0].tree, host), host) if jobs else 0


def execute(run: BatchRun, host: PluginHost) -> int:
    """Answer the rows that have no answer in the output yet; returns the exit code.

    Raises: HooklineError for whatever keeps the engine from starting or running.
    """
    from hookline.core.batch.rows import SUCCESS, Done, num_lines
    from hookline.core.batch.runner import failures
    from hookline.core.serve.extra import check_extra
    from hookline.core.util.process import called_as

    check_extra(called_as("batch"))
    if run.is_folder:
        from hookline.core.batch.folder import answer_folder

        return _told(run, answer_folder(run, host, say))
    with _opened(run) as (input, output):
        done, total = Done.read(output, run.output), num_lines(run.input)
        if done.count:
            retry = f"to try those again, take the lines without {SUCCESS} out of it"
            say(f"{run.output} has the answers of {done.count} lines already{failures(done.num_failed, retry)}")
        left = _open_lines(input, done)
        first = next(left, None)
        if first is None:
            return 2 if done.num_failed else 0
        tally = _answer(run, host, chain([first], left), output.fileno(), max(total - done.count, 0))
        tally.note_earlier(done.num_failed)
    return _told(run, tally)


def _told(run: BatchRun, tally: Tally) -> int:
    """Report the outcome of a batch; returns its exit code."""
    say(f"{tally.num_answered} rows answered with {tally.num_tokens} tokens, {tally.num_failed} failed: {run.output}")
    for line in tally.told:
        say(line)
    if tally.num_failed > len(tally.told):
        say(f"and {tally.num_failed - len(tally.told)} more, each with its reason in {run.output}")
    return 2 if tally.num_failed or tally.num_failed_before else 0


def _open_lines(input: BinaryIO, done: Done) -> Iterator[InputLine]:
    from hookline.core.batch.rows import lines_of

    return (line for line in lines_of(input) if not done.holds(line))


def _answer(run: BatchRun, host: PluginHost, lines: Iterator[InputLine], output: int, total: int) -> Tally:
    import asyncio

    from hookline.core.assembly.compiler_child import begin_early

    begin_early(run.config)
    from hookline.core.data.row_answers import engine_for_rows
    from hookline.core.serve.in_process import InProcessClient

    async def _answer() -> Tally:
        client = InProcessClient(engine_for_rows(run.config, host, wants_forms=False), run.serve)
        try:
            return await answer_lines(client, run, lines, output, total)
        finally:
            await client.aclose()

    try:
        return asyncio.run(_answer())
    except BaseExceptionGroup as group:  # of a task group: its first error is the cause
        raise group.exceptions[0] from None


async def answer_lines(
    client: EngineClient, run: BatchRun, lines: Iterator[InputLine], output: int, total: int
) -> Tally:
    """Answer lines by a client's endpoints. total: number of lines, for the progress bar."""
    from starlette.applications import Starlette
    from tqdm import tqdm

    from hookline.core.batch.endpoints import posting
    from hookline.core.batch.runner import run_rows
    from hookline.core.serve.http.app import surfaces_of

    is_shown = sys.stderr is not None and sys.stderr.isatty()
    bar: Any = tqdm(total=total, unit="row", dynamic_ncols=True, leave=False, file=sys.stderr, disable=not is_shown)

    def _progress(tally: Tally) -> None:
        bar.update(1)
        bar.set_postfix_str(f"{tally.num_tokens} tokens, {tally.num_failed} failed", refresh=False)

    post = posting(Starlette(routes=surfaces_of(client, run.serve).routes))
    try:
        return await run_rows(lines, post, output, run.max_rows, lambda: client.death, _progress)
    finally:
        bar.close()


@contextmanager
def _opened(run: BatchRun) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open the two files, and lock the output so that no other batch answers the same lines."""
    import fcntl

    from hookline.core.errors import ConfigError

    try:
        descriptor = os.open(run.output, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise ConfigError(f"{run.output} cannot be written: {error.strerror}") from error
    with run.input.open("rb") as input, os.fdopen(descriptor, "r+b", buffering=0) as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{run.output} is being written by another batch; wait, or take another") from error
        yield input, output
