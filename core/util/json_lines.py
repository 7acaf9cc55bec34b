"""Texts with one JSON object on each line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, each with its number, counted from 1."""
    # str.splitlines would also split inside a JSON string, at a U+2028 for instance.
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


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
    """What is wrong with a text that `json.loads` refused: for faults that are none of JSON's, in words of our own."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if str(error).startswith("Exceeds the limit"):  # then it tells which of Python's functions would raise it
        return f"a number in it has more than {sys.get_int_max_str_digits()} digits"
    return str(error)
