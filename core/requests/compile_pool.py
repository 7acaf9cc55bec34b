"""A few threads that compile grammars beside the step loop, each compile with a time limit.

A compile that takes too long is given up at once, but its thread is lost until it returns: Python cannot end a thread,
so compilers have to bound their own time. A compile that computes little, because other processes keep the processors
busy or a child process compiles for it, may take PATIENCE times as long.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

BUSY = 0.5
"""A compile takes too long if, at its time limit, its thread has computed for more than this part of it."""
PATIENCE = 10


class CompileJob:
    """The compile of a grammar; it is done once `result` or `error` is set."""

    def __init__(self, work: Callable[[CompileJob], Any]) -> None:
        self._work = work
        self.queue()
        self.started_s: float | None = None
        """When the time limit began to run; the work itself sets it by `start_clock`."""
        self._clock: int | None = None
        """The clock of its thread's processor time, where the system has one."""
        self._computed_s = 0.0
        """The clock's time in seconds at started_s."""
        self.is_begun = self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def queue(self) -> None:
        """Note that requests wait for it from now on."""
        self.queued_s = time.monotonic()

    def begin(self) -> None:
        """Note that a thread has taken it."""
        self.is_begun = True

    def start_clock(self) -> None:
        """Let the time limit run from now on."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._computed_s = time.clock_gettime(self._clock)
        self.started_s = time.monotonic()

    def run(self) -> None:
        """Do the work, and set `result` or `error`."""
        try:
            self.result = self._work(self)
        except BaseException as error:  # of whatever kind: its thread has others to compile
            self.error = error
        finally:
            self.is_done = True

    def overran(self, limit_s: float) -> bool:
        """Whether it has taken longer than allowed."""
        if self.is_done or self.started_s is None or (taken_s := time.monotonic() - self.started_s) <= limit_s:
            return False
        if self._clock is None or taken_s > PATIENCE * limit_s:
            return True
        return time.clock_gettime(self._clock) - self._computed_s > BUSY * limit_s


class CompilePool:
    """At most `num_threads` daemon threads, started when there is work for them.

    Tenants take turns, and no tenant ever has all threads, so that the work of other tenants need not wait for its long
    compiles.
    """

    def __init__(self, num_threads: int, limit_s: float) -> None:
        self.num_threads, self.limit_s = num_threads, limit_s
        self.something_is_done = threading.Event()
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, deque[CompileJob]] = OrderedDict()
        """Work that waits, of each tenant; the tenant whose turn is next comes first."""
        self._threads: list[threading.Thread] = []
        self._running: dict[threading.Thread, tuple[str, CompileJob]] = {}
        self._is_closed = False

    @property
    def num_queued(self) -> int:
        """Jobs that no thread has begun; a job that several tenants wait for counts once for each of them."""
        return sum(map(len, self._queues.values()))

    def submit(self, work: Callable[[CompileJob], Any], tenant: str) -> CompileJob:
        """Queue some work, which is called with its job, and calls `start_clock` when its time limit begins to run."""
        job = CompileJob(work)
        self.share(job, tenant)
        if len(self._threads) < self.num_threads:
            thread = threading.Thread(target=self._serve, name="hookline-compiling", daemon=True)
            self._threads.append(thread)
            thread.start()
        return job

    def share(self, job: CompileJob, tenant: str) -> None:
        """Put a job into this tenant's queue, too: it runs once, at the first turn of any of its tenants."""
        with self._changed:
            queue = self._queues.setdefault(tenant, deque())
            if not job.is_begun and job not in queue:
                queue.append(job)
                self._changed.notify()

    def is_given_up(self, job: CompileJob) -> bool:
        """Whether a job took too long, or waited too long for a thread."""
        if job.is_done or job.started_s is not None:
            return job.overran(self.limit_s)
        held_up = sum(other.overran(self.limit_s) for _, other in list(self._running.values()))
        waited_s = time.monotonic() - job.queued_s
        return waited_s > (self.limit_s if held_up >= self._most_of_one_tenant else PATIENCE * self.limit_s)

    def close(self) -> None:
        """Let each thread end after its current job."""
        with self._changed:
            self._is_closed = True
            self._queues.clear()
            self._changed.notify_all()
        self._threads.clear()

    @property
    def _most_of_one_tenant(self) -> int:
        return max(1, self.num_threads - 1)

    def _serve(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                while (turn := self._next()) is None and not self._is_closed:
                    self._changed.wait()
                if turn is None:
                    return
                self._running[thread] = turn
            turn[1].run()
            with self._changed:
                del self._running[thread]
                self._changed.notify_all()
            self.something_is_done.set()

    def _next(self) -> tuple[str, CompileJob] | None:
        """The next job to run, and its tenant, which moves behind all others; None if no job may run now."""
        busy = Counter(tenant for tenant, _ in self._running.values())
        for tenant, queue in list(self._queues.items()):
            while queue and queue[0].is_begun:  # in the turn of another tenant
                queue.popleft()
            if not queue:
                del self._queues[tenant]
            elif busy[tenant] < self._most_of_one_tenant:
                job = queue.popleft()
                job.begin()
                self._queues.move_to_end(tenant)
                return tenant, job
        return None
