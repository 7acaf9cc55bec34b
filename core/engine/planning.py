"""Asks the scheduler for plans, checks them, waits where they ask to, and finds out when a policy gets no further."""

from __future__ import annotations

from collections.abc import Callable

from hookline.core.contracts import Plan, Scheduler, SchedulerView
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
"""Plans in a row that bring no request further than it ever was, after which a policy counts as stuck."""
MAX_IDLE_S = 1.0
"""Longest single wait a plan can ask for."""


class Planner:
    """One policy and what it is shown.

    policy: its name; origin: whose it is, for errors. ledger: makes a fresh ledger of the pool as it is now.
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
        times: Times,
    ) -> None:
        self.scheduler, self.limits, self.queue, self.policy = scheduler, limits, queue, policy
        self._name = f"scheduler '{policy}'" + (f" of {origin}" if origin else "")
        self.feedback = PolicyFeedback(scheduler, self._name)
        self.served = ServedCounts()
        self._ledger, self._times = ledger, times
        self._fruitless = 0
        self._idle_s = 0.0

    def ask(self) -> tuple[Plan, CheckedPlan]:
        """The policy's next plan, as it is and checked.

        Raises: PlanError naming the policy. PluginError if what it is told of that plan's end fails.
        """
        queue, limits = self.queue, self.limits.plan
        budget, prefilling = self._ledger(), queue.prefilling()
        waiting, running = Views(queue.waiting), Views(queue.running)
        num_steps = queue.num_steps_without_decode
        view = SchedulerView(waiting, running, prefilling, limits, budget, self._times.now(), num_steps, self.served.of)
        try:
            plan = self.scheduler.plan(view)
        except (PlanError, *PASSES):
            raise
        except BaseException as error:
            raise PlanError(f"{self._name} fails in plan: {with_place(error)}") from error
        self.feedback.planned(plan)
        try:
            return plan, check_plan(plan, queue, self._ledger(), limits, self.policy)
        except BaseException as error:
            self.feedback.give_up(self._times.now())
            if isinstance(error, (PlanError, *PASSES)):
                raise
            raise PlanError(f"{self._name} fails in plan: {with_place(error)}") from error

    def computes(self) -> None:
        """The newest plan does something: waiting counts from here on."""
        self._idle_s = 0.0

    def wait(self, idle_s: float) -> None:
        """Wait as a plan that does nothing asks to.

        Raises: PlanError if it asks for nothing, or has waited for too long.
        """
        if not idle_s > 0:
            waiting, running = len(self.queue.waiting), len(self.queue.running)
            load = f"{waiting} requests waiting and {running} running"
            raise self._stuck(f"plans nothing with {load}; set idle_s to wait")
        if self._idle_s > self.limits.stall_timeout_s:
            raise self._stuck(f"has waited longer than engine.stall_timeout_s={self.limits.stall_timeout_s}")
        idle_s = min(idle_s, MAX_IDLE_S)
        self._idle_s += idle_s
        self._times.sleep(idle_s)

    def check_progress(self, *, got_further: bool) -> None:
        """Let a policy preempt and recompute for a while, but not for ever.

        Raises: PlanError.
        """
        self._fruitless = 0 if got_further else self._fruitless + 1
        if self._fruitless > MAX_FRUITLESS_PLANS:
            raise self._stuck(f"after {MAX_FRUITLESS_PLANS} plans in a row no request has got any further")

    def _stuck(self, message: str) -> PlanError:
        return PlanError(f"scheduler '{self.policy}' makes no progress: {message}")
