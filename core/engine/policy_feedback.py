"""Feedback to the scheduler policy: the outcome of its plans, and the number of served tokens by tag.

A policy that is no RemembersSteps (core.contracts) gets none, which costs one comparison a step; tokens are counted
only by the tags that a policy reads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hookline.core.contracts import (
    MAX_SERVED_VALUES,
    CommittedStep,
    Ended,
    Plan,
    Prefilled,
    Scheduler,
    ServedTokens,
    is_offered,
)
from hookline.core.engine.step_builder import Dispatched
from hookline.core.errors import PluginError
from hookline.core.outputs import FinishReason
from hookline.core.plugin.blame import failure
from hookline.core.requests.request import Request
from hookline.core.util.raising import Raising

NOTHING = ServedTokens()
UNTAGGED = ""
"""Stands for requests without the tag, whose values have at least one character."""


@dataclass
class _Untold:
    """A plan that the policy has not been told of yet."""

    plan: Plan
    is_given_up: bool = False

    def give_up(self) -> None:
        """Note that the plan is not carried out."""
        self.is_given_up = True


class PolicyFeedback:
    """Reports to the policy of one engine. name: of the policy, as error messages begin with it."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._raising = Raising(lambda error: PluginError(failure(name, "committed", error)))
        self._untold: deque[_Untold] = deque()
        """Oldest first: the plan of the step in flight, and that of the next one."""
        self._finished: list[Ended] = []
        self.follow(scheduler)

    def follow(self, scheduler: Scheduler) -> None:
        """Report to this policy from now on, and only of its own plans."""
        method = getattr(scheduler, "committed", None)
        self._method = method if method is not None and is_offered(method) else None
        self.is_wanted = self._method is not None
        """Whether the policy wants to be told: whether it has a method `committed`."""
        self._untold.clear()
        self._finished.clear()

    def planned(self, plan: Plan) -> None:
        """Note a plan that the policy made, if the policy wants to be told."""
        self._untold.append(_Untold(plan))

    def finished(self, request: Request, reason: FinishReason, error: str | None) -> None:
        """Note a request that finished; the policy hears of it with the next report."""
        if self._method is not None:
            self._finished.append(Ended(request.view, reason, error))

    def give_up(self, now_s: float) -> None:
        """Note that the newest plan is not carried out; the policy hears of it after the plans before it.

        Raises: PluginError naming the policy if its method raises, as every method does that reports to it.
        """
        if self._untold:
            self._untold[-1].give_up()
            self._tell_given_up(now_s)

    def committed(self, plan: Plan, now_s: float, **facts: Any) -> None:
        """Report a plan that was carried out. facts: fields of CommittedStep."""
        if self._method is not None:
            while self._untold.popleft().plan is not plan:
                pass  # a plan that a caller of Engine.plan asked for, and that no step was made of
            self._tell(CommittedStep(plan, is_carried_out=True, now_s=now_s, ended=self._pop_finished(), **facts))
            self._tell_given_up(now_s)

    def tell_finished(self, now_s: float) -> None:
        """Report the requests that finished between steps."""
        if self._finished:
            self._tell(CommittedStep(None, is_carried_out=False, now_s=now_s, ended=self._pop_finished()))

    def broke_off(self, now_s: float) -> None:
        """Report that no open plan will be carried out, since a step failed half-way.

        An error that the policy raises here is dropped: the step's error is reported already.
        """
        for untold in self._untold:
            untold.give_up()
        with suppress(PluginError):
            self._tell_given_up(now_s)
        self._untold.clear()
        with suppress(PluginError):
            self.tell_finished(now_s)

    def _tell_given_up(self, now_s: float) -> None:
        while self._untold and self._untold[0].is_given_up:
            self._tell(CommittedStep(self._untold.popleft().plan, is_carried_out=False, now_s=now_s))

    def _pop_finished(self) -> Sequence[Ended]:
        finished, self._finished = self._finished, []
        return finished

    def _tell(self, step: CommittedStep) -> None:
        assert self._method is not None
        with self._raising:
            self._method(step)


def prefilled(dispatched: Dispatched, kept: Sequence[Request]) -> list[Prefilled]:
    """The prompt chunks that a step computed. kept: the requests that keep a token of the step, decodes first."""
    if not dispatched.chunks:
        return []
    admitted = {request.id for request in dispatched.admitted}
    sampled = {request.id for request in kept[-len(dispatched.chunks) - len(dispatched.multi_token) :]}
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


class ServedCounts:
    """Tokens served by one engine, by tag and value."""

    def __init__(self) -> None:
        self._by_key: dict[str, OrderedDict[str, ServedTokens]] = {}
        self.is_wanted = False
        """Whether a policy asked for any tag."""

    def of(self, key: str) -> Mapping[str, ServedTokens]:
        """See SchedulerView.served_tokens; live, and not to be changed."""
        self.is_wanted = True
        return MappingProxyType(self._by_key.setdefault(key, OrderedDict()))

    def add(self, prompts: Iterable[tuple[Request, int]], generated: Sequence[Request]) -> None:
        """Count a committed step's tokens: new prompt tokens, and a generated token for each request in `generated`."""
        prompts = list(prompts)
        for key, served in self._by_key.items():
            num_prompt: Counter[str] = Counter()
            for request, num_tokens in prompts:
                num_prompt[request.tags.get(key, UNTAGGED)] += num_tokens
            num_generated = Counter([request.tags.get(key, UNTAGGED) for request in generated])
            for value in num_prompt | num_generated:
                before = served.pop(value, NOTHING)
                served[value] = ServedTokens(before.prompt + num_prompt[value], before.generated + num_generated[value])
            while len(served) > MAX_SERVED_VALUES:
                served.popitem(last=False)
