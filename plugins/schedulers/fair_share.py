"""Weighted service by a tag: the tenant that was served least for its weight is admitted next.

Each tenant has a counter of its service, divided by its weight; a waiting request of the tenant with the least counter
is admitted first. A tenant that was idle begins at the least counter of the waiting tenants, so idle time gives no
claim to service later (Virtual Token Counter: Sheng et al. 2024, arXiv:2401.00588).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hookline.core.contracts import CommittedStep, Plan, RequestView, SchedulerView
from hookline.core.scheduling import SIMPLY_DECODE, Arrivals, can_simply_decode, plan_prompts_first
from hookline.plugins.schedulers import FairShareConfig

MAX_IDLE_TENANTS = 4096
"""Most tenants without requests whose counters are kept because they are above the floor."""
MIN_IDLE_TENANTS = 64
"""Number of idle tenants below which none is forgotten."""
UNTAGGED = ""


@dataclass
class _Tenant:
    """A tenant. counter: service received, divided by its weight. num_live: its requests, waiting and running."""

    name: str
    weight: float
    counter: float = 0.0
    num_live: int = 0
    waiting: dict[int, RequestView] = field(default_factory=dict)
    """Waiting requests in order of arrival, including requests that an uncommitted step has admitted."""


class FairShare:
    """Tenants that have requests waiting are served in proportion to their weights, however many each one sends.

    Prompts go before decodes, and all machine time is used as long as any request waits. Two tenants that both wait
    differ, in service over weight, by no more than what the running requests of one of them can cost. If blocks run
    out, the newest request of the tenant furthest ahead is preempted; it goes on before any request that has not begun.
    Worst gap, whatever arrives: a running request gets its next token at most max_prompt_steps + 1 steps after its last
    one (17 by default), and of a prompt that was begun a chunk is computed in every second step at least. A waiting
    request is never overtaken by requests of its tenant, and by requests of another tenant only while that tenant has
    been served less for its weight.
    """

    def __init__(self, config: FairShareConfig) -> None:
        self.config = config
        self._arrivals = Arrivals()
        self._tenants: dict[str, _Tenant] = {}
        """Tenants with requests."""
        self._owners: dict[int, _Tenant] = {}
        """Tenant of each request that was seen and has not ended."""
        self._preempted: dict[int, RequestView] = {}
        self._floor = 0.0
        """The counter at which an idle tenant begins again: the least counter of the tenants that waited last. It never
        falls."""
        self._idle: dict[str, float] = {}
        """Counters of tenants without requests that are above the floor."""
        self._most_idle = MIN_IDLE_TENANTS

    def plan(self, view: SchedulerView) -> Plan:
        """Prompts first; waiting requests in the order of their tenants' counters."""
        for request in self._arrivals.new(view.waiting):
            self._add(request)
        if can_simply_decode(view):
            return SIMPLY_DECODE
        waiting, config = self._in_turn(view), self.config
        return plan_prompts_first(view, config.watermark, waiting, config.max_prompt_steps, self._counter_of)

    def committed(self, step: CommittedStep) -> None:
        """Charge each tenant for the service of its requests in a step."""
        self._arrivals.forget(step)
        self._charge(step)
        self._raise_floor()
        for one in step.prefilled:
            self._begin(one.request)
        for end in step.ended:
            self._end(end.request)
        if step.ended:
            self._forget_idle()

    def _tenant_of(self, request: RequestView) -> _Tenant:
        name = request.tags.get(self.config.key, UNTAGGED)
        tenant = self._tenants.get(name)
        if tenant is None:
            counter = self._idle.pop(name, self._floor)
            tenant = self._tenants[name] = _Tenant(name, self.config.weights.get(name, 1.0), counter)
        return tenant

    def _counter_of(self, request: RequestView) -> float:
        return self._owners[request.id].counter

    def _add(self, request: RequestView) -> None:
        """Note a request that began to wait."""
        if request.id in self._owners:
            self._preempted[request.id] = request
            return
        tenant = self._tenant_of(request)
        if not tenant.waiting:
            tenant.counter = max(tenant.counter, self._floor)
        tenant.num_live += 1
        tenant.waiting[request.id] = request
        self._owners[request.id] = tenant

    def _in_turn(self, view: SchedulerView) -> Iterator[RequestView]:
        """The waiting requests in order: preempted ones, then repeatedly the oldest request of the tenant with the
        least counter.

        For the rest of the plan, a yielded request counts as served, and so do those that the step in flight admitted.
        """
        yield from filter(_waits, list(self._preempted.values()))
        cost = self.config.prompt_token_cost
        queues = []
        for tenant in self._tenants.values():
            if tenant.waiting:
                counter = tenant.counter
                for request in tenant.waiting.values():
                    if _waits(request):
                        break
                    counter += cost * request.num_computed_tokens / tenant.weight
                queues.append((counter, tenant.name, filter(_waits, tenant.waiting.values())))
        heapq.heapify(queues)
        while queues:
            counter, name, requests = queues[0]
            following = next(requests, None)
            if following is None:
                heapq.heappop(queues)
                continue
            counter += cost * view.budget.num_uncomputed_tokens(following) / self._tenants[name].weight
            yield following
            heapq.heapreplace(queues, (counter, name, requests))

    def _charge(self, step: CommittedStep) -> None:
        """Count the service of a step."""
        config = self.config
        served: dict[str, float] = defaultdict(float)
        for one in step.prefilled:
            served[one.request.tags.get(config.key, UNTAGGED)] += config.prompt_token_cost * one.num_new_tokens
        names: Counter[str] = Counter()
        for request, num_tokens in step.generated():
            names[request.tags.get(config.key, UNTAGGED)] += num_tokens
        for name, count in names.items():
            served[name] += config.output_token_cost * count
        for name, cost in served.items():
            if name in self._tenants:
                self._tenants[name].counter += cost / self._tenants[name].weight

    def _begin(self, request: RequestView) -> None:
        """Note that a request was admitted, or continues its prompt."""
        self._preempted.pop(request.id, None)
        if request.id in self._owners:
            self._owners[request.id].waiting.pop(request.id, None)

    def _end(self, request: RequestView) -> None:
        """Note that a request has ended."""
        self._begin(request)
        tenant = self._owners.pop(request.id, None)
        if tenant is None:
            return
        tenant.num_live -= 1
        if not tenant.num_live:
            self._idle[tenant.name] = tenant.counter
            del self._tenants[tenant.name]

    def _raise_floor(self) -> None:
        """Raise the floor to the least counter of the tenants that wait, or waited until this step."""
        waiting = [tenant.counter for tenant in self._tenants.values() if tenant.waiting]
        self._floor = max(self._floor, min(waiting, default=0.0))

    def _forget_idle(self) -> None:
        """Forget idle tenants at or below the floor, and beyond MAX_IDLE_TENANTS those least above it."""
        if not self._owners:  # without any request, all tenants are equal again
            self._floor = max([self._floor, *self._idle.values()])
        elif len(self._idle) <= self._most_idle:
            return
        ahead = [(counter, name) for name, counter in self._idle.items() if counter > self._floor]
        self._idle = {name: counter for counter, name in heapq.nlargest(MAX_IDLE_TENANTS, ahead)}
        self._most_idle = max(MIN_IDLE_TENANTS, 2 * len(self._idle))


def _waits(request: RequestView) -> bool:
    return request.num_computed_tokens == 0
