"""Policies with one planted fault each, and what the conformance suite must say."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from hookline.core.contracts import ALL, CommittedStep, Plan, RequestView, SchedulerView
from hookline.core.testing.plain_scheduler import PlainScheduler


class ExceedsTheTokenBudget(PlainScheduler):
    def plan(self, view: SchedulerView) -> Plan:
        wide = replace(view.limits, max_num_batched_tokens=view.limits.max_num_batched_tokens * 2)
        return super().plan(replace(view, limits=wide))


class IgnoresMaxNumSeqs(PlainScheduler):
    def plan(self, view: SchedulerView) -> Plan:
        return super().plan(replace(view, limits=replace(view.limits, max_num_seqs=10**6)))


class IgnoresTheBlockBudget(PlainScheduler):
    def decode(self, view: SchedulerView) -> Plan:
        return Plan(decode=ALL)


class CountsABlockForEachRequest(PlainScheduler):
    """As if a decode took at most one block, which holds where all layers keep every token."""

    def decode(self, view: SchedulerView) -> Plan:
        return Plan(decode=ALL) if view.budget.num_free >= len(view.running) else super().decode(view)


class LosesARequest(PlainScheduler):
    """Never looks at the last waiting request."""

    def prompts(self, view: SchedulerView) -> list[tuple[int, int]]:
        return super().prompts(replace(view, waiting=list(view.waiting)[:-1]))


class NewestFirst(PlainScheduler):
    """Serves the newest waiting request first and preempts the oldest: a stream of arrivals starves the old."""

    def prompts(self, view: SchedulerView) -> list[tuple[int, int]]:
        return super().prompts(replace(view, waiting=list(view.waiting)[::-1][:1]))

    def decode(self, view: SchedulerView) -> Plan:
        if len(view.running) == view.limits.max_num_seqs and view.waiting:
            return Plan(preempt=[view.running[0].id])
        return super().decode(view)


class PromptsAsLongAsAnyWait(PlainScheduler):
    """Decodes only when no prompt can go on, so arrivals that never end starve whoever has begun."""

    def plan(self, view: SchedulerView) -> Plan:
        return super().plan(replace(view, num_steps_without_decode=0))


class DecodesTheOldestOnly(PlainScheduler):
    """Decodes in time, but not for everybody."""

    def decode(self, view: SchedulerView) -> Plan:
        plan = super().decode(view)
        able = [r.id for r in view.running if not r.is_prefilling and r.id not in plan.preempt]
        return replace(plan, decode=able[:1])


class HaltsAPromptWhileOthersDecode(PlainScheduler):
    """Never goes on with a prompt while anybody decodes."""

    def plan(self, view: SchedulerView) -> Plan:
        return self.decode(view) if len(view.running) > len(view.prefilling) else super().plan(view)


class Ordered(PlainScheduler):
    """Admits the waiting requests of least `rank` first, without ageing."""

    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        """What the waiting requests are sorted by."""
        raise NotImplementedError

    def prompts(self, view: SchedulerView) -> list[tuple[int, int]]:
        return super().prompts(replace(view, waiting=sorted(view.waiting, key=partial(self.rank, view))))


class ShortestAnswerFirst(Ordered):
    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return request.max_tokens - request.num_output_tokens


class ShortestAnswerPreempts(ShortestAnswerFirst):
    """The same among running requests: with all seats taken, the longest one makes room for a shorter one."""

    def plan(self, view: SchedulerView) -> Plan:
        rank = partial(self.rank, view)
        if view.waiting and len(view.running) == view.limits.max_num_seqs:
            longest = max(view.running, key=rank)
            if min(map(rank, view.waiting)) < rank(longest):
                return Plan(preempt=[longest.id])
        return super().plan(view)


class LongestAnswerFirst(Ordered):
    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return request.num_output_tokens - request.max_tokens


class LongestPromptFirst(Ordered):
    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return -request.num_prompt_tokens


class LatestFirst(Ordered):
    """As NewestFirst, and preempts nobody for it."""

    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return -request.id


class StrictPriorities(Ordered):
    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return request.priority


class StrictDeadlines(Ordered):
    """Earliest deadline first, and whoever has none last."""

    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return math.inf if request.deadline_s is None else request.deadline_s


class LongestCachedPrefixFirst(Ordered):
    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return -view.budget.num_cached_tokens(request)


class LongPromptsLast(Ordered):
    """Never preempts for a prompt, and admits those longer than a step only when no other waits."""

    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return request.num_prompt_tokens > view.limits.max_num_batched_tokens


class OneTenantFirst(Ordered):
    """Serves those with a tenant only when nobody without one waits."""

    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return "tenant" in request.tags


class TaggedFirst(Ordered):
    """Serves those without a tenant only when nobody with one waits."""

    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return "tenant" not in request.tags


class PreemptedLast(Ordered):
    """Whoever was preempted while generating goes on only when nobody else waits."""

    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return request.num_output_tokens > 0


class FillsHoles(Ordered):
    """Passes over a prompt without enough free blocks and admits smaller ones: it never sees that many free."""

    def rank(self, view: SchedulerView, request: RequestView) -> Any:
        return view.budget.cost(request, request.num_tokens) > view.budget.num_free


class HaltsTheOldestForBlocks(PlainScheduler):
    """While fewer than half of the blocks are free, the oldest request decodes only if no other can."""

    def decode(self, view: SchedulerView) -> Plan:
        is_short = 2 * view.budget.num_free < view.limits.num_blocks
        plan = super().decode(view)
        others = [r.id for r in list(view.running)[1:] if not r.is_prefilling and r.id not in plan.preempt]
        return replace(plan, decode=others) if is_short and others else plan


class NeverPreempts(PlainScheduler):
    def decode(self, view: SchedulerView) -> Plan:
        return replace(super().decode(view), preempt=())


class ForgetsChunks(PlainScheduler):
    """Computes prompts whole or not at all."""

    def prompts(self, view: SchedulerView) -> list[tuple[int, int]]:
        whole = [r for r in view.waiting if r.num_prompt_tokens <= view.limits.max_num_batched_tokens]
        return super().prompts(replace(view, waiting=whole))


class CountsItsCalls(PlainScheduler):
    """Decides by its own history, so the same view gives two plans."""

    def __init__(self) -> None:
        self.calls = 0

    def plan(self, view: SchedulerView) -> Plan:
        self.calls += 1
        return super().plan(view) if self.calls % 2 else Plan(idle_s=1e-6)


class ChangesARequest(PlainScheduler):
    def plan(self, view: SchedulerView) -> Plan:
        for request in view.waiting:
            request._request.priority += 1  # type: ignore[attr-defined]
        return super().plan(view)


class PreemptsInCircles(PromptsAsLongAsAnyWait):
    """Sends the newest running request back whenever two run, so that it never gets anywhere beside another."""

    def decode(self, view: SchedulerView) -> Plan:
        if len(view.running) > 1:
            return Plan(preempt=[view.running[-1].id])
        return super().decode(view)


class PlansARequestTwice(PlainScheduler):
    def prompts(self, view: SchedulerView) -> list[tuple[int, int]]:
        prefill = super().prompts(view)
        return [*prefill, *prefill[:1]]


class DecodesHalfAPrompt(PlainScheduler):
    """Decodes requests whose prompts are not computed yet."""

    def plan(self, view: SchedulerView) -> Plan:
        plan = super().plan(view)
        return replace(plan, prefill=(), decode=[r.id for r in view.running]) if len(view.running) > 1 else plan


class ComputesNothing(PlainScheduler):
    """Admits requests without computing a token of theirs."""

    def prompts(self, view: SchedulerView) -> list[tuple[int, int]]:
        return [(request_id, 0) for request_id, _ in super().prompts(view)]


class NamesStrangers(PlainScheduler):
    def decode(self, view: SchedulerView) -> Plan:
        return Plan(decode=[request.id + 1 for request in view.running])


class RemembersEverybody(PlainScheduler):
    """Keeps something of each request for ever."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def committed(self, step: CommittedStep) -> None:
        self.ended += [end.request.id for end in step.ended]


