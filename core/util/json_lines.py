"""Texts with one JSON object on each line."""

from __future__ import annotations

import json
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
    """What is wrong with a text that `json.loads` refused; each version of Python counts depth in its own way."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
