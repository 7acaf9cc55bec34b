"""The jobs of a sweep as a table for a terminal: what sets each apart, how it ended, and its main figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookline.core.sweep.results import objective_value

FIGURES = ("output_tok_s", "requests_s", "goodput_s", "ttft_s.p50", "ttft_s.p99", "itl_s.p50", "itl_s.p99")


def table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the table, its head first; columns without any value are left out."""
    shared = set.intersection(*(set(record["overrides"]) for record in records)) if len(records) > 1 else set()
    figures = [name for name in FIGURES if any(_figure(record, name) != "" for record in records)]
    rows = [["job", "status", *figures, "overrides"]]
    for record in sorted(records, key=lambda record: int(record["job"])):
        own = " ".join(override for override in record["overrides"] if override not in shared)
        rows.append([str(record["job"]), record["status"], *(_figure(record, name) for name in figures), own])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths) for row in rows]


def _figure(record: Mapping[str, Any], name: str) -> str:
    value = objective_value(record.get("metrics") or {}, name)
    return "" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    *cells, last = row
    padded = [
        cell.ljust(width) if place == 1 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]
    return "  ".join([*padded, last]).rstrip()
