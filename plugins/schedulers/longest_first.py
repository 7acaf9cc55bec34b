"""For batch jobs: who has most left to generate begins first, and prompt chunks go along with the decodes.

A decode step of few rows waits for the weights to come from memory; prompt tokens in the same step use that time. But a
long answer that begins late decodes alone in the end, so the longest begin first and all end at about the same time
(Graham 1969, doi:10.1137/0117039). Nor do prompts go faster than that takes: those of short answers are left for the
steps in which few decodes remain. Tokens in the same step: Sarathi-Serve, arXiv:2403.02310.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from core.contracts import Plan, RequestView, SchedulerView
from plugins.schedulers import LongestFirstConfig
from plugins.schedulers.moves import SIMPLY_DECODE, can_simply_decode, plan_mixed

PLANS_A_PACE = 8
"""Plans for which a pace holds if nobody arrives: to find it takes a look at everyone who runs."""
LEAST_PROMPT_TOKENS = 64
"""Room in a step with prompts: such steps have costs of their own, so there should not be many with hardly any."""
TILE_TOKENS = 128
"""A matrix product takes about as long for any number of tokens up to a multiple of it."""
BUCKET_TOKENS = 16
"""Prompts are counted together whose answers differ by less."""


_Counts = np.ndarray[Any, np.dtype[np.int64]]


class LongestFirst:
    """Shortest time until all are done; engine.max_num_batched_tokens bounds every step, and some hundred are best."""

    def __init__(self, config: LongestFirstConfig) -> None:
        self.config = config
        self._ranked = _Ranked(config.ageing_tokens_per_s)
        self._pace, self._plans_left, self._num_waiting = math.inf, 0, 0

    def plan(self, view: SchedulerView) -> Plan:
        if can_simply_decode(view):
            return SIMPLY_DECODE
        self._ranked.keep(view.waiting)
        return plan_mixed(view, self.config.watermark, self._ranked.take(), self._most_tokens(view))

    def _most_tokens(self, view: SchedulerView) -> int:
        """Decodes, and about as many prompt tokens as the pace asks for: whole tiles, now less and now more."""
        limit = view.limits.max_num_batched_tokens
        if not self.config.pace:
            return limit
        if not self._plans_left or len(view.waiting) > self._num_waiting:
            self._pace, self._plans_left = self._ranked.pace(view), PLANS_A_PACE
        self._plans_left, self._num_waiting = self._plans_left - 1, len(view.waiting)
        num_decodes = len(view.running) - len(view.prefilling)
        tiles = round(min(limit, num_decodes + self._pace) / TILE_TOKENS)
        return min(limit, max(tiles, math.ceil((num_decodes + LEAST_PROMPT_TOKENS) / TILE_TOKENS)) * TILE_TOKENS)


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
        self._prompts = _PromptTokens()

    def keep(self, waiting: Sequence[RequestView]) -> None:
        """Take note of who waits now."""
        taken, self._taken = self._taken, []
        # Those that were taken and still wait, since that plan was not carried out.
        self._keep_new(request for request in taken if request.num_computed_tokens == 0)
        for end in (waiting, reversed(waiting)):
            self._keep_new(end)
        if len(self._heap) != len(waiting):
            self._heap, self._ids, self._prompts = [], set(), _PromptTokens()
            self._keep_new(waiting)

    def take(self) -> Iterator[RequestView]:
        """The waiting requests, those of least rank first; one is dropped when the next is asked for."""
        while self._heap:
            yield self._heap[0][2]
            request = heapq.heappop(self._heap)[2]
            self._ids.remove(request.id)
            self._prompts.add(request, -1)
            self._taken.append(request)

    def pace(self, view: SchedulerView) -> float:
        """Prompt tokens a step with which every answer can still end by the time the longest does."""
        return self._prompts.pace(view.prefilling, max(map(_num_left, view.running), default=0))

    def _keep_new(self, requests: Iterable[RequestView]) -> None:
        """Keep requests up to the first that is kept already."""
        for request in requests:
            if request.id in self._ids:
                return
            rank = self._ageing_tokens_per_s * request.arrival_s - _num_left(request)
            heapq.heappush(self._heap, (rank, request.id, request))
            self._ids.add(request.id)
            self._prompts.add(request)


class _PromptTokens:
    """Tokens that waiting prompts have, by what may still be generated for them."""

    def __init__(self) -> None:
        self._tokens = np.zeros(0, dtype=np.int64)

    def add(self, request: RequestView, times: int = 1) -> None:
        """Count a request, or no longer count it."""
        self._tokens = _added(self._tokens, request, times)

    def pace(self, prefilling: Sequence[RequestView], horizon: int) -> float:
        """Tokens a step such that all have begun when there are as many steps left as they have tokens to generate.

        prefilling: requests whose prompts are not all computed. horizon: steps left at least.
        """
        tokens = self._tokens.copy()
        for request in prefilling:
            tokens = _added(tokens, request, 1)
        buckets = np.flatnonzero(tokens)[::-1]
        if not len(buckets):
            return 0.0
        left = buckets * BUCKET_TOKENS + BUCKET_TOKENS - 1
        steps_until = np.maximum(max(horizon, left[0]) - left, 1)
        return float((tokens[buckets].cumsum() / steps_until).max())


def _added(
    tokens: np.ndarray[Any, np.dtype[np.int64]], request: RequestView, times: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    bucket = _num_left(request) // BUCKET_TOKENS
    if bucket >= len(tokens):
        tokens = np.pad(tokens, (0, bucket + 1 - len(tokens)))
    tokens[bucket] += times * (request.num_tokens - request.num_computed_tokens)
    return tokens


def _num_left(request: RequestView) -> int:
    return request.max_tokens - request.num_output_tokens
