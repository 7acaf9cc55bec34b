"""Files of results, one JSON object on each line, and those of a sweep: a line for each job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from errno import ENOSPC
from pathlib import Path
from typing import Any

from hookline.core.errors import ConfigError
from hookline.core.sweep.job_status import DONE
from hookline.core.util.json_lines import json_object, numbered_lines

FORMAT = 1
RESULTS = "results.jsonl"
"""The file in a sweep's folder with a line for each job that ran. Single runs may have added lines by their key
`result`."""
_OF_A_JOB = frozenset(("job", "key", "folder", "overrides", "status"))


def check_appendable(path: Path, key: str) -> None:
    """Find out whether lines can be added to a file, which need not exist yet.

    Raises: ConfigError naming the key.
    """
    try:
        is_new = not path.exists()
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be written: {error.strerror or error}") from error


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file of JSON lines, in one write, so that jobs running side by side do not mix theirs.

    Raises: ConfigError if it cannot be written; a part of the line is taken away again.
    """
    line = (json.dumps(record) + "\n").encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            num_written = os.write(handle, line)
            if num_written < len(line):
                os.ftruncate(handle, os.lseek(handle, 0, os.SEEK_CUR) - num_written)
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none if it is not there.

    Raises: ConfigError naming a line that is not a JSON object; a last line cut off in the middle is left out.
    """
    return [record for _, record in _numbered_records(path)]


def _numbered_records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8-sig")
    return [(number, _record(path, number, line)) for number, line in numbered_lines(text[: text.rfind("\n") + 1])]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return json_object(line)
    except ValueError as error:
        cause = f"{path}, line {number} is not a JSON object; take it out, or take another folder"
        raise ConfigError(cause) from error


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results of a sweep, in order of their jobs: of a job that ran several times, the last. See `read_all`.

    Raises: ConfigError naming a line that cannot be read.
    """
    latest = {record["key"]: record for record in read_all(folder)}
    return sorted(latest.values(), key=lambda record: int(record["job"]))


def read_all(folder: Path) -> list[dict[str, Any]]:
    """All lines of a sweep's results; those of single runs as jobs without overrides, numbered after the sweep's own.

    Of single runs, only the last that is done has a folder: the sweep's, where its records may lie.
    Raises: ConfigError naming a line that is neither a job's nor a single run's.
    """
    path = folder / RESULTS
    lines = _numbered_records(path)
    for number, record in lines:
        if "status" not in record or ("key" in record and not _OF_A_JOB.issubset(record)):
            raise ConfigError(f"{path}, line {number} is no result of a job; take it out, or take another folder")
    jobs = [int(record["job"]) for _, record in lines if "key" in record]
    singles = {number: record for number, record in lines if "key" not in record}
    last = max((number for number, record in singles.items() if record["status"] == DONE), default=None)
    for job, (number, record) in enumerate(singles.items(), start=max(jobs, default=-1) + 1):
        own = "." if number == last else None
        record.update({"job": job, "key": f"line {number}", "folder": own, "overrides": []})
    return [record for _, record in lines]


def objective_value(metrics: Mapping[str, Any], name: str) -> float | None:
    """The figure that an objective names, such as `ttft_s.p99`; None if the run has none."""
    value = _found(metrics, name)
    return None if value is None else float(value)


def _found(tree: Any, name: str) -> Any:
    """What a mapping holds under a name whose parts are joined by dots; keys, tags for instance, may hold dots too."""
    if not name or not isinstance(tree, Mapping):
        return None if name else tree
    keys = [key for key in tree if name == key or name.startswith(f"{key}.")]
    found = (_found(tree[key], name[len(key) + 1 :]) for key in keys)
    return next((value for value in found if value is not None), None)
