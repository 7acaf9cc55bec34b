"""`python -m core.run` and `hookline`: prompts in, text out.

Bare at import, since child processes import it again: no torch, no Hydra, nothing but the standard library. Only
results go to standard output. Exit codes: 0 done; 2 a user's error or a refused request, one line each on standard
error; 1 a failed job of a sweep; 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.outputs import RequestOutput
    from core.plugin_host import PluginHost
    from core.run_config import RunConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return guarded(_run, arguments)


def guarded(run: Callable[[list[str]], int], arguments: Sequence[str] | None) -> int:
    """Run an entry point: errors of its user leave as one line and an exit code, never as a traceback.

    With HOOKLINE_TRACEBACK=1 in the environment, the traceback of such an error is printed before its line. SystemExit
    is an error too, whatever its code: `run` returns, and a plugin that calls sys.exit(0) is no success.
    """
    from core.errors import HooklineError, show_traceback

    try:
        with _logging_to_stderr():
            return run(list(sys.argv[1:] if arguments is None else arguments))
    except HooklineError as error:
        show_traceback(error)
        print(f"hookline: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except SystemExit as error:
        from core.plugin_blame import with_place

        show_traceback(error)
        print(f"hookline: error: something ended the process from within: {with_place(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hookline: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left, as `head` does. Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: list[str]) -> int:
    from core.compose import compose
    from core.plugin_host import PluginHost
    from core.run_config import validate_run

    host = PluginHost.load()
    host.log_problems()
    if is_sweep(arguments):
        from core.sweep import run_sweep

        return run_sweep(arguments, host)
    jobs = compose(arguments, host)
    return execute(validate_run(jobs[0].tree, host), host) if jobs else 0


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether Hydra's multirun is asked for; its parser takes any beginning of the long flag, too."""
    return any(one == "-m" or (len(one) > 2 and "--multirun".startswith(one)) for one in arguments)


def execute(run: RunConfig, host: PluginHost) -> int:
    """Complete the prompts of a run and show the results; returns the exit code.

    Raises: HooklineError for whatever keeps the engine from starting or running.
    """
    from core.llm import LLM
    from core.profiling import profiled
    from core.progress import progress_bar
    from core.results import refusals

    with LLM.from_config(run.config, host) as llm, profiled(llm, run.profile):
        outputs = llm.generate(run.prompts, run.params, progress=progress_bar(len(run.prompts)))
        show(run, outputs)
    refused = refusals(outputs)
    for line in refused:
        print(f"hookline: {line}", file=sys.stderr)
    return 2 if refused else 0


def show(run: RunConfig, outputs: Sequence[RequestOutput]) -> None:
    """Print or write the results, and what they took."""
    from core.results import print_text, usage_line, write_json_lines

    if run.output is None:
        print_text(outputs, is_chat=run.config.model.config.chat)
    else:
        write_json_lines(outputs, run.output)
        print(f"hookline: wrote {len(outputs)} results to {run.output}", file=sys.stderr)
    if run.usage:
        print(f"hookline: {usage_line(outputs)}", file=sys.stderr)


class _ToStderr(logging.Handler):
    """Looks standard error up at each record: whoever replaced it meanwhile gets the line."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"hookline: {record.getMessage()}", file=sys.stderr)


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    logger, handler = logging.getLogger("hookline"), _ToStderr()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
