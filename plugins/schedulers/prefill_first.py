"""The reference policy: waiting prompts first; decodes beside them where that pays, and when prompts cannot go on.

First come, first served. A prompt larger than the token budget is computed in chunks. Out of blocks, the newest running
request is preempted and recomputed later from the head of the queue.
"""

from __future__ import annotations

from hookline.core.contracts import Plan, SchedulerView
from hookline.core.scheduling import plan_prompts_first
from hookline.plugins.schedulers import PrefillFirstConfig


class PrefillFirst:
    """Highest throughput for batch jobs: decode steps are as wide as max_num_seqs allows.

    They are pure, but where a step with prompts and decodes takes less time than one of each, decodes join the prompts.
    Worst gap, whatever arrives: a running request gets its next token at most max_prompt_steps + 1 steps after its last
    one (17 by default), and of a prompt that was begun a chunk is computed in every second step at least. A preempted
    request waits only for requests that were admitted before it.
    """

    def __init__(self, config: PrefillFirstConfig) -> None:
        self.config = config

    def plan(self, view: SchedulerView) -> Plan:
        """See hookline.core.scheduling.plan_prompts_first."""
        return plan_prompts_first(view, self.config.watermark, max_prompt_steps=self.config.max_prompt_steps)
