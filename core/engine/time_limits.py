"""When requests exceed their timeout_s: a heap, so that each step looks at the next one to pass alone."""

from __future__ import annotations

from collections.abc import Container, Sized
from heapq import heapify, heappop, heappush
from typing import Protocol

MIN_DROPPED = 64
"""Limits of ended requests are dropped once there are this many more than two for each live request."""


class _Live(Container[int], Sized, Protocol):
    """The ids of the requests that have not ended."""


class TimeLimits:
    """The time limits of requests, the next one to pass first. As a truth value: whether there is any."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, float]] = []
        """(when, request, its timeout_s)."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, arrival_s: float, id_: int, timeout_s: float, live: _Live) -> None:
        """Add a request's limit; those of requests that are not live any more may be dropped."""
        if len(self._heap) > MIN_DROPPED + 2 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)
        heappush(self._heap, (arrival_s + timeout_s, id_, timeout_s))

    def passed(self, now_s: float) -> list[tuple[int, float]]:
        """Ids of requests whose limits have passed since the last call, with their timeout_s; some may have ended."""
        late = []
        while self._heap and self._heap[0][0] <= now_s:
            _, id_, timeout_s = heappop(self._heap)
            late.append((id_, timeout_s))
        return late
