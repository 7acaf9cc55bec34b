"""Chooses the number of threads that fill a step's masks by measuring.

The time of masks changes from step to step by a factor of ten. The time for waking threads differs between machines,
but changes little on one machine. So the two are estimated separately: a number of threads that was slow while masks
took long is not considered slow when they are short.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_TRIES = 3
"""Times that each number of threads is tried at first; the first try starts threads and fills caches, and does not
count."""
RETRY_EVERY = 64
"""Number of calls after which several threads are tried again."""
RETURN_EVERY = 16
"""Number of calls with several threads after which one thread is tried again; it soon hands over the rest if masks take
long."""
LONGER, SHORTER = 1.2, 1 / 1.1
"""Weight of a measurement in the estimate of the time for waking threads. The estimate tends to a value that two of
three measurements are below, because some are ten times as long as most."""
SHORTEST_S = 1e-6


class Quickest:
    """`choose` a way, do the work, and report the time it `took`; one thread may have the `rest` done in another way.

    num_threads: of each way, in ascending order; the first is one thread, the caller's own. A choice costs about a
    microsecond.
    """

    def __init__(self, num_threads: Sequence[int]) -> None:
        self._num_threads = num_threads
        self._waking_s = [0.0] * len(num_threads)
        self._tries = [0] * len(num_threads)
        self._row_s = 0.0
        """Seconds of one thread for a row, as measured last."""
        self._is_fresh = self._has_lost = False
        self._count = self._since_alone = 0

    def choose(self, num_rows: int) -> int:
        """The way for `num_rows` rows: usually the way with the shortest estimate."""
        num_ways = len(self._num_threads)
        if num_ways == 1:
            return 0
        self._count += 1
        if min(self._tries) < FIRST_TRIES:
            return self._tries.index(min(self._tries))
        if self._count % RETRY_EVERY == 0:
            return self._count // RETRY_EVERY % num_ways
        way = min(range(num_ways), key=lambda one: self._expected_s(one, self._row_s * num_rows))
        self._since_alone = 0 if way == 0 else self._since_alone + 1
        if self._since_alone >= RETURN_EVERY or self._has_lost:
            self._since_alone, self._has_lost = 0, False
            return 0
        return way

    def _expected_s(self, way: int, alone_s: float) -> float:
        return self._waking_s[way] + alone_s / self._num_threads[way]

    @property
    def patience_s(self) -> float:
        """Seconds for which one thread goes on before it asks for another way for the `rest`."""
        if len(self._num_threads) == 1 or min(self._tries) < FIRST_TRIES:
            return float("inf")
        return min(self._waking_s[1:])

    def rest(self, seconds: float, num_done: int, num_left: int) -> int:
        """The way for the remaining `num_left` rows, after one thread took `seconds` for `num_done` rows."""
        alone_s = seconds / num_done * num_left
        return min(range(len(self._num_threads)), key=lambda way: self._expected_s(way, alone_s))

    def took(self, way: int, seconds: float, num_rows: int) -> None:
        """Note the seconds that the last choice took for `num_rows` rows."""
        self._tries[way] += 1
        if way == 0:
            self._row_s, self._is_fresh = seconds / num_rows, True
            return
        alone_s = self._row_s * num_rows
        self._has_lost = seconds > alone_s > 0
        waking_s = max(SHORTEST_S, seconds - alone_s / self._num_threads[way])
        if self._tries[way] == 2:
            self._waking_s[way] = waking_s
        elif self._tries[way] == FIRST_TRIES:
            self._waking_s[way] = min(waking_s, self._waking_s[way])
        elif self._is_fresh or self._has_lost:  # consecutive steps take about as long as each other
            self._waking_s[way] *= LONGER if waking_s > self._waking_s[way] else SHORTER
        self._is_fresh = False
