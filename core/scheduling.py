"""Moves that scheduler policies are made of: first come, first served, unless a policy says otherwise.

A policy makes a `PlanDraft`, calls moves in the order of what matters most to it, and returns `draft.plan()`. Each move
counts against the view's ledger and notes what it decided in the draft; none knows which policy calls it. Whatever the
order, running requests are not starved: once decodes are due, no prompt goes before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from hookline.core.contracts import ALL, CommittedStep, Everyone, Plan, RequestView, SchedulerView

MAX_PROMPT_STEPS = 16
"""Steps of prompts in a row for which a running request waits, unless a policy says otherwise.

With 16,384 tokens a step, a burst of 512 prompts of 512 tokens each is still computed without a pause. When arrivals
never end, one step in 17 decodes; it is shorter than a step full of prompts, so they lose less than a seventeenth.
"""
TILE_TOKENS = 128
"""A matrix product takes about as long for any number of tokens up to a multiple of it, so steps of whole tiles cost
least. The captured steps of prompts and decodes have a multiple of it, or max_num_batched_tokens."""


def decodes_are_due(view: SchedulerView, max_prompt_steps: int = MAX_PROMPT_STEPS) -> bool:
    """Whether a running request can decode and no request has decoded for this many steps, so that the next step should
    decode.

    A policy that puts prompts first and heeds this gives every running request its next token at most max_prompt_steps
    + 1 steps after the last one. The moves here heed it.
    """
    return view.num_steps_without_decode >= max_prompt_steps and len(view.running) > len(view.prefilling)


@dataclass
class PlanDraft:
    """A plan while it is being made.

    watermark: fraction of all KV blocks kept free when a request is admitted beside running ones; spares preemptions.
    max_prompt_steps: as for `decodes_are_due`; when decodes are due, `continue_prompts` and `admit_waiting` do nothing
    until the draft has a decode. rank: gives a running request's rank; when blocks run out, those of highest rank are
    preempted, the newest first among equals. None: the newest. view: what `plan` was called with; moves count against
    its budget. tokens_left: of the step's budget. prefill, decode, preempt: what the moves have decided so far, as in
    Plan.
    """

    view: SchedulerView
    watermark: float = 0.01
    max_prompt_steps: int = MAX_PROMPT_STEPS
    rank: Callable[[RequestView], Any] | None = None
    tokens_left: int = field(init=False)
    prefill: list[tuple[int, int]] = field(default_factory=list)
    decode: list[int] | Everyone = field(default_factory=list)
    preempt: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with the step's whole token budget."""
        self.tokens_left = self.view.limits.max_num_batched_tokens
        self.candidates = self._last_first()
        """Running requests that may still be preempted, in the order in which they would be."""

    def _last_first(self) -> Iterator[RequestView]:
        yield from reversed(self.ranked(self.view.running))

    def ranked(self, requests: Sequence[RequestView]) -> Sequence[RequestView]:
        """Running requests, oldest first, in the order in which they keep their places."""
        return requests if self.rank is None else sorted(requests, key=self.rank)

    def plan(self) -> Plan:
        """The finished plan. It contains no decode of a request that was preempted afterwards."""
        decode = self.decode
        if self.preempt and decode is not ALL:
            decode = [id_ for id_ in decode if id_ not in self.preempt]
        return Plan(prefill=self.prefill, decode=decode, preempt=self.preempt)

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts may be planned now: tokens are left, and no decode is due first."""
        return self.tokens_left > 0 and (bool(self.decode) or not decodes_are_due(self.view, self.max_prompt_steps))

    @property
    def num_running(self) -> int:
        """Running requests without those to be preempted."""
        return len(self.view.running) - len(self.preempt)

    @property
    def num_decodes(self) -> int:
        """Running requests that can decode, before any is preempted."""
        return len(self.view.running) - len(self.view.prefilling)

    @property
    def seats_left(self) -> int:
        """How many waiting requests max_num_seqs lets in, before any is admitted."""
        return max(0, self.view.limits.max_num_seqs - self.num_running)


def make_room(draft: PlanDraft, request: RequestView, num_tokens: int) -> bool:
    """Reserve blocks for a running request, preempting those of highest rank; False if that is the request itself."""
    while not draft.view.budget.take(request, num_tokens):
        victim = next(draft.candidates)
        draft.view.budget.give_back(victim)
        draft.preempt.append(victim.id)
        if victim.id == request.id:
            return False
    return True


def decode_running(draft: PlanDraft) -> None:
    """One token for every running request that can decode; those of highest rank are preempted if blocks run out."""
    if not draft.preempt and draft.view.budget.take_decodes():
        draft.tokens_left -= draft.num_decodes
        draft.decode = ALL
        return
    decode: list[int] = []
    for request in draft.ranked(draft.view.running):
        if request.id in draft.preempt:
            break
        if not request.is_prefilling and make_room(draft, request, 1):
            decode.append(request.id)
    draft.tokens_left -= len(decode)
    draft.decode = decode


def can_simply_decode(view: SchedulerView) -> bool:
    """Whether `SIMPLY_DECODE` is the plan: no prompt is to be computed, and there are free blocks for each request."""
    if view.waiting or view.prefilling:
        return False
    return view.budget.num_free >= len(view.running) * view.limits.max_blocks_per_token


SIMPLY_DECODE = Plan(decode=ALL)
"""Put all decodes into the plan at once, which is the plan of most steps and needs no list."""


def continue_prompts(draft: PlanDraft) -> None:
    """The next chunk of every running request that is prefilling, those of lowest rank first, or the oldest."""
    for request in draft.ranked(draft.view.prefilling):
        if not draft.takes_prompts or request.id in draft.preempt:
            break
        num_tokens = min(draft.tokens_left, request.num_tokens - request.num_computed_tokens)
        if make_room(draft, request, num_tokens):
            draft.prefill.append((request.id, num_tokens))
            draft.tokens_left -= num_tokens


def admit_waiting(draft: PlanDraft, waiting: Iterable[RequestView] | None = None) -> None:
    """Waiting requests in this order, until one does not fit whole; the last may be admitted with a chunk only.

    None is admitted if the plan preempts a request. waiting: all of them, in the order to admit them; None: in queue
    order. It is not iterated if none may be admitted, so that a generator which sorts them does so only if needed.
    """
    budget, limits = draft.view.budget, draft.view.limits
    seats = draft.seats_left
    if draft.preempt or not seats or not draft.takes_prompts:
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


def join_decodes(draft: PlanDraft) -> None:
    """One token for every running request beside the prompts of the draft, if that is quicker than a step of its own.

    Whether it is, `Limits.joining` knows. No request is preempted for it.
    """
    view, num_decodes = draft.view, draft.num_decodes
    num_tokens = sum(count for _, count in draft.prefill)
    if draft.preempt or num_decodes > draft.tokens_left:
        return
    if view.limits.joining.pays(num_decodes, len(draft.prefill), num_tokens) and view.budget.take_decodes():
        draft.tokens_left -= num_decodes
        draft.decode = ALL


def plan_prompts_first(
    view: SchedulerView,
    watermark: float,
    waiting: Iterable[RequestView] | None = None,
    max_prompt_steps: int = MAX_PROMPT_STEPS,
    rank: Callable[[RequestView], Any] | None = None,
) -> Plan:
    """Chunks of prompts, running ones before new ones; if none can go on or decodes are due, all requests decode.

    They also decode beside prompts where that is worth it, see `join_decodes`.

    waiting: as of `admit_waiting`. max_prompt_steps: as of `decodes_are_due`. rank: as of `PlanDraft`.
    """
    if can_simply_decode(view):
        return SIMPLY_DECODE
    draft = PlanDraft(view, watermark, max_prompt_steps, rank)
    continue_prompts(draft)
    admit_waiting(draft, waiting)
    if draft.prefill:
        join_decodes(draft)
    else:
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


class Arrivals:
    """Finds the requests that began to wait since the last plan, without looking at all that wait.

    For a policy that `RemembersSteps` and keeps waiting requests in an order of its own. A returned request may have
    been admitted by a step that the policy was not told of yet; it has computed tokens then.
    """

    def __init__(self) -> None:
        """Begin without requests: the first call of `new` returns all that wait."""
        self._known: set[int] = set()

    def new(self, waiting: Sequence[RequestView]) -> list[RequestView]:
        """The waiting requests that no earlier call returned, in queue order.

        They stand before the known requests if they were preempted, and behind them if they arrived. A request is
        returned once, and again only if it is preempted.
        """
        first = list(takewhile(self._is_new, waiting))
        self._known.update(request.id for request in first)
        last = list(takewhile(self._is_new, reversed(waiting)))[::-1]
        self._known.update(request.id for request in last)
        return first + last

    def forget(self, step: CommittedStep) -> None:
        """Forget the requests that a step admitted and the requests that ended; call it in `committed`."""
        self._known.difference_update(one.request.id for one in step.prefilled)
        self._known.difference_update(end.request.id for end in step.ended)

    def _is_new(self, request: RequestView) -> bool:
        return request.id not in self._known
