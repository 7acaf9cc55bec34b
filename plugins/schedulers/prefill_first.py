"""The reference policy: waiting prompts first, decode when no prompt can go on.

First come, first served. A prompt larger than the token budget is computed in chunks. Out of blocks, the newest running
request is preempted and recomputed later from the head of the queue.
"""

from __future__ import annotations

from core.contracts import Plan, SchedulerView
from core.moves import (
    SIMPLY_DECODE,
    PlanDraft,
    admit_waiting,
    can_simply_decode,
    continue_prompts,
    decode_running,
)
from plugins.schedulers import PrefillFirstConfig


class PrefillFirst:
    """Highest throughput for batch jobs: decode steps stay pure and as wide as max_num_seqs allows."""

    def __init__(self, config: PrefillFirstConfig) -> None:
        self.config = config

    def plan(self, view: SchedulerView) -> Plan:
        if can_simply_decode(view):
            return SIMPLY_DECODE
        draft = PlanDraft(view, self.config.watermark)
        continue_prompts(draft)
        if not draft.preempt:
            admit_waiting(draft)
        if not draft.prefill:
            decode_running(draft)
        return draft.plan()
