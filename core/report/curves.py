"""Charts of latency over throughput, along a number that differs between jobs.

A number of the load (such as its rate) makes curves over all jobs; any other number makes curves over jobs with the
same load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hookline.core.report.charts import Chart, Line
from hookline.core.report.columns import Column
from hookline.core.report.figures import LATENCIES, number, seconds
from hookline.core.report.jobs import Job
from hookline.core.report.view import Report, words

KNOBS = ("workload.request_rate", "engine.max_num_seqs")
"""Numbers that curves are drawn along, in the order of preference."""
FLAT = 1.05
"""Factor between throughputs below which no curve is drawn."""


def knob(report: Report, of_load: bool) -> Column | None:
    """The number that curves are drawn along: of the load, or of what serves it; None if none differs."""
    numeric = [one for one in report.columns if one.is_number and one.is_load == of_load]
    preferred = [one for name in KNOBS for one in numeric if one.name == name]
    return next(iter([*preferred, *numeric]), None)


def curves(report: Report, jobs: Sequence[Job], of_load: bool) -> list[Chart]:
    """Latency over throughput for each latency: a line through the jobs that differ in the knob alone."""
    along = knob(report, of_load)
    lines = _lines(report, jobs, along) if along is not None else []
    if along is None or not lines or not spread_out([job for line in lines for job in line]):
        return []
    others = [
        one for one in report.columns if one is not along and _differs(one, [job for line in lines for job in line])
    ]
    series = {words(line[0], others) or "all jobs": line for line in lines}
    return [chart for name in LATENCIES if (chart := _curve(name, series, along)) is not None]


def spread_out(jobs: Sequence[Job]) -> bool:
    """Whether throughputs differ enough for a curve; at a rate that all jobs can serve they do not."""
    known = [value for job in jobs if (value := job.figure("output_tok_s"))]
    return bool(known) and max(known) > FLAT * min(known)


def _lines(report: Report, jobs: Sequence[Job], along: Column) -> list[list[Job]]:
    """Two jobs or more for each line, in the knob's order."""
    others = [one for one in report.columns if one is not along]
    found: dict[str, list[Job]] = {}
    ordered = [job for job in jobs if job.is_done and along.values[job.id] is not None]
    for job in sorted(ordered, key=lambda job: float(along.values[job.id])):
        found.setdefault(str([one.values[job.id] for one in others]), []).append(job)
    return [line for line in found.values() if len(line) > 1]


def _differs(column: Column, jobs: Sequence[Job]) -> bool:
    return len({column.text(job) for job in jobs}) > 1


def _curve(name: str, series: Mapping[str, Sequence[Job]], along: Column) -> Chart | None:
    lines, said = [], []
    for style, (label, jobs) in enumerate(series.items()):
        for part, is_faint in (("p99", True), ("p50", False)):
            points = [(job, job.figure("output_tok_s"), job.figure(f"{name}.{part}")) for job in jobs]
            known = [(job, x, y) for job, x, y in points if x is not None and y is not None]
            xs, ys = [x for _, x, _ in known], [y for _, _, y in known]
            notes = [along.text(job) for job, _, _ in known]
            if known:
                lines.append(Line(f"{label}, {part}", style, xs, ys, () if is_faint else notes, is_faint))
            said += [f"{label}, {along.text(job)}: {part} {seconds(y)} at {number(x)} tokens/s" for job, x, y in known]
    if not lines:
        return None
    ys = [y for line in lines for y in line.ys]
    return Chart(
        title=f"{LATENCIES[name].capitalize()} over throughput",
        summary=f"Points along {along.name}. " + "; ".join(said),
        x_title="output tokens/s",
        y_title="seconds",
        lines=lines,
        log_y=min(ys) > 0 and max(ys) / min(ys) > 20,
    )
