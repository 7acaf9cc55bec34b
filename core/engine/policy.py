"""Asks a scheduler policy for plans, waits if they say so, and stops a policy that is stuck."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from hookline.core.contracts import Joining, Scheduler, SchedulerView
from hookline.core.engine.plan_check import CheckedPlan, check_plan
from hookline.core.engine.policy_feedback import PolicyFeedback, ServedCounts
from hookline.core.engine.state import EngineState
from hookline.core.errors import PlanError
from hookline.core.kv_cache.shared_prefix import shared_prefix
from hookline.core.plugin.blame import failure
from hookline.core.requests.request_queue import Views
from hookline.core.util.raising import Raising

MAX_FRUITLESS_PLANS = 1000
"""A policy is stuck after more plans than this in a row in which no request computes a token for the first time."""
MAX_IDLE_S = 1.0
"""Longest single wait a plan can ask for."""


class Planner:
    """Asks one policy for plans, and waits if they say so. name: the policy's, for error messages."""

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
        if self.feedback.is_wanted:
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
        """Whether `joining` holds for the decoding requests and for the first waiting ones.

        Not if any of them needs a feature that the CUDA graphs with prompts lack. And not if decodes share a long
        prefix: a step of decodes alone reads it once.
        """
        table, decoding = self._state.table, self._queue.decoding()
        if not 0 < len(decoding) <= joining.max_decodes or table.num_late or table.num_reading:
            return False
        next_requests = islice(self._queue.waiting.values(), joining.max_prompts)
        if any(request.asks_beyond_sampling for request in next_requests):
            return False
        return not (self._state.shares_prefixes and shared_prefix(list(table.requests(decoding)))[1])

    def reset_wait(self) -> None:
        """Count the waited time from zero: after a plan that does something, or the first request of an empty queue."""
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
        """Count the plans in which requests only compute tokens again that a preemption took from the cache.

        Raises: PlanError after MAX_FRUITLESS_PLANS of them in a row.
        """
        self._num_fruitless = 0 if got_further else self._num_fruitless + 1
        if self._num_fruitless > MAX_FRUITLESS_PLANS:
            self._num_fruitless = 0
            raise self._stuck(f"after {MAX_FRUITLESS_PLANS} plans in a row no request has got any further")

    def _stuck(self, message: str) -> PlanError:
        return PlanError(f"{self._name} makes no progress: {message}")
