"""Tells a scheduler policy what became of its plans, in order, and who ended; see core.contracts.RemembersSteps.

Costs a policy that keeps no memory one comparison a step. Knows no plan's meaning.
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
    """One per engine. name: of the policy, as an error begins with it."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        method = getattr(scheduler, "committed", None)
        self._method = method if method is not None and is_offered(method) else None
        self._name = name
        self._untold: deque[_Untold] = deque()
        """In the order in which the policy made them: the step in flight, and the next one."""
        self._ended: list[Ended] = []

    @property
    def is_wanted(self) -> bool:
        """Whether the policy has a memory at all."""
        return self._method is not None

    def planned(self, plan: Plan) -> None:
        """The policy made a plan."""
        if self._method is not None:
            self._untold.append(_Untold(plan))

    def ended(self, request: Request, reason: FinishReason, error: str | None) -> None:
        """A request ended; the next notice tells of it."""
        if self._method is not None:
            self._ended.append(Ended(request.view, reason, error))

    def give_up(self, now_s: float) -> None:
        """Nothing is done of the newest plan; told once the policy knows what became of those before it.

        Raises: PluginError naming the policy, as everything here that tells it something.
        """
        if self._untold:
            self._untold[-1].is_given_up = True
            self._tell_given_up(now_s)

    def committed(self, plan: Plan, now_s: float, **facts: Any) -> None:
        """A plan was carried out. facts: fields of CommittedStep."""
        if self._method is not None:
            while self._untold.popleft().plan is not plan:
                pass  # somebody else than the engine asked for it
            self._tell(CommittedStep(plan, is_carried_out=True, now_s=now_s, ended=self._take_ended(), **facts))
            self._tell_given_up(now_s)

    def tell_ended(self, now_s: float) -> None:
        """Requests ended between steps."""
        if self._ended:
            self._tell(CommittedStep(None, is_carried_out=False, now_s=now_s, ended=self._take_ended()))

    def broke_off(self, now_s: float) -> None:
        """No plan that is still open will be carried out.

        An error that the policy raises on hearing it is dropped: the one that broke off is reported already.
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
    """What a step computed of prompts. kept: the requests that keep a token of it, those that decoded first."""
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
