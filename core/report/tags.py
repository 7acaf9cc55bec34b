"""The requests of each tag side by side: a table and charts for every key that requests of a load were tagged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hookline.core.bench.latencies import request_latencies
from hookline.core.bench.recorder import Column as Array
from hookline.core.bench.recorder import Recording
from hookline.core.report.charts import Chart, Line
from hookline.core.report.distributions import cumulative, distribution, stated
from hookline.core.report.drawing import NUM_COLOURS
from hookline.core.report.figures import Figure, in_fitting_unit
from hookline.core.report.jobs import Job
from hookline.core.report.view import Group, Report

TAG_LATENCIES = {"ttft_s": "time to first token", "tpot_s": "time per token", "queue_s": "time in the queue"}
TAG_FIGURES = (
    Figure("requests", "requests", 0),
    Figure("output_tok_s", "output", 1, "tokens/s"),
    Figure("output_share", "share of output", 0, "%", 100),
    Figure("ttft_s.p50", "time to first token p50", -1, "s"),
    Figure("ttft_s.p99", "time to first token p99", -1, "s"),
    Figure("tpot_s.p50", "time per token p50", -1, "s"),
    Figure("tpot_s.p99", "time per token p99", -1, "s"),
    Figure("queue_s.p99", "time in the queue p99", -1, "s"),
    Figure("goodput_s", "goodput", 1, "per s"),
    Figure("slo_met", "SLO kept", 1, "%", 100),
    Figure("deadlines_met", "deadlines met", 1, "%", 100),
    Figure("refused", "refused", -1),
)


@dataclass(frozen=True)
class TagRow:
    """The figures of a job for one value of a tag's key, in the order of the table's columns."""

    value: str
    job: Job
    figures: Sequence[Figure]


@dataclass(frozen=True)
class TagTable:
    """A key: its columns, a row for each of its values and each job, and charts of waiting times."""

    key: str
    figures: Sequence[Figure]
    rows: Sequence[TagRow]
    charts: Sequence[Chart]


def tag_tables(report: Report, group: Group) -> list[TagTable]:
    """A table for each key by which requests of this load were tagged."""
    values: dict[str, dict[str, None]] = {}
    for job in group.done:
        for key, found in job.by_tag.items():
            values.setdefault(key, {}).update(dict.fromkeys(found))
    return [_table(report, group, key, sorted(values[key])) for key in sorted(values)]


def _table(report: Report, group: Group, key: str, values: Sequence[str]) -> TagTable:
    pairs = [(value, job) for value in values for job in group.done if value in job.by_tag.get(key, {})]
    shown = []
    for figure in TAG_FIGURES:
        known = [number for value, job in pairs if (number := job.figure(_of(figure, key, value).name)) is not None]
        if known and (any(known) or figure.name != "refused"):
            shown.append(in_fitting_unit(figure, max(known)))
    rows = [TagRow(value, job, [_of(figure, key, value) for figure in shown]) for value, job in pairs]
    return TagTable(key, shown, rows, _charts(report, key, values, pairs))


def _of(figure: Figure, key: str, value: str) -> Figure:
    return replace(figure, name=f"by_tag.{key}.{value}.{figure.name}")


def _charts(report: Report, key: str, values: Sequence[str], pairs: Sequence[tuple[str, Job]]) -> list[Chart]:
    """For each latency, the share of a value's requests that waited no longer."""
    jobs = list(dict.fromkeys(job for _, job in pairs))
    recorded = {job: _samples(job.recording, key) for job in jobs if job.recording is not None}
    charts = []
    for name, title in TAG_LATENCIES.items():
        lines, names = [], []
        for value, job in pairs:
            full = f"by_tag.{key}.{value}.{name}"
            points = cumulative(recorded[job][value][name]) if value in recorded.get(job, {}) else stated(job, full)
            if points is not None:
                style = values.index(value) % NUM_COLOURS + NUM_COLOURS * jobs.index(job)
                label = value if len(jobs) == 1 else f"{value}, {report.label(job)}"
                lines.append(Line(label, style, *points, steps=job in recorded))
                names.append((job, full))
        if lines:
            charts.append(distribution(f"{title}, by {key}", lines, names, "requests"))
    return charts


def _samples(recording: Recording, key: str) -> Mapping[str, Mapping[str, Array]]:
    """Value of the key -> latency -> every served request's, sorted, in seconds."""
    found: dict[str, list[dict[str, float]]] = {}
    for request in recording.requests:
        if key in request.tags and request.first_token_s is not None:
            found.setdefault(request.tags[key], []).append(request_latencies(request))
    return {
        value: {name: np.sort([one[name] for one in latencies]) for name in TAG_LATENCIES}
        for value, latencies in found.items()
    }
