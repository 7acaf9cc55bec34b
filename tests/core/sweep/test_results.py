"""The lines of results.jsonl: those of a sweep's jobs, and those of single runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hookline.core.errors import ConfigError
from hookline.core.sweep.results import read_all, read_results

JOB = {"job": 3, "key": "a", "folder": "3", "overrides": ["tp=2"], "status": "done"}


def write(folder: Path, *records: Any) -> Path:
    (folder / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_lines_of_single_runs_are_jobs_after_those_of_the_sweep(tmp_path: Path) -> None:
    runs = {"status": "done"}, JOB, {"status": "done"}, {"status": "failed"}
    found = read_results(write(tmp_path, *runs))
    assert [(one["job"], one["key"], one["folder"]) for one in found] == [
        (3, "a", "3"),
        (4, "line 1", None),
        (5, "line 3", "."),
        (6, "line 4", None),
    ]
    assert [one["overrides"] for one in found] == [["tp=2"], [], [], []]


@pytest.mark.parametrize("record", [{"a": 1}, {"key": "a", "status": "done"}])
def test_a_line_that_is_no_result_of_a_job_is_named(tmp_path: Path, record: dict[str, Any]) -> None:
    folder = write(tmp_path, JOB, record)
    with pytest.raises(ConfigError, match=r"results.jsonl, line 2 is no result of a job; take it out, or take another"):
        read_all(folder)
