"""Tells a scheduler policy what became of its plans, in order, and which requests ended: for RemembersSteps policies.

With a policy that is no RemembersSteps (core.contracts) it costs one comparison a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hookline.core.contracts import CommittedStep, Ended, Plan, Prefilled, Scheduler, is_offered
from hookline.core.engine.step_builder import Dispatched
from hookline.core.errors import PASSES, PluginError
from hookline.core.outputs import FinishReason
from hookline.core.plugin.blame import with_place
from hookline.core.requests.request import Request


@dataclass
class _Untold:
    """A plan that the policy has not been told of yet."""

    plan: Plan
    is_given_up: bool = False


class PolicyFeedback:
    """Reports to the policy of one engine. name: of the policy, as error messages begin with it."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._name = name
        self._untold: deque[_Untold] = deque()
        """Oldest first: the plan of the step in flight, and that of the next one."""
        self._ended: list[Ended] = []
        self.follow(scheduler)

    def follow(self, scheduler: Scheduler) -> None:
        """Report to this policy from now on, and only of its own plans."""
        method = getattr(scheduler, "committed", None)
        self._method = method if method is not None and is_offered(method) else None
        self._untold.clear()
        self._ended.clear()

    @property
    def is_wanted(self) -> bool:
        """Whether the policy wants to be told: whether it has a method `committed`."""
        return self._method is not None

    def planned(self, plan: Plan) -> None:
        """Note a plan that the policy made."""
        if self._method is not None:
            self._untold.append(_Untold(plan))

    def ended(self, request: Request, reason: FinishReason, error: str | None) -> None:
        """Note a request that ended; the policy hears of it with the next report."""
        if self._method is not None:
            self._ended.append(Ended(request.view, reason, error))

    def give_up(self, now_s: float) -> None:
        """Note that the newest plan is not carried out; the policy hears of it after the plans before it.

        Raises: PluginError naming the policy if its method raises, as every method does that reports to it.
        """
        if self._untold:
            self._untold[-1].is_given_up = True
            self._tell_given_up(now_s)

    def committed(self, plan: Plan, now_s: float, **facts: Any) -> None:
        """Report a plan that was carried out. facts: fields of CommittedStep."""
        if self._method is not None:
            while self._untold.popleft().plan is not plan:
                pass  # a plan that a caller of Engine.plan asked for, and that no step was made of
            self._tell(CommittedStep(plan, is_carried_out=True, now_s=now_s, ended=self._take_ended(), **facts))
            self._tell_given_up(now_s)

    def tell_ended(self, now_s: float) -> None:
        """Report the requests that ended between steps."""
        if self._ended:
            self._tell(CommittedStep(None, is_carried_out=False, now_s=now_s, ended=self._take_ended()))

    def broke_off(self, now_s: float) -> None:
        """Report that none of the plans that are still open will be carried out, since a step failed half-way.

        An error that the policy raises on hearing it is dropped: the error of the step is reported already.
        """
        for untold in self._untold:
            untold.is_given_up = True
        with suppress(PluginError):
            self._tell_given_up(now_s)
        self._untold.clear()
        with suppress(PluginError):
            self.tell_ended(now_s)

    def _tell_given_up(self, now_s: float) -> None:
        while self._untold and self._untold[0].is_given_up:
            self._tell(CommittedStep(self._untold.popleft().plan, is_carried_out=False, now_s=now_s))

    def _take_ended(self) -> Sequence[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def _tell(self, step: CommittedStep) -> None:
        assert self._method is not None
        try:
            self._method(step)
        except PASSES:
            raise
        except BaseException as error:
            raise PluginError(f"{self._name} fails in committed: {with_place(error)}") from error


def prefilled(dispatched: Dispatched, kept: Sequence[Request]) -> list[Prefilled]:
    """What a step computed of prompts, for the policy. kept: the requests that keep a token of it, decodes first."""
    if not dispatched.chunks:
        return []
    admitted = {request.id for request in dispatched.admitted}
    sampled = {request.id for request in kept[-len(dispatched.chunks) :]}
    return [
        Prefilled(
            request.view,
            num_tokens,
            num_new_tokens,
            num_cached_tokens=start if request.id in admitted else 0,
            is_sampled=request.id in sampled,
        )
        for (request, start, num_tokens), num_new_tokens in zip(
            dispatched.chunks, dispatched.num_new_tokens, strict=True
        )
    ]
