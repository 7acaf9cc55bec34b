"""The lines of users' files, and the JSON objects that they hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

BOM = "\ufeff".encode()
"""The byte order mark with which some editors begin a file. A file that is read as text is read as utf-8-sig."""


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, each with its number, counted from 1. They end with a line feed, or CR and LF."""
    # str.splitlines would also split at a form feed or U+2028, which may stand in a prompt or a JSON string.
    lines = text.replace("\r\n", "\n").split("\n")
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def json_object(line: str) -> dict[str, Any]:
    """The JSON object that a line holds.

    Raises: ValueError saying why the line holds none.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {json_fault(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {type(value).__name__}")
    return value


def json_fault(error: Exception) -> str:
    """Why `json.loads` or msgspec refused a text; limits of Python, and bytes that are no text, in plain words."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if str(error).startswith("Exceeds the limit"):  # its text names a Python function that raises the limit
        return f"a number in it has more than {sys.get_int_max_str_digits()} digits"
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error):  # msgspec has either, by its version
        return "it holds bytes that are not UTF-8"
    return str(error)
