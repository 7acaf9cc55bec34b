"""Shared by the commands: an error of the user is printed as one line and sets an exit code, without a traceback."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from hookline.core.cli.logs import START, logging_to_stderr
from hookline.core.cli.output import checked_output, discard_output, say
from hookline.core.util.standard_files import open_missing

PATIENT = ("OMP_WAIT_POLICY", "passive")
"""The variable and the value with which torch's threads on a CPU sleep while they wait for each other. Threads that
spin make a command several times slower where other programs use the same cores. OpenMP reads it when torch is
imported."""

SHOWING = {"-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--info", "-sc", "--shell-completion"}
"""Flags with which a command shows something and starts nothing."""

OF_FILES = (errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""Errors of files that are the user's to mend, whoever met them: Hydra, a library, or us with a key, hub id or argument
that was looked up as a file."""


def guarded(
    run: Callable[[list[str]], int], arguments: Sequence[str] | None, log: str | None = None, name: str | None = None
) -> int:
    """Run an entry point: an error of the user is printed as one line and sets an exit code, without a traceback.

    log: the form of the log, see `core.cli.logs`. name: of a command that takes a while to start, which is told first.

    With HOOKLINE_TRACEBACK=1 in the environment, the traceback is printed before that line. SystemExit counts as an
    error, whatever its code: commands return, so a plugin that calls sys.exit(0) is at fault.
    """
    os.environ.setdefault(*PATIENT)
    # A socket that took a closed stream's number would not reach child processes, and a file would get printed text.
    open_missing()
    given = list(sys.argv[1:] if arguments is None else arguments)
    with logging_to_stderr(log):
        if name is not None and not any(one.partition("=")[0] in SHOWING for one in given):
            logging.getLogger(START).info("starting hookline %s", shlex.join((name, *given)))
        try:
            return _run(run, given)
        except BrokenPipeError:  # the reader of the output has exited, as `head` does
            discard_output()
            return 141


def _run(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    from hookline.core.errors import HooklineError, clipped, show_traceback

    try:
        with checked_output():
            return run(arguments)
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
        if error.errno not in OF_FILES:
            raise
        show_traceback(error)
        say(f"error: {clipped(str(error.filename or 'writing a file'))}: {error.strerror}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


class Arguments(argparse.ArgumentParser):
    """A parser of few arguments, whose errors are one line as all are."""

    def error(self, message: str) -> NoReturn:
        """See ArgumentParser."""
        say(f"error: {message}; {' '.join(self.format_usage().split())}")
        raise SystemExit(2)


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for Hydra's multirun, whose flag may be abbreviated."""
    return any(one == "-m" or (len(one) > 2 and "--multirun".startswith(one)) for one in arguments)
