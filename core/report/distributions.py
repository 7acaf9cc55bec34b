"""Charts of waiting times of requests and tokens: the share that waited no longer, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hookline.core.bench.latencies import gaps_s, request_latencies
from hookline.core.bench.recorder import Column as Array
from hookline.core.bench.recorder import Recording, token_times
from hookline.core.report.charts import Chart, Line
from hookline.core.report.figures import LATENCIES, seconds
from hookline.core.report.jobs import Job
from hookline.core.report.view import Group, Report

FRACTIONS = np.concatenate([np.linspace(0, 0.99, 100), [0.995, 0.999, 1.0]])
"""Points that are drawn of a distribution with more samples than that."""

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
Points = tuple[list[float], list[float]]


def samples(recording: Recording) -> Mapping[str, Array]:
    """Every latency of a recording, by name, sorted, in seconds."""
    requests = [request_latencies(one) for one in recording.requests if one.first_token_s is not None]
    found = {name: np.array([one[name] for one in requests]) for name in ("ttft_s", "e2e_s")}
    return {name: np.sort(values) for name, values in {**found, "itl_s": gaps_s(*token_times(recording))}.items()}


def distributions(report: Report, group: Group) -> list[Chart]:
    """For each latency, the share of requests or tokens that waited no longer."""
    recorded = {job: samples(job.recording) for job in group.done if job.recording is not None}
    charts = []
    for name, title in LATENCIES.items():
        points = {job: cumulative(recorded[job][name]) if job in recorded else stated(job, name) for job in group.done}
        drawn = {job: both for job, both in points.items() if both is not None}
        if drawn:
            lines = [
                Line(report.label(job), report.style(job), *both, steps=job in recorded) for job, both in drawn.items()
            ]
            of = "gaps between tokens" if name == "itl_s" else "requests"
            charts.append(distribution(title, lines, [(job, name) for job in drawn], of))
    return charts


def stated(job: Job, name: str) -> Points | None:
    """The distribution of a job without records: the percentiles in its result line."""
    known = [(job.figure(f"{name}.{part}"), percent) for part, percent in PERCENTILES.items()]
    points = [(value, percent) for value, percent in known if value is not None]
    return ([value for value, _ in points], [percent for _, percent in points]) if points else None


def cumulative(values: Array) -> Points | None:
    """For each time, the percentage of sorted samples that are at most as large; None without samples."""
    if not len(values):
        return None
    if len(values) <= len(FRACTIONS):
        xs, ys = values, np.arange(1, len(values) + 1) / len(values)
    else:
        xs, ys = np.quantile(values, FRACTIONS), FRACTIONS
    return [float(xs[0]), *xs.tolist()], [0.0, *(100 * ys).tolist()]


def distribution(title: str, lines: Sequence[Line], names: Sequence[tuple[Job, str]], of: str) -> Chart:
    """A chart of such percentages. names: of each line, its job and what the figure is called in its result line."""
    said = [f"{line.label}: {_percentiles(*name)}" for line, name in zip(lines, names, strict=True)]
    high, low = max(max(line.xs) for line in lines), min(min(line.xs) for line in lines)
    return Chart(
        title=title[:1].upper() + title[1:],
        summary="; ".join(said),
        x_title="seconds",
        y_title=f"% of {of}",
        lines=lines,
        log_x=low > 0 and high / low > 20,
        y_high=100.0,
    )


def _percentiles(job: Job, name: str) -> str:
    parts = [(part, job.figure(f"{name}.{part}")) for part in ("p50", "p90", "p99")]
    return ", ".join(f"{part} {seconds(value)}" for part, value in parts if value is not None)
