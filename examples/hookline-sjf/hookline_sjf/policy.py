"""Shortest job first, over a read-only view: whom to admit next; the rest are Hookline's moves.

A job's rank is its size plus ageing times its arrival. Two waiting jobs shrink at the same rate, so their order never
changes, and a plan depends on the view alone.
"""

from __future__ import annotations

from core.contracts import Plan, RequestView, SchedulerView
from core.moves import SIMPLY_DECODE, PlanDraft, admit_waiting, can_simply_decode, continue_prompts, decode_running
from hookline_sjf import ShortestJobFirstConfig


class ShortestJobFirst:
    """Smallest mean time to an answer; a long job waits for at most its extra tokens / ageing_tokens_per_s."""

    def __init__(self, config: ShortestJobFirstConfig) -> None:
        self.config = config

    def plan(self, view: SchedulerView) -> Plan:
        if can_simply_decode(view):
            return SIMPLY_DECODE
        draft = PlanDraft(view, self.config.watermark)
        continue_prompts(draft)
        if not draft.preempt and draft.seats_left:  # up to the first that does not fit: none slips past it for ever
            admit_waiting(draft, sorted(view.waiting, key=self.rank))
        if not draft.prefill:
            decode_running(draft)
        return draft.plan()

    def rank(self, request: RequestView) -> tuple[float, int]:
        size = request.num_prompt_tokens + request.max_tokens
        return size + self.config.ageing_tokens_per_s * request.arrival_s, request.id
