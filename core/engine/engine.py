"""The engine: it puts the parts of the step loop together, and has the methods that its callers use.

An Executor computes the steps, and callers hand in token ids: there are no tensors and no text here. Nothing is
global, so several engines live side by side in a process. Requests are taken in by intake.py, stepped by step_loop.py
and commit.py, and ended by endings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.core.contracts import Scheduler, StepStats
from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.endings import Endings
from hookline.core.engine.intake import Intake
from hookline.core.engine.listeners import Listeners
from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.planning import Planner
from hookline.core.engine.step_loop import StepLoop
from hookline.core.engine.times import Times
from hookline.core.errors import HooklineError, RequestError
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.budget import Ledger, ledger_of
from hookline.core.kv_cache.group_manager import GroupedCacheManager
from hookline.core.kv_cache.groups import ALL_TOKENS, CacheGroups
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.plugin.observers import Observers
from hookline.core.pooling_params import PoolingParams
from hookline.core.requests.admission import EngineLimits, check_room
from hookline.core.requests.request import Watcher
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.structured_output import StructuredOutput
from hookline.core.sampling_params import SamplingParams
from hookline.core.step.executor import Executor
from hookline.core.util.process import Home


class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe: one caller drives it.

    policy, origin: the scheduler's name, and where it comes from. names: of the other plugins, by kind. All for errors.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        pool: BlockPool,
        limits: EngineLimits,
        *,
        policy: str = "scheduler",
        origin: str = "",
        names: Mapping[str, str] | None = None,
        observers: Observers | None = None,
        shares_prefixes: bool = False,
        model_name: str = "",
        job_folder: Path | None = None,
        structured_output: StructuredOutput | None = None,
        groups: CacheGroups = ALL_TOKENS,
    ) -> None:
        self.groups, self.pool, self.limits = groups, pool, limits
        self.policy, self.model_name, self.job_folder = policy, model_name, job_folder
        self.observers, self.structured_output = observers, structured_output
        self._times = times = Times()
        self.queue = RequestQueue(limits.plan.max_num_seqs, limits.max_len)
        self.cache = self._make_cache()
        self.dispatcher = Dispatcher(
            self.cache, self.queue, limits.plan.max_num_seqs, shares_prefixes=shares_prefixes, now=times.read
        )
        self.planner = Planner(
            scheduler,
            limits,
            self.queue,
            policy=policy,
            origin=origin,
            ledger=self.ledger,
            may_join=self.dispatcher.may_join,
            times=times,
        )
        self.feedback, self.served = self.planner.feedback, self.planner.served
        self._listeners = listeners = Listeners(observers)
        self._endings = Endings(
            self.queue, self.dispatcher, self.feedback, listeners, structured_output, times, names or {}
        )
        self.time_limits = self._endings.time_limits
        self.intake = Intake(limits, self.queue, self._endings, listeners, structured_output, times)
        self.loop = StepLoop(
            executor,
            self.planner,
            self.dispatcher,
            self._endings,
            listeners,
            structured_output,
            times,
            overlaps=limits.overlap,
            has_taps=bool(limits.taps),
        )
        self.watch = self.loop.watch
        self._is_closed = False
        self.home = Home()
        listeners.notify("on_engine_start", engine=self)

    def _make_cache(self) -> KVCacheManager:
        if self.groups.is_plain:
            return KVCacheManager(self.pool, self.queue.table)
        return GroupedCacheManager(self.pool, self.queue.table, self.groups, self.limits.plan)

    def ledger(self) -> Ledger:
        """A fresh ledger of the pool as it is now."""
        return ledger_of(self.cache, self.queue)

    # --------------------------------------------------------------------------------------- what may be replaced

    @property
    def scheduler(self) -> Scheduler:
        """The scheduling policy; may be replaced while no step is in flight."""
        return self.planner.scheduler

    @scheduler.setter
    def scheduler(self, policy: Scheduler) -> None:
        """Plan with another policy from the next step on, which errors call by the first one's name.

        Raises: HooklineError while a step is in flight.
        """
        if self.loop.in_flight is not None:
            raise HooklineError("a step is in flight; replace the scheduler when the engine has no work")
        self.planner.follow(policy)

    @property
    def executor(self) -> Executor:
        """What computes the steps; may be replaced between steps."""
        return self.loop.executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        """Have another executor compute the steps from the next one on."""
        self.loop.executor = executor

    @property
    def clock(self) -> Callable[[], float]:
        """Returns seconds; all times of the engine are on this clock. May be replaced before the first request."""
        return self._times.now

    @clock.setter
    def clock(self, now: Callable[[], float]) -> None:
        """Read all times from another clock."""
        self._times.now = now

    @property
    def sleep(self) -> Callable[[float], None]:
        """Waits for some seconds when a policy asks to; replaced where the engine's driver has work to do meanwhile."""
        return self._times.sleep

    @sleep.setter
    def sleep(self, sleep: Callable[[float], None]) -> None:
        """Wait by calling another function."""
        self._times.sleep = sleep

    # ------------------------------------------------------------------------------------- EngineView, for observers

    @property
    def num_running(self) -> int:
        """See EngineView."""
        return len(self.queue.running)

    @property
    def num_waiting(self) -> int:
        """See EngineView."""
        return len(self.queue.waiting) + len(self.queue.compiling)

    @property
    def waiting_by_reason(self) -> Mapping[str, int]:
        """See EngineView."""
        num_preempted = self.queue.num_preempted_waiting
        num_compiling = len(self.queue.compiling)
        return {
            "capacity": len(self.queue.waiting) - num_preempted,
            "preempted": num_preempted,
            "grammar": num_compiling,
        }

    @property
    def late_work(self) -> Mapping[str, int]:
        """See EngineView."""
        return self.executor.late_work

    @property
    def num_blocks(self) -> int:
        """See EngineView."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """See EngineView."""
        return self.pool.num_free

    @property
    def last_stats(self) -> StepStats | None:
        """StepStats of the step that was committed last; None before the first."""
        return self.loop.committer.last_stats

    # ------------------------------------------------------------------------------------------------------- requests

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        tags: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        arrival_s: float | None = None,
        watcher: Watcher | None = None,
        like: int | None = None,
        pooling: PoolingParams | None = None,
    ) -> int:
        """Queue a request and return its id.

        priority, tags, deadline_s, cache_salt: see RequestInfo. arrival_s: when it came, on `clock`; None is now.
        timeout_s: ends it this many seconds after its arrival, with finish_reason "abort" and the reason.
        watcher: sees each of its tokens when it is known, and can end it.
        like: a queued completion of the same prompt, which differs in its seed alone; saves making the same again.
        pooling: it ends with a vector once its prompt is computed, and draws nothing; params are not looked at then.
        Raises: RequestError if it can never be served: empty, over-long, or with a token id outside the vocabulary; or
        if any of its arguments is wrong.
        """
        self.home.check()
        if self._is_closed:
            raise HooklineError("the engine is closed; make a new one")
        if not self.queue.live:
            self.planner.reset_wait()
        return self.intake.add(
            prompt_token_ids,
            params,
            {"priority": priority, "tags": tags, "deadline_s": deadline_s, "cache_salt": cache_salt},
            timeout_s=timeout_s,
            arrival_s=arrival_s,
            like=like,
            prompt=prompt,
            watcher=watcher,
            pooling=pooling,
        )

    def check_room(self, num_requests: int = 1) -> None:
        """Check max_queued_requests and max_queued_tokens, which `add` itself does not.

        Raises: QueueFullError if there is no room for this many more until others have started; RequestError if there
        never can be.
        """
        check_room(self.limits, self.queue, num_requests)

    def refuse(
        self, prompt_token_ids: Sequence[int], error: RequestError, prompt: str | None = None, **said: Any
    ) -> RequestOutput:
        """The output of a request that `add` refused; observers see it too. said: its INFO_KEYS, if they were given."""
        return self.intake.refuse(prompt_token_ids, error, prompt, said)

    def abort(self, ids: Iterable[int], *, reason: FinishReason = FinishReason.ABORT) -> list[RequestOutput]:
        """End requests wherever they stand and give their blocks back; unknown ids are ignored.

        reason: STOP if the caller found a stop string in the text.
        """
        outputs = self._endings.abort(ids, reason)
        try:
            self.loop.tell_ended()
        except BaseException:
            self._endings.kept += outputs
            raise
        return outputs

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self.queue) > 0 or self.loop.in_flight is not None

    # ----------------------------------------------------------------------------------------------------------- step

    def step(self) -> list[RequestOutput]:
        """Plan and launch one step, then commit the step before it (or, without overlap, this one).

        Returns the requests that ended since the step before.
        Raises: PlanError if the scheduler breaks a rule, and no part of its plan is carried out then; or if its plans
        lead nowhere. LostStep if the step could not be computed: its requests end. Any other error ends all requests.
        The next step returns those that ended, with finish_reason "error". A fault of single requests ends these alone,
        and nothing is raised.
        """
        self.home.check()
        endings, loop, queue = self._endings, self.loop, self.queue
        if self.time_limits:
            endings.end_late()
            loop.tell_ended()
        outputs: list[RequestOutput] = []
        if queue.compiling:
            self.intake.let_in_compiled(is_in_flight=loop.in_flight is not None)
        if len(queue) > len(queue.compiling) or loop.in_flight is not None:
            with self.watch.step():
                outputs = loop.advance()
        return self.take_ended() + outputs

    def take_ended(self) -> list[RequestOutput]:
        """The requests that ended without having been returned, as those of a step that raised; `step` calls it."""
        ended, self._endings.kept = self._endings.kept, []
        return ended

    def plan(self, *, may_wait: bool = True) -> CheckedPlan:
        """The scheduler's next plan, checked; waits if the plan asks to, and it may."""
        return self.loop.plan(may_wait=may_wait)

    def time_steps(self) -> None:
        """Put the device's times into StepStats from the next step on; costs a few microseconds a step."""
        self.loop.time_steps()

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """Have `tell` called, from another thread, if a step can never end; for executors that find that out."""
        self.executor.tell_if_stuck(tell)

    # ------------------------------------------------------------------------------------------------------------ end

    def close(self) -> None:
        """Abort what is left and release everything; a second call does nothing, nor does one in a forked child.

        Raises: PluginError for an observer that raised meanwhile, once all is released.
        """
        if self._is_closed or self.home.is_elsewhere:
            return
        self._is_closed = True
        try:
            self.abort(list(self.queue.live))
            self.feedback.broke_off(self.clock())
            self._listeners.notify("on_engine_stop", engine=self)
        finally:
            if self.structured_output is not None:
                self.structured_output.close()
            self.executor.close()
        if self.observers is not None:
            self.observers.check()
