"""Standard output and error of a command: a failed write is a named error, and no text can control a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from hookline.core.cli.logs import spoken
from hookline.core.errors import HooklineError

FAINT, NORMAL = 2, 0
"""Styles of text on a terminal, by their numbers in ECMA-48."""


class OutputError(HooklineError):
    """Standard output that is closed, full or broken."""


def say(line: str) -> None:
    """Write `hookline: LINE` to standard error: one line, its control characters escaped; where the log is JSON, a
    record of it. Nothing if standard error is closed.
    """
    with suppress(OSError, ValueError):
        print(f"{spoken(line)}\n", end="", file=sys.stderr)  # one write, as the log's lines are


@contextmanager
def checked_output() -> Iterator[None]:
    """Standard output as a `_Checked` one, and errors="backslashreplace" for what an encoding does not have."""
    before = sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = _Checked(before)
    try:
        yield
        sys.stdout.flush()  # when Python ends it is too late to catch what this raises
    finally:
        sys.stdout = before


class _Checked:
    """A text stream whose failures are OutputErrors, unless the reader has exited. On a terminal, control characters
    are escaped.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._escapes = stream is not None and stream.isatty()

    def write(self, text: str) -> int:
        """See TextIO. Raises: OutputError if the stream is closed, full or broken."""
        if self._stream is None:
            raise OutputError("standard output is closed; redirect it, or write to a file: output=FILE")
        if self._escapes and not text.isprintable():
            text = "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)
        with _naming():
            return self._stream.write(text)

    def set_style(self, style: int) -> None:
        """See `set_style`."""
        if self._stream is not None and self._escapes and os.environ.get("TERM") != "dumb":
            with _naming():
                self._stream.write(f"\x1b[{style}m")

    def flush(self) -> None:
        """See TextIO. Raises: OutputError if the stream is full or broken."""
        if self._stream is not None:
            with _naming():
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _naming() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_output()
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def require_output() -> None:
    """Raise OutputError now, before the work, if standard output is closed."""
    if isinstance(sys.stdout, _Checked):
        sys.stdout.write("")


def set_style(style: int) -> None:
    """Have a terminal show what is printed from here on in one of the styles above; nothing elsewhere."""
    if isinstance(sys.stdout, _Checked):
        sys.stdout.set_style(style)


def discard_output() -> None:
    """Send the rest of standard output nowhere: Python would report the error once more when it closes the stream."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
