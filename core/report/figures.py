"""The figures a report compares, and how numbers are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hookline.core.report.jobs import Job

STEADY = 0.02
"""Ratios closer to 1 than this are shown as neither better nor worse."""


@dataclass(frozen=True)
class Figure:
    """A figure of the result lines.

    better: 1 if more is better, -1 if less is, 0 if neither. scale, unit: value times scale is shown, in this unit.
    """

    name: str
    title: str
    better: int
    unit: str = ""
    scale: float = 1.0

    def text(self, job: Job) -> str:
        """The job's value as shown, without its unit."""
        value = job.figure(self.name)
        return "–" if value is None else number(value * self.scale)

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


LATENCIES = {"ttft_s": "time to first token", "itl_s": "time between tokens", "e2e_s": "end to end"}
FIGURES = (
    Figure("output_tok_s", "output", 1, "tokens/s"),
    Figure("requests_s", "requests", 1, "per s"),
    Figure("goodput_s", "goodput", 1, "per s"),
    *(
        Figure(f"{name}.{part}", f"{title} {part}", -1, "s")
        for name, title in LATENCIES.items()
        for part in ("p50", "p99")
    ),
    Figure("prefix_hit_rate", "prefix hits", 0, "%", 100),
    Figure("pool_usage.max", "cache use, max", 0, "%", 100),
    Figure("preemptions", "preemptions", -1),
    Figure("refused", "refused", -1),
    Figure("step_times.decode_idle_percent", "device idle in decode", -1, "%"),
    Figure("peak_memory_gib", "GPU memory", 0, "GiB"),
)


def figures_of(jobs: Sequence[Job]) -> tuple[list[Figure], list[Figure]]:
    """The figures with values, in fitting units, and the figures that are 0 for every job."""
    objectives = {job.record["objective"]["name"] for job in jobs if job.record.get("objective")}
    others = sorted(objectives - {figure.name for figure in FIGURES})
    shown, zero = [], []
    for figure in (*FIGURES, *(Figure(name, name, 0) for name in others)):
        values = [value for job in jobs if (value := job.figure(figure.name)) is not None]
        if values and max(values) == 0 and min(values) == 0:
            zero.append(figure)
        elif values:
            shown.append(in_fitting_unit(figure, max(values)))
    return shown, zero


def in_fitting_unit(figure: Figure, largest: float) -> Figure:
    """The figure in milliseconds if it is in seconds and all its values are small."""
    if figure.unit != "s" or largest >= 10:
        return figure
    return Figure(figure.name, figure.title, figure.better, "ms", 1000.0)


def number(value: float) -> str:
    """A number to three or more digits, without exponent: 0.0123, 4.56, 78.9, 12,345."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1
    text = f"{value:.{digits}f}" if abs(value) >= 0.01 else f"{value:.2g}"
    return (
        f"{float(text):f}".rstrip("0").rstrip(".")
        if "e" in text
        else text.rstrip("0").rstrip(".")
        if float(text)
        else "0"
    )


def seconds(value: float) -> str:
    """A duration with its unit."""
    return f"{number(value)} s" if value >= 1 else f"{number(value * 1000)} ms"