class LosesTrack(PlainScheduler):
    """Trusts that whoever ends was computed before."""

    def __init__(self) -> None:
        self.begun: set[int] = set()

    def committed(self, step: CommittedStep) -> None:
        self.begun.update(one.request.id for one in step.prefilled)
        for end in step.ended:
            self.begun.remove(end.request.id)


class MisspellsCommitted(PlainScheduler):
    def commited(self, step: CommittedStep) -> None:
        """Never called."""


FAULTS = {
    MisspellsCommitted: "test_has_the_methods_of_its_contract: "
    "its commited is not in the contract. Did you mean 'committed'?",
    RemembersEverybody: "test_its_memory_does_not_grow_with_the_requests_that_ended: "
    "things after 100, 200 and 300 requests",
    LosesTrack: "test_a_policy_with_a_memory_is_told_what_became_of_each_plan: fails in committed: KeyError",
    PreemptsInCircles: "test_nobody_starves_while_others_keep_arriving: starves: not done after",
    PlansARequestTwice: "test_a_long_queue_is_planned_within_the_limits: names request 0 twice",
    DecodesHalfAPrompt: "test_a_policy_with_a_memory_is_told_what_became_of_each_plan: which is still prefilling",
    ComputesNothing: "test_a_long_queue_is_planned_within_the_limits: at least 1 is needed",
    ExceedsTheTokenBudget: "test_a_long_queue_is_planned_within_the_limits: more than max_num_batched_tokens",
    IgnoresMaxNumSeqs: "test_a_policy_with_a_memory_is_told_what_became_of_each_plan: more than max_num_seqs",
    IgnoresTheBlockBudget: "test_a_policy_with_a_memory_is_told_what_became_of_each_plan: preempt or wait",
    CountsABlockForEachRequest: "test_layers_that_keep_fewer_tokens_are_planned_for: needs 2 blocks for 1 tokens",
    LosesARequest: "test_a_policy_with_a_memory_is_told_what_became_of_each_plan: plans nothing",
    NewestFirst: "test_nobody_starves_while_others_keep_arriving: starves: not done after",
    PromptsAsLongAsAnyWait: "test_arrivals_that_never_end_starve_nobody_who_has_begun: while short prompts arrive",
    DecodesTheOldestOnly: "test_arrivals_that_never_end_starve_nobody_who_has_begun: no token for 101 steps",
    HaltsAPromptWhileOthersDecode: "test_arrivals_that_never_end_starve_nobody_who_has_begun: "
    "while prompts longer than a step arrive",
    HaltsTheOldestForBlocks: "test_arrivals_that_never_end_starve_nobody_who_has_begun: with 48 blocks, while",
    NeverPreempts: "test_a_policy_with_a_memory_is_told_what_became_of_each_plan: preempt or wait",
    ForgetsChunks: "test_a_policy_with_a_memory_is_told_what_became_of_each_plan: plans nothing",
    CountsItsCalls: "test_the_same_view_gives_the_same_plan_and_changes_nothing: gave two plans",
    ChangesARequest: "test_the_same_view_gives_the_same_plan_and_changes_nothing: changed a request",
    NamesStrangers: "test_a_policy_with_a_memory_is_told_what_became_of_each_plan: which is",
}

STARVERS = {
    ShortestAnswerFirst: "short requests",
    ShortestAnswerPreempts: "short requests",
    LongestAnswerFirst: "long answers",
    LongestPromptFirst: "long prompts",
    LatestFirst: "short requests",
    StrictPriorities: "more urgent requests",
    StrictDeadlines: "requests with a deadline",
    LongestCachedPrefixFirst: "requests with a cached prefix",
    LongPromptsLast: "short requests",
    OneTenantFirst: "short requests",
    TaggedFirst: "requests of one tenant",
    PreemptedLast: "long answers",
    FillsHoles: "long answers",
}
"""Policies that let somebody wait for ever, and while what arrives."""
