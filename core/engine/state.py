"""State that the parts of an engine share: executor, requests and their time limits, KV cache, clock, finished outputs.

Only an engine's own parts (planner, dispatcher, committer, finisher) hold it, and each changes its own share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sized
from heapq import heapify, heappop, heappush
from typing import Protocol

from hookline.core.contracts import StepStats
from hookline.core.engine.hidden_states import HiddenStates
from hookline.core.engine.plan_check import Ledger
from hookline.core.engine.step_builder import Decoding
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.groups import CacheGroups
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.outputs import RequestOutput
from hookline.core.plugin.observers import Observers
from hookline.core.requests.admission import EngineLimits
from hookline.core.requests.late_input import LateInput
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.step.executor import Executor
from hookline.core.step.timing import StepWatch

MIN_DROPPED = 64
"""Finished requests' limits are dropped once the heap has this many more than two limits per live request."""


class _Live(Container[int], Sized, Protocol):
    """The ids of the requests that have not finished."""


class TimeLimits:
    """The time limits of requests, in a heap, so that each step looks at the next limit to pass alone.

    As a truth value: whether there is any.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, float]] = []
        """(when, request, its timeout_s)."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, arrival_s: float, id_: int, timeout_s: float, live: _Live) -> None:
        """Add a request's limit; limits of requests that are not live any more may be dropped."""
        if len(self._heap) > MIN_DROPPED + 2 * len(live):
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapify(self._heap)
        heappush(self._heap, (arrival_s + timeout_s, id_, timeout_s))

    def passed(self, now_s: float) -> list[tuple[int, float]]:
        """Ids of requests whose limits passed since the last call, with their timeout_s; some may have finished."""
        overdue = []
        while self._heap and self._heap[0][0] <= now_s:
            _, id_, timeout_s = heappop(self._heap)
            overdue.append((id_, timeout_s))
        return overdue


class EngineState:
    """An engine's executor, requests, cache, clock and observers.

    shares_prefixes: whether the kernels read the blocks of a prefix that decodes share only once. late: None refuses
    requests whose draws wait for a late input. decoding: which tokens decodes compute.
    """

    def __init__(
        self,
        executor: Executor,
        pool: BlockPool,
        limits: EngineLimits,
        groups: CacheGroups,
        *,
        shares_prefixes: bool,
        observers: Observers,
        late: LateInput | None,
        decoding: Decoding,
    ) -> None:
        self.executor, self.limits, self.shares_prefixes = executor, limits, shares_prefixes
        self.observers, self.late, self.decoding = observers, late, decoding
        self.queue = RequestQueue(limits.plan.max_num_seqs, limits.max_len)
        self.table = self.queue.table
        self.hidden_states = HiddenStates(limits, observers, decoding)
        self.cache = KVCacheManager(pool, self.table, groups, limits.plan, decoding.max_tokens)
        decoding.join(self.queue, self.cache)
        self.now: Callable[[], float] = time.monotonic
        """Returns seconds; all times of the engine are on this clock."""
        self.sleep: Callable[[float], None] = time.sleep
        """Waits for a number of seconds."""
        self.watch = StepWatch(self.now)
        self.finished: list[RequestOutput] = []
        """Outputs of finished requests that `Engine.step` has not returned yet."""
        self._unannounced: list[RequestOutput] = []
        """Outputs that observers have not been told of yet."""
        self.time_limits = TimeLimits()
        self._tells_steps = observers.hears("on_step_end")
        self.last_stats: StepStats | None = None
        """Of the step that was committed last."""

    def ledger(self) -> Ledger:
        """A fresh ledger of the cache's pool as it is now."""
        return Ledger(self.cache, self.queue)

    def pop_finished(self) -> list[RequestOutput]:
        """The outputs of requests that finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def note_finished(self, output: RequestOutput) -> None:
        """Keep the output of a request that has finished."""
        self.finished.append(output)
        self._unannounced.append(output)

    def announce(self) -> None:
        """Tell observers of the requests that have finished since the last call."""
        if self._unannounced:
            outputs, self._unannounced = self._unannounced, []
            for output in outputs:
                self.observers.notify("on_request_end", output=output)

    def note_stats(self, stats: StepStats) -> None:
        """Keep a committed step's statistics, and tell the observers."""
        self.last_stats = stats
        if self._tells_steps:
            self.observers.notify("on_step_end", stats=stats)

    def use_executor(self, executor: Executor) -> None:
        """Have another executor compute the steps from the next one on."""
        self.executor = executor

    def use_clock(self, now: Callable[[], float]) -> None:
        """Read all times from another clock."""
        self.now = now
        self.watch.use_clock(now)

    def use_sleep(self, sleep: Callable[[float], None]) -> None:
        """Wait by calling another function."""
        self.sleep = sleep
