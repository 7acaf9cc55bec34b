"""Charts of what happened when: requests running and waiting, and the cache in use, step after step."""

from __future__ import annotations

import numpy as np

from hookline.core.bench.metrics import pool_usage
from hookline.core.bench.recorder import Column as Array
from hookline.core.bench.recorder import Recording
from hookline.core.report.charts import Chart, Line
from hookline.core.report.figures import number
from hookline.core.report.jobs import Job
from hookline.core.report.view import Group, Report

NUM_MOMENTS = 160
"""Points along a timeline; each is the mean over its share of the time."""


def timelines(report: Report, group: Group) -> list[tuple[Job, list[Chart]]]:
    """For each recorded job, requests running and waiting, and the cache's use, over time; axes alike in a group."""
    recorded = [(job, job.recording) for job in group.done if job.recording is not None and len(job.recording.drawn)]
    if not recorded:
        return []
    seconds_high = max(recording.seconds for _, recording in recorded)
    requests_high = max(float(max(r.steps["running"].max(), r.steps["waiting"].max())) for _, r in recorded)
    pool_high = max(float(_pool_percent(recording).max(initial=0)) for _, recording in recorded)
    return [
        (job, [
            _queue_chart(r, seconds_high, requests_high),
            *([_pool_chart(r, seconds_high, pool_high)] if r.num_blocks else []),
        ])
        for job, r in recorded
    ]  # fmt: skip


def _queue_chart(recording: Recording, x_high: float, y_high: float) -> Chart:
    steps = recording.steps
    lines = []
    for style, name in enumerate(("running", "waiting")):
        xs, ys = _over_time(steps["end_s"], steps[name])
        lines.append(Line(name, style, xs, ys))
    said = ", ".join(
        f"{name} at most {steps[name].max()}, on average {steps[name].mean():.1f}" for name in ("running", "waiting")
    )
    return Chart("Requests running and waiting", said, "seconds", "requests", lines, x_high=x_high, y_high=y_high)


def _pool_chart(recording: Recording, x_high: float, y_high: float) -> Chart:
    percent = _pool_percent(recording)
    xs, ys = _over_time(recording.steps["end_s"], percent)
    preemptions = int(recording.steps["preemptions"].sum())
    said = f"at most {number(float(percent.max()))} % of {recording.num_blocks} blocks; {preemptions} preemptions"
    return Chart("KV cache in use", said, "seconds", "% of blocks", [Line("in use", 2, xs, ys)],
                 x_high=x_high, y_high=y_high)  # fmt: skip


def _pool_percent(recording: Recording) -> Array:
    return 100 * pool_usage(recording)


def _over_time(times_s: Array, values: Array) -> tuple[list[float], list[float]]:
    """The values at their times; if they are too many, means over equal shares of the time."""
    if len(times_s) <= NUM_MOMENTS:
        return times_s.tolist(), values.astype(float).tolist()
    share = np.minimum((times_s / times_s[-1] * NUM_MOMENTS).astype(int), NUM_MOMENTS - 1)
    counts = np.bincount(share, minlength=NUM_MOMENTS)
    some = counts > 0
    middle = (np.arange(NUM_MOMENTS) + 0.5) * times_s[-1] / NUM_MOMENTS
    return middle[some].tolist(), (np.bincount(share, values, NUM_MOMENTS)[some] / counts[some]).tolist()
