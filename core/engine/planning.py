"""Asks the scheduler for plans, checks them, waits when a plan asks to, and finds out when a policy is stuck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hookline.core.contracts import Joining, Plan, Scheduler, SchedulerView
from hookline.core.engine.feedback import PolicyFeedback
from hookline.core.engine.plan_check import CheckedPlan, check_plan
from hookline.core.engine.served import ServedCounts
from hookline.core.engine.times import Times
from hookline.core.errors import PASSES, PlanError
from hookline.core.kv_cache.budget import Ledger
from hookline.core.plugin.blame import with_place
from hookline.core.requests.admission import EngineLimits
from hookline.core.requests.request_queue import RequestQueue, Views

MAX_FRUITLESS_PLANS = 1000
"""A policy is stuck after more plans than this in a row in which no request computes a token for the first time."""
MAX_IDLE_S = 1.0
"""Longest single wait a plan can ask for."""


class Planner:
    """Asks one policy for plans. policy: its name; origin: the distribution that it comes from, for errors.

    ledger: makes a fresh ledger of the pool as it is now. may_join: whether Limits.joining holds for the requests that
    there are now.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: EngineLimits,
        queue: RequestQueue,
        *,
        policy: str,
        origin: str,
        ledger: Callable[[], Ledger],
        may_join: Callable[[Joining], bool],
        times: Times,
    ) -> None:
        self.scheduler, self.limits, self.queue = scheduler, limits, queue
        self._name = f"scheduler '{policy}'" + (f" of {origin}" if origin else "")
        self.feedback = PolicyFeedback(scheduler, self._name)
        self.served = ServedCounts()
        self._ledger, self._may_join, self._times = ledger, may_join, times
        self._apart = replace(limits.plan, joining=Joining())
        self._fruitless = 0
        self._idle_s = 0.0

    def follow(self, scheduler: Scheduler) -> None:
        """Ask another policy from now on."""
        self.scheduler = scheduler
        self.feedback.follow(scheduler)
        self._fruitless, self._idle_s = 0, 0.0

    def ask(self) -> tuple[Plan, CheckedPlan]:
        """The policy's next plan: as the policy returned it, and as it was checked.

        Raises: PlanError naming the policy. PluginError if the policy fails when it is told that its plan is refused.
        """
        queue, limits = self.queue, self.limits.plan
        view = self.view(self._times.now())
        try:
            plan = self.scheduler.plan(view)
        except (PlanError, *PASSES):
            raise
        except BaseException as error:
            raise PlanError(f"{self._name} fails in plan: {with_place(error)}") from error
        self.feedback.planned(plan)
        try:
            return plan, check_plan(plan, queue, self._ledger(), limits, self._name)
        except BaseException as error:
            self.feedback.give_up(self._times.now())
            if isinstance(error, (PlanError, *PASSES)):
                raise
            raise PlanError(f"{self._name} fails in plan: {with_place(error)}") from error

    def view(self, now_s: float) -> SchedulerView:
        """What the policy is shown at this time."""
        queue, limits = self.queue, self.limits.plan
        budget, prefilling = self._ledger(), queue.prefilling()
        waiting, running = Views(queue.waiting), Views(queue.running)
        num_steps = queue.num_steps_without_decode
        has_prompts = bool(prefilling) or (bool(waiting) and len(running) < limits.max_num_seqs)
        joins = has_prompts and limits.joining.max_decodes > 0 and self._may_join(limits.joining)
        seen = limits if joins else self._apart
        return SchedulerView(waiting, running, prefilling, seen, budget, now_s, num_steps, self.served.of)

    def reset_wait(self) -> None:
        """Note a plan that does something, or the first request of an empty queue: the time waited counts from zero."""
        self._idle_s = 0.0

    def wait(self, idle_s: float) -> None:
        """Wait for idle_s seconds, as a plan that does nothing asks to, but no longer than MAX_IDLE_S.

        `Engine.sleep` may come back early, as it does for arrivals: the time that has passed counts.
        Raises: PlanError if the plan does not ask to wait, or if such plans have waited for engine.stall_timeout_s.
        """
        if not idle_s > 0:
            waiting, running = len(self.queue.waiting), len(self.queue.running)
            load = f"{waiting} requests waiting and {running} running"
            raise self._stuck(f"plans nothing with {load}; set idle_s to wait")
        if self._idle_s > self.limits.stall_timeout_s:
            self._idle_s = 0.0  # later requests are not refused for it
            raise self._stuck(f"has waited longer than engine.stall_timeout_s={self.limits.stall_timeout_s}")
        began_s = self._times.now()
        self._times.sleep(min(idle_s, MAX_IDLE_S))
        self._idle_s += min(self._times.now() - began_s, MAX_IDLE_S)  # a stopped process is no policy's fault

    def check_progress(self, *, got_further: bool) -> None:
        """Count the plans in which requests only compute again what was lost by a preemption.

        Raises: PlanError after MAX_FRUITLESS_PLANS of them in a row.
        """
        self._fruitless = 0 if got_further else self._fruitless + 1
        if self._fruitless > MAX_FRUITLESS_PLANS:
            self._fruitless = 0
            raise self._stuck(f"after {MAX_FRUITLESS_PLANS} plans in a row no request has got any further")

    def _stuck(self, message: str) -> PlanError:
        return PlanError(f"{self._name} makes no progress: {message}")
