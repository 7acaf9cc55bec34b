"""For batch jobs: who has most left to generate begins first, and prompt chunks go along with the decodes.

A decode step of few rows waits for the weights to come from memory; prompt tokens in the same step use that time. But a
long answer that begins late decodes alone in the end, so the longest begin first and all end at about the same time
(Graham 1969, doi:10.1137/0117039). Tokens in the same step: Sarathi-Serve, arXiv:2403.02310.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from core.contracts import Plan, RequestView, SchedulerView
from plugins.schedulers import LongestFirstConfig
from plugins.schedulers.moves import plan_mixed


class LongestFirst:
    """Shortest time until all are done; engine.max_num_batched_tokens bounds every step, and some hundred are best."""

    def __init__(self, config: LongestFirstConfig) -> None:
        self.config = config
        self._ranked = _Ranked(config.ageing_tokens_per_s)

    def plan(self, view: SchedulerView) -> Plan:
        return plan_mixed(view, self.config.watermark, self._ranked.take(view.waiting))


class _Ranked:
    """The waiting requests by rank, kept from plan to plan, for sorting a long queue at each step would take too long.

    A rank is the arrival times ageing, less what a request may still generate: it stays while the request waits. All
    that wait are kept, for new ones join the queue at its ends; so if no more are kept than wait, they are the same.
    """

    def __init__(self, ageing_tokens_per_s: float) -> None:
        self._ageing_tokens_per_s = ageing_tokens_per_s
        self._heap: list[tuple[float, int, RequestView]] = []
        self._ids: set[int] = set()
        self._taken: list[RequestView] = []

    def take(self, waiting: Sequence[RequestView]) -> Iterator[RequestView]:
        """The waiting requests, those of least rank first; one is dropped when the next is asked for."""
        self._keep_again()
        for end in (waiting, reversed(waiting)):
            self._keep_new(end)
        if len(self._heap) != len(waiting):
            self._ids = {request.id for request in waiting}
            self._heap = [self._ranked(request) for request in waiting]
            heapq.heapify(self._heap)
        while self._heap:
            yield self._heap[0][2]
            request = heapq.heappop(self._heap)[2]
            self._ids.remove(request.id)
            self._taken.append(request)

    def _keep_again(self) -> None:
        """Those that were taken and still wait, since that plan was not carried out."""
        taken, self._taken = self._taken, []
        self._keep_new(request for request in taken if request.num_computed_tokens == 0)

    def _keep_new(self, requests: Iterable[RequestView]) -> None:
        """Keep requests up to the first that is kept already."""
        for request in requests:
            if request.id in self._ids:
                return
            heapq.heappush(self._heap, self._ranked(request))
            self._ids.add(request.id)

    def _ranked(self, request: RequestView) -> tuple[float, int, RequestView]:
        rank = self._ageing_tokens_per_s * request.arrival_s - (request.max_tokens - request.num_output_tokens)
        return rank, request.id, request
