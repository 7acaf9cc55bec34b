"""Curves of straight lines between powers of two, and the least squares that find them, never below zero.

Hiccups of what was measured count less. Knows no steps. Needs SciPy to solve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.cost import Curve
from core.errors import ConfigError

Column = np.ndarray[Any, Any]
NUM_REWEIGHTINGS = 4
OUTLIER = 1.0
"""Errors beyond so many times what is predicted count less."""
SMOOTHNESS = 1e-3
"""How much neighbouring slopes want to be alike, beside what the steps say: decides where there are none."""


def knots_around(tokens: Column) -> list[int]:
    """Powers of two around what was measured."""
    low, high = int(tokens.min()), int(tokens.max())
    powers = [1 << power for power in range(32)]
    return [one for one in powers if one * 2 > low and one < high * 2] or [powers[0]]


def segments(tokens: Column, knots: Sequence[int]) -> Column:
    """One, and how far the tokens reach into each segment between two knots; into the last one without end."""
    ends = [*knots[1:-1], np.inf]
    parts = [np.clip(tokens - start, 0, end - start) for start, end in zip(knots, ends, strict=False)]
    return np.stack([np.ones(len(tokens)), *parts[: len(knots) - 1]], axis=1).astype(np.float64)


def smoothness(knots: Sequence[int], scale_s: float) -> Column:
    """Rows that are zero if neighbouring slopes are alike."""
    rows = np.zeros((max(len(knots) - 2, 0), len(knots)))
    for row in range(len(rows)):
        width = knots[row + 1] - knots[row]
        rows[row, row + 1], rows[row, row + 2] = -width, width
    return rows * SMOOTHNESS / scale_s


def block_diagonal(blocks: Sequence[Column], width: int) -> Column:
    """Rows of all blocks, each in columns of its own; `width` columns in all."""
    rows, column = [], 0
    for block in blocks:
        rows.append(np.pad(block, ((0, 0), (column, width - column - block.shape[1]))))
        column += block.shape[1]
    return np.concatenate(rows)


def curve_through(knots: Sequence[int], found: Column) -> Curve:
    """The curve whose first value and slopes are the coefficients of `segments`."""
    widths = np.diff(knots)
    seconds = found[0] + np.concatenate([[0.0], np.cumsum(found[1:] * widths)])
    return Curve([float(knot) for knot in knots], [float(value) for value in seconds])


def solve(matrix: Column, seconds: Column, extra: Column) -> Column:
    """Non-negative least squares of relative errors, reweighted so that outliers count less.

    extra: rows whose product with the coefficients should be zero.
    Raises: ConfigError if SciPy is not there.
    """
    nnls = _nnls()
    scale = np.maximum(np.abs(matrix).max(0), 1e-30)
    extra = extra * np.sqrt(len(seconds))
    found, expected, trust = np.zeros(matrix.shape[1]), np.maximum(seconds, 1e-9), np.ones(len(seconds))
    for _ in range(NUM_REWEIGHTINGS):
        weights = trust / expected
        rows = np.concatenate([matrix * weights[:, None], extra]) / scale
        wanted = np.concatenate([seconds * weights, np.zeros(len(extra))])
        # The triangle has the same solution as all rows, and only as many rows as columns.
        triangle: Column = np.asarray(np.linalg.qr(np.column_stack([rows, wanted]), mode="r"))
        found = nnls(triangle[:, :-1], triangle[:, -1], maxiter=1000)[0] / scale
        expected = np.maximum(matrix @ found, 1e-9)
        trust = np.sqrt(np.minimum(1, OUTLIER / np.maximum(np.abs(seconds / expected - 1), 1e-9)))
    return np.asarray(found)


def _nnls() -> Any:
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ConfigError("fit= needs SciPy: pip install 'hookline[simulate]'") from None
    return nnls
