"""Prompts that are piped in on standard input."""

from __future__ import annotations

import logging
import select
import sys
from typing import TextIO

from hookline.core.errors import ConfigError
from hookline.core.util.files import MAX_READ

SOURCES = ("prompt", "prompts", "prompts_file")
"""Keys that give prompts; with any of them standard input is not read."""
PATIENCE_S = 2.0
"""How long standard input may be silent before it counts as not given."""
_log = logging.getLogger("hookline")


def piped_text(stream: TextIO | None = None) -> str | None:
    """The text that was piped in; None at a terminal, without standard input, or if nothing arrives within PATIENCE_S.

    Raises: ConfigError if it is not UTF-8.
    """
    stream = sys.stdin if stream is None else stream
    if stream is None or stream.closed or stream.isatty():
        return None
    if _is_silent(stream):
        _log.warning(
            "standard input is open and silent for %.0f s: not waiting for it. Prompts that take longer to come "
            "belong in a file: prompts_file=",
            PATIENCE_S,
        )
        return None
    try:
        # Bytes if possible, because decoding by the text layer depends on the locale.
        buffer = getattr(stream, "buffer", None)
        found = stream.read(MAX_READ + 1) if buffer is None else buffer.read(MAX_READ + 1)
        if len(found) > MAX_READ:
            raise ConfigError(f"standard input holds more than {MAX_READ} bytes, which is the most that is read")
        return found if isinstance(found, str) else found.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text: {error}") from error


def _is_silent(stream: TextIO) -> bool:
    """Whether neither data nor the end comes within PATIENCE_S. A longer wait would look like a hang."""
    try:
        return not select.select([stream.fileno()], [], [], PATIENCE_S)[0]
    except (OSError, ValueError):
        return False  # no file descriptor, or none that select can wait for
