"""A few threads that compile grammars beside the step loop, each compile with a time limit.

A compile that takes too long is given up at once, though its thread is lost until it returns: Python cannot end a
thread, so what runs here has to bound its own time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class CompileJob:
    """One compile; it is done once `result` or `error` is set."""

    def __init__(self, work: Callable[[CompileJob], Any]) -> None:
        self._work = work
        self.queued_s = time.monotonic()
        self.started_s: float | None = None
        """When the part that is held to the time limit began; the work itself sets it."""
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def start_clock(self) -> None:
        """Let the time limit run from now on."""
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
        return not self.is_done and self.started_s is not None and time.monotonic() - self.started_s > limit_s


class CompilePool:
    """At most `num_threads` daemon threads, started when there is work for them."""

    def __init__(self, num_threads: int, limit_s: float) -> None:
        self.num_threads, self.limit_s = num_threads, limit_s
        self.something_is_done = threading.Event()
        self._queue: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: dict[threading.Thread, CompileJob] = {}

    def submit(self, work: Callable[[CompileJob], Any]) -> CompileJob:
        """Queue some work, which is called with its job, and calls `start_clock` when its time limit begins to run."""
        job = CompileJob(work)
        self._queue.put(job)
        if len(self._threads) < self.num_threads:
            thread = threading.Thread(target=self._serve, name="hookline-grammars", daemon=True)
            self._threads.append(thread)
            thread.start()
        return job

    def is_given_up(self, job: CompileJob) -> bool:
        """Whether a job took too long, or cannot begin because all threads are held up by jobs that did."""
        if job.is_done or job.started_s is not None:
            return job.overran(self.limit_s)
        held_up = sum(other.overran(self.limit_s) for other in list(self._running.values()))
        return held_up >= self.num_threads and time.monotonic() - job.queued_s > self.limit_s

    def close(self) -> None:
        """Let each thread end after the job that it is at."""
        for _ in self._threads:
            self._queue.put(None)
        self._threads.clear()

    def _serve(self) -> None:
        thread = threading.current_thread()
        while (job := self._queue.get()) is not None:
            self._running[thread] = job
            job.run()
            del self._running[thread]
            self.something_is_done.set()
