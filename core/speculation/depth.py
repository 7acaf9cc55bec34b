"""How many drafts the requests of a step have: as many as give the most tokens in a second, by what steps took before.

Of each number of running requests, in ranges, and each number of drafts it is known how long steps took, from one
commit to the next, with what the host and the drafter take. A number that was not tried counts as cheap, so that it is
tried if it could pay. Tokens of requests do not depend on it: a draft is kept if it is the token that is drawn anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hookline.core.step.captured import TOKEN_ROWS

NUM_TRIALS, NUM_LAST = 3, 5
"""Steps after which a number of drafts counts as tried, and last ones of which the median counts."""
NUM_COLD = 24
"""The first steps of an engine do not count: they take several times as long, since code runs for the first time."""
LEAST_COST = 0.5
"""A step with fewer drafts takes at least this part of one with more, as long as it was not tried."""
LEAST_SECONDS = 1e-9
"""Least time that a step is taken to need: the engine's clock may stand still."""
NUM_STALE = 1000
"""A number of drafts that no step had for so many steps counts as half as dear, so that it is tried again."""
NUM_ROWS, FIRST_ROWS = 64, 8.0
"""Rows that what was seen of drafts goes back to, about; rows whose drafts count as right at first."""
PROBE_PERIOD, PROBE_STEPS = 128, 2
"""Where drafts do not pay, so many steps of so many have some, to see whether they do now."""


@dataclass(slots=True)
class _Cost:
    """Seconds of the last steps of one kind, and the number of the last one."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_LAST))
    step: int = 0

    def at(self, step: int) -> float | None:
        """Seconds that one takes, as far as is known at a step; None before NUM_TRIALS."""
        if len(self.seconds) < NUM_TRIALS:
            return None
        return sorted(self.seconds)[len(self.seconds) // 2] / (1 + (step - self.step) / NUM_STALE)


class DraftDepth:
    """Chooses the depth of steps: most drafts of a request. most: that of the drafter, k."""

    def __init__(self, most: int) -> None:
        self._costs: dict[tuple[int, int], _Cost] = {}
        """By the range that the number of requests is in, and the depth."""
        self._rows, self._kept = [FIRST_ROWS] * most, [FIRST_ROWS] * most
        """By place: of rows of steps that are at least so deep, how many there were and how many kept a draft there."""

    def choose(self, num_rows: int, most: int, step: int) -> int:
        """The depth of a step of so many requests, up to `most`; 0 if drafts do not pay. step: its number."""
        expected, depths = 1.0, range(most + 1)
        costs = [self._cost(num_rows, depth).at(step) for depth in depths]
        if most < 1 or costs[most] is None:
            return most
        rates = []
        for depth in depths:
            expected += self._kept[depth - 1] / self._rows[depth - 1] if depth else 0.0
            rates.append(expected / self._bounded(costs, depth))
        best = max(depths, key=rates.__getitem__)
        if not best and step % PROBE_PERIOD < PROBE_STEPS:
            return max(depths[1:], key=rates.__getitem__)
        return best

    def note(self, num_rows: int, depth: int, step: int, seconds: float) -> None:
        """Note how long a step of so many requests took. step: its number."""
        if step <= NUM_COLD:
            return
        cost = self._cost(num_rows, depth)
        cost.seconds.append(max(seconds, LEAST_SECONDS))
        cost.step = step

    def count(self, num_rows: int, depth: int, num_kept: Collection[int]) -> None:
        """Count a step of so many requests. num_kept: how many drafts were kept, of each that had some."""
        left = NUM_ROWS / (NUM_ROWS + num_rows)
        for place in range(min(depth, len(self._rows))):
            self._rows[place] = left * self._rows[place] + num_rows
            self._kept[place] = left * self._kept[place] + sum(kept > place for kept in num_kept)

    def _cost(self, num_rows: int, depth: int) -> _Cost:
        return self._costs.setdefault((bisect_left(TOKEN_ROWS, num_rows), depth), _Cost())

    @staticmethod
    def _bounded(costs: Sequence[float | None], depth: int) -> float:
        """Seconds of a step, or the least that it may take if it was not tried; the deepest was."""
        if (tried := costs[depth]) is not None:
            return tried
        more = min(cost for cost in costs[depth:] if cost is not None)
        return max(LEAST_COST * more, *(cost for cost in costs[:depth] if cost is not None), 0.0)
