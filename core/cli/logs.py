"""Hookline's log on standard error: as lines of a command, as lines with time and level, or as JSON.

The form is in the environment, so that the processes which a server starts write the same. Bare at import.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

VARIABLE = "HOOKLINE_LOG"
"""The variable that holds the form."""
PLAIN, TEXT, JSON = FORMS = ("plain", "text", "json")
"""`hookline: MESSAGE`; `TIME LEVEL LOGGER MESSAGE`; one JSON object a line."""
START = "hookline.start"
"""The logger that says what a start is doing; in the plain form only at a terminal."""
FIELDS = "fields"
"""The attribute of a record that holds further values for the JSON form."""
MAX_LINE = 4000
"""Most characters of a line about the command itself; an error may quote what a request or a plugin wrote."""


def chosen_form() -> str:
    """The form that the environment names; plain if it names none."""
    form = os.environ.get(VARIABLE, PLAIN)
    return form if form in FORMS else PLAIN


def form_in(arguments: Sequence[str], key: str, default: str) -> str:
    """The form that a command line asks for, before anything checks it. key: the full key of the form."""
    asked = [value for name, _, value in (one.partition("=") for one in arguments) if name == key and value in FORMS]
    return asked[-1] if asked else os.environ.get(VARIABLE, default)


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time (RFC 3339, UTC), level, logger, message, the record's fields, its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


class TextFormatter(logging.Formatter):
    """Local time with its offset, level, logger and message in one line; a traceback follows in lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        when = time.localtime(record.created)
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', when)}.{int(record.msecs):03d}{time.strftime('%z', when)}"
        line = f"{stamp} {record.levelname} {record.name}: {one_line(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class PlainFormatter(logging.Formatter):
    """`hookline: MESSAGE`, as a command speaks of itself."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return f"hookline: {one_line(record.getMessage())}"


_FORMATTERS = {PLAIN: PlainFormatter, TEXT: TextFormatter, JSON: JsonFormatter}


def one_line(text: str) -> str:
    """The text as one line of at most MAX_LINE characters, its control characters escaped."""
    from hookline.core.errors import clipped

    return clipped(" ".join(text.split()), MAX_LINE)


def spoken(line: str) -> str:
    """A message of a command about itself, as it is printed: a record in the JSON form, else `hookline: LINE`."""
    level = logging.ERROR if line.startswith("error: ") else logging.INFO
    is_json = chosen_form() == JSON
    record = logging.LogRecord("hookline", level, "", 0, line.removeprefix("error: ") if is_json else line, None, None)
    return (JsonFormatter() if is_json else PlainFormatter()).format(record)


class _ToStderr(logging.Handler):
    """A handler that looks up standard error at each record, so that it follows a replacement of sys.stderr."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.setFormatter(_FORMATTERS[form]())
        self._is_plain = form == PLAIN

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; see logging.Handler."""
        if self._is_plain and record.name == START and not _is_terminal():
            return
        with suppress(OSError, ValueError):
            print(f"{self.format(record)}\n", end="", file=sys.stderr)  # one write: other processes write there, too


def _is_terminal() -> bool:
    with suppress(ValueError):
        return sys.stderr is not None and sys.stderr.isatty()
    return False


@contextmanager
def logging_to_stderr(form: str | None = None) -> Iterator[None]:
    """Write Hookline's log to standard error. Other than in the plain form, so are other libraries' warnings.

    form: one of FORMS, which processes started meanwhile write, too; None: as the environment says.
    """
    before = os.environ.get(VARIABLE)
    if form is not None:
        os.environ[VARIABLE] = form
    form = chosen_form()
    logger, handler = logging.getLogger("hookline"), _ToStderr(form)
    holder = logger if form == PLAIN else logging.getLogger()
    level = logger.level
    holder.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        holder.removeHandler(handler)
        if before is not None:
            os.environ[VARIABLE] = before
        else:
            os.environ.pop(VARIABLE, None)
