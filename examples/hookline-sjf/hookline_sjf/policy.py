"""Shortest job first, over a read-only view: whom to admit next, and who makes room.

A job's rank is its size plus ageing times its arrival. Two waiting jobs shrink at the same rate, so their order never
changes, and a plan depends on the view alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from core.contracts import ALL, Everyone, Plan, RequestView, SchedulerView
from hookline_sjf import ShortestJobFirstConfig

DECODE_ALL = Plan(decode=ALL)


class ShortestJobFirst:
    """Smallest mean time to an answer; a long job waits for at most its extra tokens / ageing_tokens_per_s."""

    def __init__(self, config: ShortestJobFirstConfig) -> None:
        self.config = config

    def plan(self, view: SchedulerView) -> Plan:
        if can_simply_decode(view):
            return DECODE_ALL
        draft = Draft(view)
        draft.continue_prompts()
        if not draft.preempt:
            self.admit(draft)
        if not draft.prefill:
            draft.decode_running()
        return Plan(prefill=draft.prefill, decode=draft.decode, preempt=draft.preempt)

    def admit(self, draft: Draft) -> None:
        """Waiting jobs by rank, up to the first that does not fit: a smaller one must not slip past it for ever."""
        view = draft.view
        seats = view.limits.max_num_seqs - len(view.running)
        if seats < 1 or not view.waiting or not draft.tokens_left:
            return
        for request in sorted(view.waiting, key=self.rank)[:seats]:
            left = view.budget.num_uncomputed_tokens(request)
            is_alone = not view.running and not draft.prefill
            reserve = 0 if is_alone else math.ceil(self.config.watermark * view.limits.num_blocks)
            if not draft.tokens_left or view.budget.cost(request, left) + reserve > view.budget.num_free:
                return
            draft.compute(request, left)

    def rank(self, request: RequestView) -> tuple[float, int]:
        size = request.num_prompt_tokens + request.max_tokens
        return size + self.config.ageing_tokens_per_s * request.arrival_s, request.id


@dataclass
class Draft:
    """A plan while it is being made, counted against the view's ledger."""

    view: SchedulerView
    prefill: list[tuple[int, int]] = field(default_factory=list)
    decode: list[int] | Everyone = field(default_factory=list)
    preempt: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens_left = self.view.limits.max_num_batched_tokens
        self.candidates = list(self.view.running)
        """Who may still be preempted, the last admitted last."""

    def compute(self, request: RequestView, num_tokens: int) -> None:
        """A chunk of a prompt whose blocks suffice."""
        num_tokens = min(num_tokens, self.tokens_left)
        self.view.budget.take(request, num_tokens)
        self.prefill.append((request.id, num_tokens))
        self.tokens_left -= num_tokens

    def continue_prompts(self) -> None:
        """The next chunk of each running prompt."""
        for request in self.view.prefilling:
            if self.tokens_left and request.id not in self.preempt:
                num_tokens = min(self.tokens_left, request.num_tokens - request.num_computed_tokens)
                if self.make_room(request, num_tokens):
                    self.prefill.append((request.id, num_tokens))
                    self.tokens_left -= num_tokens

    def decode_running(self) -> None:
        """A token for each running request that is not prefilling."""
        if not self.preempt and self.view.budget.take_decodes():
            self.decode = ALL
            return
        prefilling = {request.id for request in self.view.prefilling}
        decode = self.decode = []
        for request in self.view.running:
            if request.id not in prefilling and request.id not in self.preempt and self.make_room(request, 1):
                decode.append(request.id)

    def make_room(self, request: RequestView, num_tokens: int) -> bool:
        """Reserve blocks, preempting the last admitted; False if the request itself fell victim."""
        while not self.view.budget.take(request, num_tokens):
            victim = self.candidates.pop()
            self.view.budget.give_back(victim)
            self.preempt.append(victim.id)
            if victim.id == request.id:
                return False
        return True


def can_simply_decode(view: SchedulerView) -> bool:
    """Nobody has a prompt to compute, and there is a free block for each request: no ledger is needed."""
    return not view.waiting and not view.prefilling and view.budget.num_free >= len(view.running)
