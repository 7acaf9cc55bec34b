"""The file of a sweep's results: one JSON line for each job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.core.util.json_lines import read_lines

FORMAT = 1
RESULTS = "results.jsonl"
"""In a sweep's folder: a line for each job that ran."""


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results of a sweep, in order of their jobs: of a job that ran several times, the last.

    Raises: ConfigError naming a line that cannot be read.
    """
    latest = {record["key"]: record for record in read_lines(folder / RESULTS)}
    return sorted(latest.values(), key=lambda record: int(record["job"]))


def objective_value(metrics: Mapping[str, Any], name: str) -> float | None:
    """The figure that an objective names, `ttft_s.p99` say; None if the run has none."""
    value: Any = metrics
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else float(value)
