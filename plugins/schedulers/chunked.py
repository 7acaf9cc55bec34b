"""Mixed steps: every running request decodes, and prompt chunks fill the rest of the step's token budget.

No prompt ever stops the decodes, so the time between a request's tokens stays even (Sarathi-Serve, arXiv:2403.02310).
"""

from __future__ import annotations

from hookline.core.contracts import Plan, SchedulerView
from hookline.core.scheduling import plan_mixed
from hookline.plugins.schedulers import ChunkedConfig


class Chunked:
    """Even inter-token latency under load: engine.max_num_batched_tokens bounds every step.

    Worst gap, whatever arrives: every step generates a token of each running request, or computes at least one token of
    its prompt. A preempted request waits only for requests that were admitted before it.
    """

    def __init__(self, config: ChunkedConfig) -> None:
        self.config = config

    def plan(self, view: SchedulerView) -> Plan:
        """See hookline.core.scheduling.plan_mixed."""
        return plan_mixed(view, self.config.watermark)
