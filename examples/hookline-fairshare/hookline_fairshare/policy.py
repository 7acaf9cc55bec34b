"""Deficit round robin, paid afterwards: tenants have accounts of tokens, charged with each step that is carried out.

A round begins when nobody who waits has tokens left: all accounts get the quantum times their weight (Shreedhar and
Varghese 1996, doi:10.1109/90.502236). An account never saves up: who does not wait has at most nothing, and a debt,
from an answer that grew longer than the account, is paid from the next rounds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from hookline.core.contracts import CommittedStep, Plan, RequestView, SchedulerView
from hookline.core.scheduling import plan_prompts_first
from hookline_fairshare import DeficitRoundRobinConfig


class DeficitRoundRobin:
    """Tenants that wait are served in proportion to their weights, however many requests each one sends.

    Worst gap, whatever arrives: a running request gets its next token at most `MAX_PROMPT_STEPS` + 1 steps after its
    last one.
    """

    def __init__(self, config: DeficitRoundRobinConfig) -> None:
        self.config = config
        self.accounts: dict[str, float] = {}
        self.waiting: set[str] = set()
        """Tenants that waited when the last plan was made."""

    def plan(self, view: SchedulerView) -> Plan:
        queues: dict[str, deque[RequestView]] = {}
        for request in view.waiting:
            queues.setdefault(self.tenant(request), deque()).append(request)
        self.waiting = set(queues)
        return plan_prompts_first(view, self.config.watermark, self.in_turn(view, queues))

    def committed(self, step: CommittedStep) -> None:
        served: Counter[str] = Counter()
        for one in step.prefilled:
            served[self.tenant(one.request)] += one.num_new_tokens
        for request, num_tokens in step.generated():
            served[self.tenant(request)] += num_tokens
        for tenant, num_tokens in served.items():
            self.accounts[tenant] = self.accounts.get(tenant, 0.0) - num_tokens
        for tenant in self.waiting:
            self.accounts.setdefault(tenant, 0.0)
        while self.waiting and all(self.accounts[tenant] <= 0 for tenant in self.waiting):
            for tenant in self.accounts:
                self.accounts[tenant] += self.config.quantum * self.config.weights.get(tenant, 1.0)
        self.accounts = {
            tenant: account for tenant, account in self.accounts.items() if account < 0 or tenant in self.waiting
        }

    def tenant(self, request: RequestView) -> str:
        return request.tags.get(self.config.key, "")

    def in_turn(self, view: SchedulerView, queues: dict[str, deque[RequestView]]) -> Iterator[RequestView]:
        """Answers that were preempted, then each time the oldest request of the tenant with most in its account.

        A plan may come to nothing, so it charges a copy; what was served is charged when it is committed.
        """
        for queue in queues.values():
            while queue and queue[0].num_output_tokens:
                yield queue.popleft()
        accounts = dict(self.accounts)
        while queues := {tenant: queue for tenant, queue in queues.items() if queue}:
            tenant = max(queues, key=lambda name: accounts.get(name, 0.0))
            request = queues[tenant].popleft()
            cost = view.budget.num_uncomputed_tokens(request)
            yield request
            accounts[tenant] = accounts.get(tenant, 0.0) - cost
