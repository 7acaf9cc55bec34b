"""The reference policy: waiting prompts first, decode when no prompt can go on.

First come, first served. A prompt larger than the token budget is computed in chunks. Out of blocks, the newest running
request is preempted and recomputed later from the head of the queue.
"""

from __future__ import annotations

from core.contracts import Plan, SchedulerView
from core.moves import plan_prompts_first
from plugins.schedulers import PrefillFirstConfig


class PrefillFirst:
    """Highest throughput for batch jobs: decode steps stay pure and as wide as max_num_seqs allows."""

    def __init__(self, config: PrefillFirstConfig) -> None:
        self.config = config

    def plan(self, view: SchedulerView) -> Plan:
        return plan_prompts_first(view, self.config.watermark)
