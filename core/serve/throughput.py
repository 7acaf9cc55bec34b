"""Counts tokens a second over the last few seconds of steps, and logs a line about them now and then."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from hookline.core.contracts import hookimpl

if TYPE_CHECKING:
    from hookline.core.contracts import StepStats

WINDOW_S = 5.0
"""Seconds over which the rates are averaged."""
LINE_S = 10.0
"""Seconds between two lines of the log, while there are steps."""
_log = logging.getLogger("hookline.throughput")


class Throughput:
    """Counts computed prompt tokens and generated tokens, and decides when to report them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stats: StepStats | None = None
        self._num_prompt = self._num_generated = 0
        self._marks: deque[tuple[float, int, int]] = deque([(clock(), 0, 0)])
        self._reported_s = clock()
        self._line_s = self._step_s = clock()
        self._line_counts = (0, 0)
        self._num_looked_up = self._num_cached = 0
        self._was_busy = self._had_work = False

    @hookimpl
    def on_step_end(self, stats: StepStats) -> None:
        """See the hook of this name: counts the steps of every engine of a plugin host that it is registered with."""
        self.count(stats)

    def count(self, stats: StepStats | None) -> None:
        """Count a step, and no step twice."""
        if stats is None or stats is self._stats:
            return
        self._stats = stats
        self._num_prompt += stats.num_prefill_tokens
        self._num_generated += stats.num_generated_tokens
        self._num_looked_up += stats.num_prompt_tokens
        self._num_cached += stats.num_cached_tokens
        self._tell(stats)

    def _tell(self, stats: StepStats) -> None:
        """Log a line if LINE_S have passed; the time before the first step after a pause does not count."""
        now_s = self._clock()
        if now_s - self._step_s > LINE_S:
            self._begin_line(now_s)
        self._step_s = now_s
        seconds = now_s - self._line_s
        if seconds < LINE_S:
            return
        num_prompt, num_generated = self._line_counts
        prompt_s = (self._num_prompt - num_prompt) / seconds
        generated_s = (self._num_generated - num_generated) / seconds
        used = 1 - stats.num_free_blocks / max(stats.num_blocks, 1)
        hits = self._num_cached / max(self._num_looked_up, 1)
        fields = {"running": stats.num_running, "waiting": stats.num_waiting, "prompt_tokens_s": round(prompt_s, 1)}
        fields |= {"tokens_s": round(generated_s, 1), "kv_cache_usage": round(used, 4), "prefix_hits": round(hits, 4)}
        _log.info(
            "%d running, %d waiting; %.1f prompt tokens/s, %.1f tokens/s; "
            "KV cache %.1f %% full, %.1f %% of prompts cached",
            stats.num_running, stats.num_waiting, prompt_s, generated_s, 100 * used, 100 * hits,
            extra={"fields": fields},
        )  # fmt: skip
        self._begin_line(now_s)

    def _begin_line(self, now_s: float) -> None:
        self._line_s, self._line_counts = now_s, (self._num_prompt, self._num_generated)
        self._num_looked_up = self._num_cached = 0

    def is_due(self, every_s: float, *, has_work: bool) -> bool:
        """Whether a report is due: while there is work, once it has ended, and until the rates are 0."""
        now_s, had_work = self._clock(), self._had_work
        self._had_work = has_work
        is_over = had_work and not has_work
        if not is_over and (now_s - self._reported_s < every_s or not (has_work or self._was_busy)):
            return False
        self._reported_s, self._was_busy = now_s, has_work or any(self.rates())
        return True

    def rates(self) -> tuple[float, float]:
        """Prompt tokens and generated tokens a second, over the last WINDOW_S seconds."""
        now_s = self._clock()
        self._marks.append((now_s, self._num_prompt, self._num_generated))
        while len(self._marks) > 2 and self._marks[1][0] <= now_s - WINDOW_S:
            self._marks.popleft()
        since_s, num_prompt, num_generated = self._marks[0]
        seconds = max(now_s - since_s, 1e-3)
        return (self._num_prompt - num_prompt) / seconds, (self._num_generated - num_generated) / seconds
