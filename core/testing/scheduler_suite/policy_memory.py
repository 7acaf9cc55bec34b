"""For the conformance suite of scheduler policies: checks of a policy's notices, and of the size of its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from hookline.core.contracts import CommittedStep, Plan, Scheduler, SchedulerView, is_offered
from hookline.core.outputs import RequestOutput
from hookline.core.requests.request import RequestFacade


class Overheard:
    """A policy around another one: records every plan and every notice, and passes both on."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.plans: list[Plan] = []
        self.steps: list[CommittedStep] = []
        method = getattr(inner, "committed", None)
        self._committed = method if method is not None and is_offered(method) else None

    def plan(self, view: SchedulerView) -> Plan:
        """See Scheduler."""
        plan = self.inner.plan(view)
        self.plans.append(plan)
        return plan

    def committed(self, step: CommittedStep) -> None:
        """See RemembersSteps."""
        self.steps.append(step)
        if self._committed is not None:
            self._committed(step)

    def check(self, outputs: Collection[RequestOutput]) -> None:
        """Compare the notices with the plans and with the requests' outputs; all requests must have ended."""
        told = [step.plan for step in self.steps if step.plan is not None]
        assert len(told) == len(self.plans), f"{len(self.plans)} plans got {len(told)} notices"
        assert all(one is other for one, other in zip(told, self.plans, strict=True)), "notices are out of order"
        for step in self.steps:
            check_step(step)
        ended = [(end.request.id, end.reason) for step in self.steps for end in step.ended]
        wanted = [(output.request_id, output.finish_reason) for output in outputs]
        assert sorted(ended) == sorted(wanted), f"told of the ends {ended}, which were {wanted}"
        generated = self.generated()
        for output in outputs:
            got, kept = generated[output.request_id], len(output.token_ids)
            assert got == kept, f"request {output.request_id} was told {got} tokens and has {kept}"

    def generated(self) -> Counter[int]:
        """Generated tokens that notices reported, by request."""
        found: Counter[int] = Counter()
        for step in self.steps:
            for request, num_tokens in step.generated():
                found[request.id] += num_tokens
        return found


def check_step(step: CommittedStep) -> None:
    """Hold one notice against its plan."""
    did = [*step.prefilled, *step.decoded, *step.preempted]
    if not step.is_carried_out:
        assert not did, "a plan that was not carried out did something"
        return
    assert step.plan is not None, "nothing was planned and something was carried out"
    planned = {id_ for id_, _ in step.plan.prefill}
    assert {one.request.id for one in step.prefilled} <= planned, "a prompt was computed that was not planned"
    assert {request.id for request in step.preempted} == set(step.plan.preempt), "others were preempted than planned"
    assert len(step.decoded) <= step.num_decodes, "more requests keep a token than decoded"
    assert step.step_s >= 0 and step.num_context_tokens >= step.num_decodes, "a step's figures are wrong"


def footprint(policy: object) -> int:
    """How many things a policy holds, in its attributes and in their containers; requests count as one each."""
    seen: set[int] = set()
    todo, count = [policy], 0
    while todo:
        thing = todo.pop()
        count += 1
        if id(thing) in seen or isinstance(thing, (str, bytes, type, RequestFacade)) or callable(thing):
            continue
        seen.add(id(thing))
        todo += parts_of(thing)
    return count


def parts_of(thing: object) -> list[Any]:
    """The objects that an object directly contains."""
    if isinstance(thing, Mapping):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, Collection):
        return list(thing)
    slots = [name for owner in type(thing).__mro__ for name in getattr(owner, "__slots__", ())]
    return [*vars(thing).values()] if hasattr(thing, "__dict__") else [getattr(thing, name, None) for name in slots]
