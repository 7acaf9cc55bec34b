"""For batch jobs: requests with most left to generate begin first, and prompt chunks share steps with decodes.

A decode step of few rows waits for the weights to come from memory; prompt tokens in the same step use that time. But a
long answer that begins late decodes alone in the end, so the longest begin first and all end at about the same time
(Graham 1969, doi:10.1137/0117039). With `pace`, prompts are computed no faster than that needs: prompts of short
answers wait for steps with few decodes. Tokens in the same step: Sarathi-Serve, arXiv:2403.02310.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hookline.core.contracts import Plan, RequestView, SchedulerView
from hookline.core.scheduling import SIMPLY_DECODE, TILE_TOKENS, can_simply_decode, plan_mixed
from hookline.plugins.schedulers import LongestFirstConfig

PLANS_A_PACE = 8
"""Plans for which a pace is kept if no request arrives, because computing it reads all running requests."""
LEAST_PROMPT_TOKENS = 64
"""Prompt tokens in a step with prompts: such steps have fixed costs, so few steps should have hardly any."""
BUCKET_TOKENS = 16
"""Width of a bucket of answer lengths in tokens, for counting prompts."""


class LongestFirst:
    """Shortest time until all are done; engine.max_num_batched_tokens bounds every step, and some hundred are best.

    Worst gap, whatever arrives: every step generates a token of each running request, or computes at least one token of
    its prompt. A preempted request that had begun to generate goes before all requests that have not; a request that
    has not is overtaken by arrivals of at most the next max_model_len / ageing_tokens_per_s seconds.
    """

    def __init__(self, config: LongestFirstConfig) -> None:
        self.config = config
        self._ranked = _Ranked(config.ageing_tokens_per_s)
        self._pace, self._plans_left = math.inf, 0

    def plan(self, view: SchedulerView) -> Plan:
        """Decodes with prompt chunks in one step; waiting requests by rank, at the pace at which all answers end
        together.
        """
        if can_simply_decode(view):
            return SIMPLY_DECODE
        if self._ranked.keep(view.waiting):
            self._plans_left = 0
        return plan_mixed(view, self.config.watermark, self._ranked.take(), self._most_tokens(view))

    def _most_tokens(self, view: SchedulerView) -> int:
        """Decodes, and on average as many prompt tokens as the pace asks for, in whole tiles."""
        limit = view.limits.max_num_batched_tokens
        if not self.config.pace:
            return limit
        if not self._plans_left:
            self._pace, self._plans_left = self._ranked.pace(view), PLANS_A_PACE
        self._plans_left -= 1
        num_decodes = len(view.running) - len(view.prefilling)
        if num_decodes + self._pace >= limit:
            return limit
        tiles = round((num_decodes + self._pace) / TILE_TOKENS)
        return min(limit, max(tiles, math.ceil((num_decodes + LEAST_PROMPT_TOKENS) / TILE_TOKENS)) * TILE_TOKENS)


class _Ranked:
    """The waiting requests by rank, kept from plan to plan, for sorting a long queue at each step would take too long.

    A rank is the arrival times ageing, less what a request may still generate: it stays while the request waits.
    Requests that were preempted while generating come first, or later arrivals with more to generate would halt an
    answer. New requests join the queue at its ends; so if as many are kept as wait, they are the same.
    """

    def __init__(self, ageing_tokens_per_s: float) -> None:
        self._ageing_tokens_per_s = ageing_tokens_per_s
        self._heap: list[tuple[float, int, RequestView]] = []
        self._ids: set[int] = set()
        self._taken: list[RequestView] = []
        self._tokens: Counter[int] = Counter()
        """Prompt tokens of the kept requests that are not computed yet, in buckets by each request's tokens left to
        generate. For `pace`: reading a long queue would take longer than a step."""

    def keep(self, waiting: Sequence[RequestView]) -> bool:
        """Note the requests that wait now; returns whether any is new."""
        taken, self._taken = self._taken, []
        # Requests of a plan that was not carried out wait still.
        self._keep_new(request for request in taken if request.num_computed_tokens == 0)
        num_kept = len(self._heap)
        for end in (waiting, reversed(waiting)):
            self._keep_new(end)
        is_new = len(self._heap) > num_kept
        if len(self._heap) != len(waiting):
            self._ids = {request.id for request in waiting}
            self._heap = [self._ranked(request) for request in waiting]
            heapq.heapify(self._heap)
            self._tokens = Counter()
            _count(self._tokens, waiting)
        return is_new

    def take(self) -> Iterator[RequestView]:
        """Yield the waiting requests by rank; each is removed when the next is asked for."""
        while self._heap:
            yield self._heap[0][2]
            request = heapq.heappop(self._heap)[2]
            self._ids.remove(request.id)
            _count(self._tokens, [request], -1)
            self._taken.append(request)

    def pace(self, view: SchedulerView) -> float:
        """Prompt tokens in each step with which every answer can end when the longest does: all requests must have
        begun when as many steps are left as they have tokens to generate.
        """
        tokens = self._tokens.copy()
        _count(tokens, view.prefilling)
        steps_left, total, pace = max(map(_num_left, view.running), default=0), 0, 0.0
        for bucket in sorted((bucket for bucket, count in tokens.items() if count), reverse=True):
            total += tokens[bucket]
            longest = (bucket + 1) * BUCKET_TOKENS - 1
            steps_left = max(steps_left, longest)
            pace = max(pace, total / max(steps_left - longest, 1))
        return pace

    def _keep_new(self, requests: Iterable[RequestView]) -> None:
        """Add requests to the queue up to the first that is in it already."""
        for request in requests:
            if request.id in self._ids:
                return
            heapq.heappush(self._heap, self._ranked(request))
            self._ids.add(request.id)
            _count(self._tokens, [request])

    def _ranked(self, request: RequestView) -> tuple[float, int, RequestView]:
        if request.num_output_tokens:
            return -math.inf, request.id, request
        return self._ageing_tokens_per_s * request.arrival_s - _num_left(request), request.id, request


def _count(tokens: Counter[int], requests: Iterable[RequestView], times: int = 1) -> None:
    for request in requests:
        bucket = _num_left(request) // BUCKET_TOKENS
        tokens[bucket] += times * (request.num_tokens - request.num_computed_tokens)


def _num_left(request: RequestView) -> int:
    return request.max_tokens - request.num_output_tokens
