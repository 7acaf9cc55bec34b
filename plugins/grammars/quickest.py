"""Which of several ways to do the same work is the quickest here and now, found by trying. Knows no grammar."""

from __future__ import annotations

FIRST_TRIES = 3
"""Times that each way is tried at first."""
RETRY_EVERY = 64
"""Once in so many times, a way that was slower is tried again."""
MEMORY = 8
"""About so many of the last tries of a way count."""


class Quickest:
    """`choose` a way, do the work, and say what it `took`. A choice costs under a microsecond."""

    def __init__(self, num_ways: int) -> None:
        self._costs = [0.0] * num_ways
        self._tries = [0] * num_ways
        self._count = 0

    def choose(self) -> int:
        """The way to take: mostly the quickest one."""
        ways = range(len(self._costs))
        if len(ways) == 1:
            return 0
        self._count += 1
        fewest = min(self._tries)
        if fewest < FIRST_TRIES:
            return self._tries.index(fewest)
        if self._count % RETRY_EVERY == 0:
            return self._count // RETRY_EVERY % len(ways)
        return min(ways, key=self._costs.__getitem__)

    def took(self, way: int, cost: float) -> None:
        """What the way that was chosen took, in any unit, for the same amount of work."""
        self._tries[way] += 1
        is_settled = self._tries[way] > 1  # the first time starts threads and fills caches
        self._costs[way] += (cost - self._costs[way]) / (min(self._tries[way] - 1, MEMORY) if is_settled else 1)
