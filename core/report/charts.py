"""A chart of a report as plain data: lines of numbers with titles. Colours and pixels are up to what draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Points to be joined. style: number of its colour and dashes; notes: a word beside each point, or nothing."""

    label: str
    style: int
    xs: Sequence[float]
    ys: Sequence[float]
    notes: Sequence[str] = ()
    is_faint: bool = False
    steps: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over two axes. summary: the same in words, for readers who cannot see the chart."""

    title: str
    summary: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    x_high: float | None = None
    y_high: float | None = None
