"""The charts as PNG files, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookline.core.report.charts import Chart
from hookline.core.report.curves import curves
from hookline.core.report.distributions import distributions
from hookline.core.report.tags import tag_tables
from hookline.core.report.timelines import timelines
from hookline.core.report.view import Group, Report

COLOURS = ("#0072b2", "#d55e00", "#007a5a", "#b0457f", "#8f6a00", "#3b8fc2", "#444444", "#7a4fbf")
DASHES = ("solid", "dashed", "dotted", "dashdot")
SIZE_IN, DPI = (4.6, 3.2), 110


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write a file for each kind of chart and load that has any, and return their paths."""
    across = curves(report, report.jobs, of_load=True)
    written = [folder / "curves_over_loads.png"] if across else []
    if across:
        _write([across], "", written[0])
    for number, group in enumerate(report.groups, start=1):
        for kind, rows in _figures(report, group):
            path = folder / (f"{kind}.png" if len(report.groups) == 1 else f"{kind}_{number}.png")
            _write(rows, group.name, path)
            written.append(path)
    return written


def _figures(report: Report, group: Group) -> Iterator[tuple[str, Sequence[Sequence[Chart]]]]:
    """Names of files, and their charts by row."""
    for kind, charts in (
        ("distributions", distributions(report, group)),
        ("curves", curves(report, group.jobs, of_load=False)),
    ):
        if charts:
            yield kind, [charts]
    for table in tag_tables(report, group):
        if table.charts:
            yield f"by_{table.key}", [table.charts]
    lines = [
        [replace(chart, title=f"job {job.id}: {chart.title}") for chart in charts]
        for job, charts in timelines(report, group)
    ]
    if lines:
        yield "timelines", lines


def _write(rows: Sequence[Sequence[Chart]], title: str, path: Path) -> None:
    num_columns = max(map(len, rows))
    figure = Figure(figsize=(SIZE_IN[0] * num_columns, SIZE_IN[1] * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), num_columns, squeeze=False)
    for axes_row, row in zip(grid, rows, strict=True):
        for axes, chart in zip(axes_row, row, strict=False):
            _draw(axes, chart)
    figure.suptitle(_plain(title))
    figure.savefig(path, dpi=DPI)


def _draw(axes: Axes, chart: Chart) -> None:
    for line in chart.lines:
        axes.plot(
            line.xs,
            line.ys,
            label=_plain(line.label),
            color=COLOURS[line.style % len(COLOURS)],
            linestyle=DASHES[(line.style + line.style // len(COLOURS)) % len(DASHES)],
            alpha=0.5 if line.is_faint else 1.0,
            marker="o" if line.notes else "",
            drawstyle="steps-post" if line.steps else "default",
        )
        for x, y, note in zip(line.xs, line.ys, line.notes, strict=False):
            axes.annotate(_plain(note), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(title=_plain(chart.title), xlabel=chart.x_title, ylabel=chart.y_title)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    if not chart.log_y:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _plain(text: str) -> str:
    """Text without matplotlib's own markup."""
    return text.replace("$", r"\$")
