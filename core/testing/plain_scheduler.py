"""The smallest correct policy, for testing engines and suites: prompts in order while they fit, then decode.

Once decodes are due they go first, so that arrivals that never end starve no running request.
Deliberately without a watermark, priorities and mixed steps.
"""

from __future__ import annotations

from hookline.core.contracts import ALL, Plan, SchedulerView
from hookline.core.scheduling import decodes_are_due


class PlainScheduler:
    """First come, first served; preempts the newest when a decode finds no block."""

    def plan(self, view: SchedulerView) -> Plan:
        """See Scheduler."""
        prefill = [] if decodes_are_due(view) else self.prompts(view)
        return Plan(prefill=prefill) if prefill else self.decode(view)

    def prompts(self, view: SchedulerView) -> list[tuple[int, int]]:
        """Chunks of running prompts, then of waiting ones, as far as tokens, seats and blocks last."""
        budget, left = view.budget, view.limits.max_num_batched_tokens
        seats = view.limits.max_num_seqs - len(view.running)
        prefill = []
        for request in [*(r for r in view.running if r.is_prefilling), *list(view.waiting)[:seats]]:
            count = min(left, budget.num_uncomputed_tokens(request))
            if not count or not budget.take(request, count):
                break
            prefill.append((request.id, count))
            left -= count
        return prefill

    def decode(self, view: SchedulerView) -> Plan:
        """Everybody decodes; the newest make room."""
        budget, running, preempt = view.budget, list(view.running), []
        while sum(budget.cost(r, 1) for r in running if not r.is_prefilling) > budget.num_free:
            budget.give_back(running[-1])
            preempt.append(running.pop().id)
        if not any(not r.is_prefilling for r in running) and len(running) > 1:
            preempt.append(
                running[-1].id
            )  # half-computed prompts hold all blocks: the newest makes room for the oldest
        return Plan(decode=ALL, preempt=preempt)
