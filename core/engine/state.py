"""What the parts of one engine share: its executor, its requests, its cache, its clock, and what has finished.

Only an engine's own parts hold it; each of them decides what happens to its share.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hookline.core.contracts import StepStats
from hookline.core.engine.speculation import Speculation
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.budget import Ledger
from hookline.core.kv_cache.groups import CacheGroups
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.outputs import RequestOutput
from hookline.core.plugin.observers import Observers
from hookline.core.requests.admission import EngineLimits
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.structured_output import StructuredOutput
from hookline.core.step.executor import Executor
from hookline.core.step.timing import StepWatch


class EngineState:
    """One engine's executor, requests, cache, clock and observers.

    shares_prefixes: whether the kernels read the blocks that all decodes begin with once. structured_output: None
    refuses requests for structured outputs. speculation: None computes one token of each decode.
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
        structured_output: StructuredOutput | None,
        speculation: Speculation | None = None,
    ) -> None:
        self.executor, self.limits, self.shares_prefixes = executor, limits, shares_prefixes
        self.observers, self.structured_output, self.speculation = observers, structured_output, speculation
        self.queue = RequestQueue(limits.plan.max_num_seqs, limits.max_len)
        self.table = self.queue.table
        self.cache = KVCacheManager(pool, self.table, groups, limits.plan)
        self.now: Callable[[], float] = time.monotonic
        """Returns seconds; all times of the engine are on this clock."""
        self.sleep: Callable[[float], None] = time.sleep
        """Waits for a number of seconds."""
        self.watch = StepWatch(self.now)
        self.finished: list[RequestOutput] = []
        """Outputs of finished requests that `Engine.step` has not returned yet."""
        self.last_stats: StepStats | None = None
        """Of the step that was committed last."""

    def ledger(self) -> Ledger:
        """A fresh ledger of the cache's pool as it is now."""
        return Ledger(self.cache, self.queue)

    def pop_finished(self) -> list[RequestOutput]:
        """The outputs of requests that finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def note_stats(self, stats: StepStats) -> None:
        """Keep what a committed step did, and tell the observers."""
        self.last_stats = stats
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
