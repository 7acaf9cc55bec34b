"""The dealings with a scheduler policy: it is asked for plans, told what became of them, and stopped if it is stuck.

A policy that is no RemembersSteps (core.contracts) is told nothing, which costs one comparison a step; tokens are
counted only by the tags that a policy reads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from hookline.core.contracts import (
    MAX_SERVED_VALUES,
    CommittedStep,
    Ended,
    Joining,
    Plan,
    Prefilled,
    Scheduler,
    SchedulerView,
    ServedTokens,
    is_offered,
)
from hookline.core.engine.plan_check import CheckedPlan, check_plan
from hookline.core.engine.state import EngineState
from hookline.core.engine.step_builder import Dispatched
from hookline.core.errors import PlanError, PluginError
from hookline.core.kv_cache.shared_prefix import shared_prefix
from hookline.core.outputs import FinishReason
from hookline.core.plugin.blame import failure
from hookline.core.requests.request import Request
from hookline.core.requests.request_queue import Views
from hookline.core.util.raising import Raising

MAX_FRUITLESS_PLANS = 1000
"""A policy is stuck after more plans than this in a row in which no request computes a token for the first time."""
MAX_IDLE_S = 1.0
"""Longest single wait a plan can ask for."""
NOTHING = ServedTokens()
UNTAGGED = ""
"""Stands for requests without the tag, whose values have at least one character."""


class Planner:
    """Asks one policy for plans, and waits if they say so. name: the policy's, as error messages begin with it."""

    def __init__(self, state: EngineState, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.feedback, self.served = PolicyFeedback(scheduler, name), ServedCounts()
        self._state, self._queue, self._name = state, state.queue, name
        self._raising = Raising(self._fault)
        self._limits_apart = replace(state.limits.plan, joining=Joining())
        self._num_fruitless = 0
        self._idle_s = 0.0

    def follow(self, scheduler: Scheduler) -> None:
        """Ask another policy from now on."""
        self.scheduler = scheduler
        self.feedback.follow(scheduler)
        self._num_fruitless, self._idle_s = 0, 0.0

    def ask(self) -> CheckedPlan:
        """The policy's next plan, checked.

        Raises: PlanError naming the policy. PluginError if the policy fails when it is told that its plan is refused.
        """
        state, limits = self._state, self._state.limits.plan
        view = self.view(state.now())
        with self._raising:
            plan = self.scheduler.plan(view)
        self.feedback.planned(plan)
        try:
            with self._raising:
                return check_plan(plan, self._queue, state.ledger(), limits, self._name)
        except BaseException:
            self.feedback.give_up(state.now())
            raise

    def _fault(self, error: BaseException) -> PlanError | None:
        return None if isinstance(error, PlanError) else PlanError(failure(self._name, "plan", error))

    def view(self, now_s: float) -> SchedulerView:
        """The queue, the limits and the free blocks as the policy is shown them at this time."""
        queue, limits = self._queue, self._state.limits.plan
        prefilling, waiting, running = queue.prefilling(), Views(queue.waiting), Views(queue.running)
        has_prompts = bool(prefilling) or (bool(waiting) and len(running) < limits.max_num_seqs)
        joins = has_prompts and limits.joining.max_decodes > 0 and self._may_join(limits.joining)
        return SchedulerView(
            waiting,
            running,
            prefilling,
            limits if joins else self._limits_apart,
            self._state.ledger(),
            now_s,
            queue.num_steps_without_decode,
            self.served.of,
        )

    def _may_join(self, joining: Joining) -> bool:
        """Whether `joining` holds for the requests that decode now and for those that wait the longest.

        Not if any of them asks for more than graphs with prompts have. And not if decodes share a long prefix: a step
        of decodes alone reads it once.
        """
        table, decoding = self._state.table, self._queue.decoding()
        if not 0 < len(decoding) <= joining.max_decodes or table.num_beyond_sampling:
            return False
        next_requests = islice(self._queue.waiting.values(), joining.max_prompts)
        if any(request.asks_beyond_sampling for request in next_requests):
            return False
        return not (self._state.shares_prefixes and shared_prefix(list(table.requests(decoding)))[1])

    def reset_wait(self) -> None:
        """Note a plan that does something, or the first request of an empty queue: the time waited counts from zero."""
        self._idle_s = 0.0

    def wait(self, idle_s: float) -> None:
        """Wait for idle_s seconds, as a plan that does nothing asks to, but no longer than MAX_IDLE_S.

        `Engine.sleep` may come back early, as it does for arrivals: the time that has passed counts.
        Raises: PlanError if the plan does not ask to wait, or if such plans have waited for engine.stall_timeout_s.
        """
        if not idle_s > 0:
            waiting, running = len(self._queue.waiting), len(self._queue.running)
            load = f"{waiting} requests waiting and {running} running"
            raise self._stuck(f"plans nothing with {load}; set idle_s to wait")
        limit_s = self._state.limits.stall_timeout_s
        if self._idle_s > limit_s:
            self._idle_s = 0.0  # later requests are not refused for it
            raise self._stuck(f"has waited longer than engine.stall_timeout_s={limit_s}")
        began_s = self._state.now()
        self._state.sleep(min(idle_s, MAX_IDLE_S))
        self._idle_s += min(self._state.now() - began_s, MAX_IDLE_S)  # a stopped process is no policy's fault

    def check_progress(self, *, got_further: bool) -> None:
        """Count the plans in which requests only compute again what was lost by a preemption.

        Raises: PlanError after MAX_FRUITLESS_PLANS of them in a row.
        """
        self._num_fruitless = 0 if got_further else self._num_fruitless + 1
        if self._num_fruitless > MAX_FRUITLESS_PLANS:
            self._num_fruitless = 0
            raise self._stuck(f"after {MAX_FRUITLESS_PLANS} plans in a row no request has got any further")

    def _stuck(self, message: str) -> PlanError:
        return PlanError(f"{self._name} makes no progress: {message}")


@dataclass
class _Untold:
    """A plan that the policy has not been told of yet."""

    plan: Plan
    is_given_up: bool = False

    def give_up(self) -> None:
        """Note that no step is made of it."""
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
        self._untold.clear()
        self._finished.clear()

    @property
    def is_wanted(self) -> bool:
        """Whether the policy wants to be told: whether it has a method `committed`."""
        return self._method is not None

    def planned(self, plan: Plan) -> None:
        """Note a plan that the policy made."""
        if self._method is not None:
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
        """Report that none of the plans that are still open will be carried out, since a step failed half-way.

        An error that the policy raises on hearing it is dropped: the error of the step is reported already.
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
    """What a step computed of prompts, for the policy. kept: the requests that keep a token of it, decodes first."""
    if not dispatched.chunks:
        return []
    admitted = {request.id for request in dispatched.admitted}
    sampled = {request.id for request in kept[-len(dispatched.chunks) - len(dispatched.drafted) :]}
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

    @property
    def is_wanted(self) -> bool:
        """Whether a policy asked for any tag."""
        return bool(self._by_key)

    def of(self, key: str) -> Mapping[str, ServedTokens]:
        """See SchedulerView.served_tokens; live, and not to be changed."""
        return MappingProxyType(self._by_key.setdefault(key, OrderedDict()))

    def add(self, prompts: Iterable[tuple[Request, int]], generated: Sequence[Request]) -> None:
        """Count a committed step's tokens: new ones of prompts, and one for each request that keeps a drawn one."""
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
