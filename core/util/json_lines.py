"""Files and texts with one JSON object on each line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.core.errors import ConfigError


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that hold something, with their numbers from 1."""
    # str.splitlines would also split inside a JSON string, at a U+2028 for instance.
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def json_object(line: str) -> dict[str, Any]:
    """The object of a line.

    Raises: ValueError saying why it is none.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {type(value).__name__}")
    return value


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file of JSON lines, in one write, so that jobs running side by side do not mix theirs."""
    line = json.dumps(record) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none if it is not there.

    Raises: ConfigError naming a line that is not a JSON object; a last line cut off in the middle is left out.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [_record(path, number, line) for number, line in numbered_lines(text[: text.rfind("\n") + 1])]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return json_object(line)
    except ValueError as error:
        cause = f"{path}, line {number} is not a JSON object; take it out, or take another folder"
        raise ConfigError(cause) from error
