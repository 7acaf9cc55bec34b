"""Shortest job first, over a read-only view: whom to admit next; the rest is a move of Hookline's.

A job's rank is its size plus ageing times its arrival. Two waiting jobs shrink at the same rate, so their order never
changes, and a plan depends on the view alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hookline.core.contracts import Plan, RequestView, SchedulerView
from hookline.core.scheduling import plan_prompts_first
from hookline_sjf import ShortestJobFirstConfig


class ShortestJobFirst:
    """Smallest mean time to an answer; a long job is overtaken for at most its extra tokens / ageing_tokens_per_s.

    Worst gap, whatever arrives: a running request gets its next token at most `MAX_PROMPT_STEPS` + 1 steps after its
    last one.
    """

    def __init__(self, config: ShortestJobFirstConfig) -> None:
        self.config = config

    def plan(self, view: SchedulerView) -> Plan:
        return plan_prompts_first(view, self.config.watermark, self.ranked(view.waiting))

    def ranked(self, waiting: Iterable[RequestView]) -> Iterator[RequestView]:
        """Admitted up to the first that does not fit: a smaller job must not slip past it for ever.

        A generator, so that a long queue is sorted only when somebody may be admitted.
        """
        yield from sorted(waiting, key=self.rank)

    def rank(self, request: RequestView) -> tuple[float, int]:
        size = request.num_prompt_tokens + request.max_tokens
        return size + self.config.ageing_tokens_per_s * request.arrival_s, request.id
