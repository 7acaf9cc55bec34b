"""Shared by the commands: an error of the user is printed as one line and sets an exit code, without a traceback."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hookline.core.cli.output import checked_output, discard_output, say
from hookline.core.util.standard_files import open_missing

PATIENT = ("OMP_WAIT_POLICY", "passive")
"""The variable and the value with which torch's threads on a CPU sleep while they wait for each other. Threads that
spin make a command several times slower where other programs use the same cores. OpenMP reads it when torch is
imported."""


def guarded(run: Callable[[list[str]], int], arguments: Sequence[str] | None) -> int:
    """Run an entry point: an error of the user is printed as one line and sets an exit code, without a traceback.

    With HOOKLINE_TRACEBACK=1 in the environment, the traceback is printed before that line. SystemExit counts as an
    error, whatever its code: commands return, so a plugin that calls sys.exit(0) is at fault.
    """
    os.environ.setdefault(*PATIENT)
    # A socket that took a closed stream's number would not reach child processes, and a file would get printed text.
    open_missing()
    try:
        return _run(run, arguments)
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        discard_output()
        return 141


def _run(run: Callable[[list[str]], int], arguments: Sequence[str] | None) -> int:
    from hookline.core.errors import HooklineError, clipped, show_traceback

    try:
        with logging_to_stderr(), checked_output():
            return run(list(sys.argv[1:] if arguments is None else arguments))
    except HooklineError as error:
        show_traceback(error)
        say(f"error: {' '.join(str(error).split())}")
        return 2
    except SystemExit as error:
        from hookline.core.plugin.blame import with_place

        show_traceback(error)
        say(f"error: something ended the process from within: {with_place(error)}")
        return 2
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        show_traceback(error)  # a key, hub id or argument that was looked up as a file
        say(f"error: {clipped(str(error.filename))}: {error.strerror}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for Hydra's multirun, whose flag may be abbreviated."""
    return any(one == "-m" or (len(one) > 2 and "--multirun".startswith(one)) for one in arguments)


class _ToStderr(logging.Handler):
    """A handler that looks up standard error at each record, so that it follows a replacement of sys.stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's message as one line; see logging.Handler."""
        say(record.getMessage())


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Write Hookline's log to standard error, one line for each record."""
    logger, handler = logging.getLogger("hookline"), _ToStderr()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
