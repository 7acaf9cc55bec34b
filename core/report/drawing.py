"""Charts as shapes to be written as SVG: axes with round ticks, paths in pixels.

A drawing is 360 wide, as wide as a phone shows without shrinking its text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hookline.core.report.charts import Chart, Line

WIDTH, HEIGHT = 360.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 12.0, 10.0, 36.0
NUM_COLOURS, NUM_DASHES = 8, 4


@dataclass(frozen=True)
class Tick:
    """A value on an axis, and its place in pixels."""

    at: float
    text: str


@dataclass(frozen=True)
class Axis:
    """From values to pixels: low is drawn at `start`, high at `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where a value is drawn, to a tenth of a pixel; values below a logarithmic axis' start are drawn at it."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[Tick]:
        """About four ticks, at round values."""
        values = _decades(self.low, self.high) if self.is_log else _rounds(self.low, self.high)
        return [Tick(self.at(value), f"{value:,.10g}" if value >= 1 else f"{value:.6g}") for value in values]


@dataclass(frozen=True)
class Point:
    """A place with a word beside it."""

    x: float
    y: float
    note: str


@dataclass(frozen=True)
class Path:
    """A line as an SVG path. colour, dash: numbers of classes of the page's style."""

    label: str
    d: str
    colour: int
    dash: int
    is_faint: bool
    points: Sequence[Point]


@dataclass(frozen=True)
class Drawing:
    """A chart, ready to be written."""

    chart: Chart
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    paths: Sequence[Path]
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    @property
    def grid(self) -> str:
        """The lines at the ticks, as one path."""
        upright = "".join(f"M{tick.at:g} {self.top:g}V{self.bottom:g}" for tick in self.x_ticks)
        return upright + "".join(f"M{self.left:g} {tick.at:g}H{self.right:g}" for tick in self.y_ticks)


def draw(chart: Chart, height: float = HEIGHT) -> Drawing:
    """Lay a chart out."""
    x = _axis([value for line in chart.lines for value in line.xs], chart.log_x, chart.x_high, LEFT, WIDTH - RIGHT)
    y = _axis([value for line in chart.lines for value in line.ys], chart.log_y, chart.y_high, height - BOTTOM, TOP)
    paths = [_path(line, x, y) for line in chart.lines]
    return Drawing(chart, x.ticks(), y.ticks(), paths, WIDTH, height, LEFT, WIDTH - RIGHT, TOP, height - BOTTOM)


def _axis(values: Sequence[float], is_log: bool, high: float | None, start: float, end: float) -> Axis:
    top = max(values) if high is None else high
    if is_log:
        return Axis(min(values) / 1.1, top * 1.1, start, end, True)
    return Axis(0.0, top * 1.05 or 1.0, start, end)


def _rounds(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step)
    return [round(number * step, 12) for number in range(first, math.floor(high / step * 1.000001) + 1)]


def _decades(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [factor * 10.0**power for power in decades for factor in factors]
        inside = [value for value in found if low <= value <= high]
        if len(inside) >= 3:
            break
    return inside


def _path(line: Line, x: Axis, y: Axis) -> Path:
    places = [(x.at(one), y.at(other)) for one, other in zip(line.xs, line.ys, strict=True)]
    return Path(
        label=line.label,
        d=_d(places, line.steps),
        colour=line.style % NUM_COLOURS,
        dash=(line.style + line.style // NUM_COLOURS) % NUM_DASHES,
        is_faint=line.is_faint,
        points=[Point(*place, note) for place, note in zip(places, line.notes, strict=False)],
    )


def _d(places: Sequence[tuple[float, float]], steps: bool) -> str:
    """An SVG path through places; with steps, along to the next and only then up."""
    (x, y), *rest = places
    text = f"M{x:g} {y:g}"
    for x, y in rest:
        text += f"H{x:g}V{y:g}" if steps else f"L{x:g} {y:g}"
    return text
