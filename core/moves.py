"""Moves that scheduler policies are made of: first come, first served, unless a policy says otherwise.

A policy makes a `PlanDraft`, calls moves in the order of what matters most to it, and returns `draft.plan()`. Each move
counts against the view's ledger and notes what it decided in the draft; none knows which policy calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from core.contracts import ALL, Everyone, Plan, RequestView, SchedulerView


@dataclass
class PlanDraft:
    """A plan while it is being made.

    watermark: fraction of all KV blocks kept free when a request is admitted beside running ones; spares preemptions.
    tokens_left: of the step's budget.
    """

    view: SchedulerView
    watermark: float = 0.01
    tokens_left: int = field(init=False)
    prefill: list[tuple[int, int]] = field(default_factory=list)
    decode: list[int] | Everyone = field(default_factory=list)
    preempt: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens_left = self.view.limits.max_num_batched_tokens
        self.candidates = reversed(self.view.running)
        """Running requests that may still be preempted, the newest first."""

    def plan(self) -> Plan:
        """What was decided; who was to decode and then had to make room does not."""
        decode = self.decode
        if self.preempt and decode is not ALL:
            decode = [id_ for id_ in decode if id_ not in self.preempt]
        return Plan(prefill=self.prefill, decode=decode, preempt=self.preempt)

    @property
    def num_running(self) -> int:
        """Requests that run already, without those to be preempted."""
        return len(self.view.running) - len(self.preempt)

    @property
    def seats_left(self) -> int:
        """How many waiting requests max_num_seqs lets in, before any is admitted."""
        return max(0, self.view.limits.max_num_seqs - self.num_running)


def make_room(draft: PlanDraft, request: RequestView, num_tokens: int) -> bool:
    """Reserve blocks for a running request, preempting the newest ones; False if it fell victim itself."""
    while not draft.view.budget.take(request, num_tokens):
        victim = next(draft.candidates)
        draft.view.budget.give_back(victim)
        draft.preempt.append(victim.id)
        if victim.id == request.id:
            return False
    return True


def decode_running(draft: PlanDraft) -> None:
    """One token for every running request that can decode, oldest first; the newest make room if they must."""
    if not draft.preempt and draft.view.budget.take_decodes():
        draft.tokens_left -= len(draft.view.running) - len(draft.view.prefilling)
        draft.decode = ALL
        return
    decode: list[int] = []
    for request in draft.view.running:
        if request.id in draft.preempt:
            break
        if not request.is_prefilling and make_room(draft, request, 1):
            decode.append(request.id)
    draft.tokens_left -= len(decode)
    draft.decode = decode


def can_simply_decode(view: SchedulerView) -> bool:
    """Whether `SIMPLY_DECODE` is the plan: no prompt is to be computed, and there is a free block for each request."""
    return not view.waiting and not view.prefilling and view.budget.num_free >= len(view.running)


SIMPLY_DECODE = Plan(decode=ALL)
"""The plan of most steps; it goes through no list."""


def continue_prompts(draft: PlanDraft) -> None:
    """The next chunk of every running request that is prefilling, oldest first."""
    for request in draft.view.prefilling:
        if draft.tokens_left <= 0 or request.id in draft.preempt:
            break
        num_tokens = min(draft.tokens_left, request.num_tokens - request.num_computed_tokens)
        if make_room(draft, request, num_tokens):
            draft.prefill.append((request.id, num_tokens))
            draft.tokens_left -= num_tokens


def admit_waiting(draft: PlanDraft, waiting: Iterable[RequestView] | None = None) -> None:
    """Waiting requests in this order, until one does not fit whole; the last may be admitted with a chunk only.

    Nobody is admitted into the room that others had to make. waiting: all of them; None: in queue order; not looked at
    if nobody may be admitted, so a generator that sorts them does so only when it matters.
    """
    budget, limits = draft.view.budget, draft.view.limits
    seats = draft.seats_left
    if draft.preempt or not seats or draft.tokens_left <= 0:
        return
    for request in draft.view.waiting if waiting is None else waiting:
        if draft.tokens_left <= 0 or not seats:
            break
        left = budget.num_uncomputed_tokens(request)
        is_alone = draft.num_running == 0 and not draft.prefill
        reserve = 0 if is_alone else math.ceil(draft.watermark * limits.num_blocks)
        if budget.cost(request, left) + reserve > budget.num_free:
            break
        num_tokens = min(left, draft.tokens_left)
        budget.take(request, num_tokens)
        draft.prefill.append((request.id, num_tokens))
        draft.tokens_left -= num_tokens
        seats -= 1


def plan_prompts_first(view: SchedulerView, watermark: float, waiting: Iterable[RequestView] | None = None) -> Plan:
    """Chunks of prompts, running ones before new ones; everybody decodes when no prompt can go on.

    waiting: as of `admit_waiting`.
    """
    if can_simply_decode(view):
        return SIMPLY_DECODE
    draft = PlanDraft(view, watermark)
    continue_prompts(draft)
    admit_waiting(draft, waiting)
    if not draft.prefill:
        decode_running(draft)
    return draft.plan()


def plan_mixed(
    view: SchedulerView,
    watermark: float,
    waiting: Iterable[RequestView] | None = None,
    most_tokens: int | None = None,
) -> Plan:
    """Every running request decodes, and prompt chunks fill what is left of the step's token budget.

    waiting: as of `admit_waiting`. most_tokens: of the step, where that is less than the limit.
    """
    if can_simply_decode(view):
        return SIMPLY_DECODE
    draft = PlanDraft(view, watermark)
    if most_tokens is not None:
        draft.tokens_left = min(draft.tokens_left, most_tokens)
    decode_running(draft)
    continue_prompts(draft)
    admit_waiting(draft, waiting)
    return draft.plan()
