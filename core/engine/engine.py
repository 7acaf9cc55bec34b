"""The engine: it puts the parts of the step loop together, and has the methods that its callers use.

An Executor computes the steps, and callers hand in token ids: there are no tensors and no text here. Nothing is
global, so several engines live side by side in a process. A step, from its plan to its commit, is in step_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hookline.core.contracts import DraftCounts, ExtensionCost, Scheduler, StepStats
from hookline.core.contracts.observer import WAITING_REASONS
from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.finish import Finisher
from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.policy import Planner
from hookline.core.engine.state import EngineState
from hookline.core.engine.step_builder import Decoding
from hookline.core.engine.step_loop import StepLoop
from hookline.core.errors import HooklineError, PluginError, RequestError
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.groups import ALL_TOKENS, CacheGroups
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.plugin.observers import Observers
from hookline.core.pooling_params import PoolingParams
from hookline.core.request_options import PLAIN, RequestOptions
from hookline.core.requests.admission import EngineLimits, admit, check_room
from hookline.core.requests.late_input import HeldUp, LateInput
from hookline.core.requests.request import Request, Watcher
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
        late: LateInput | None = None,
        groups: CacheGroups = ALL_TOKENS,
        decoding: Decoding | None = None,
    ) -> None:
        self.groups, self.pool, self.policy = groups, pool, policy
        self.model_name, self.job_folder = model_name, job_folder
        self.state = state = EngineState(
            executor,
            pool,
            limits,
            groups,
            shares_prefixes=shares_prefixes,
            observers=observers or Observers(),
            late=late,
            decoding=decoding or Decoding(),
        )
        self.queue, self.cache, self.watch, self.ledger = state.queue, state.cache, state.watch, state.ledger
        self.observers = state.observers
        name = f"scheduler '{policy}'" + (f" of {origin}" if origin else "")
        self.planner = Planner(state, scheduler, name)
        self.dispatcher = Dispatcher(state)
        self._finisher = Finisher(state, self.dispatcher, self.planner.feedback, names or {})
        self.loop = StepLoop(state, self.planner, self.dispatcher, self._finisher)
        self.served, self.time_limits = self.planner.served, state.time_limits
        self._next_id = 0
        self._is_closed = False
        self.home = Home()
        self.observers.notify("on_engine_start", engine=self)

    # --------------------------------------------------------------------------------------- what may be replaced

    @property
    def limits(self) -> EngineLimits:
        """The bounds of requests that the engine can serve: lengths, options, plugins."""
        return self.state.limits

    @property
    def scheduler(self) -> Scheduler:
        """The scheduling policy; may be replaced while no step is in flight."""
        return self.planner.scheduler

    @scheduler.setter
    def scheduler(self, policy: Scheduler) -> None:
        """Plan with another policy from the next step on; errors still have the first policy's name.

        Raises: HooklineError while a step is in flight.
        """
        if self.loop.in_flight is not None:
            raise HooklineError("a step is in flight; replace the scheduler when the engine has no work")
        self.planner.follow(policy)

    @property
    def executor(self) -> Executor:
        """The executor that computes the steps; may be replaced between steps."""
        return self.state.executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        """Have another executor compute the steps from the next one on."""
        self.state.use_executor(executor)

    @property
    def clock(self) -> Callable[[], float]:
        """Returns seconds; all times of the engine are on this clock. May be replaced before the first request."""
        return self.state.now

    @clock.setter
    def clock(self, now: Callable[[], float]) -> None:
        """Read all times from another clock."""
        self.state.use_clock(now)

    @property
    def sleep(self) -> Callable[[float], None]:
        """Waits for some seconds when a policy asks to; replaced where the engine's driver has work to do meanwhile."""
        return self.state.sleep

    @sleep.setter
    def sleep(self, sleep: Callable[[float], None]) -> None:
        """Wait by calling another function."""
        self.state.use_sleep(sleep)

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
        counts = len(self.queue.waiting) - num_preempted, num_preempted, len(self.queue.compiling)
        return dict(zip(WAITING_REASONS, counts, strict=True))

    @property
    def late_work(self) -> Mapping[str, int]:
        """See EngineView."""
        return self.executor.late_work

    @property
    def extension_costs(self) -> Mapping[str, ExtensionCost]:
        """See EngineView."""
        return self.limits.extensions.costs

    @property
    def speculation(self) -> DraftCounts | None:
        """See EngineView."""
        counts: DraftCounts | None = self.state.decoding.counts
        return counts

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
        return self.state.last_stats

    # ------------------------------------------------------------------------------------------------------- requests

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        options: RequestOptions = PLAIN,
        arrival_s: float | None = None,
        watcher: Watcher | None = None,
        like: int | None = None,
        pooling: PoolingParams | None = None,
    ) -> int:
        """Queue a request and return its id.

        arrival_s: when it came, on `clock`; None is now.
        watcher: sees each of its tokens when it is known, and can end it.
        like: a queued completion of the same prompt that differs only in its seed; its prepared parameters are reused.
        pooling: it ends with a vector once its prompt is computed, and draws nothing; params are ignored then.
        Raises: RequestError if it can never be served: empty, over-long, or with a token id outside the vocabulary; or
        if any of its arguments is wrong.
        """
        self.home.check()
        if self._is_closed:
            raise HooklineError("the engine is closed; make a new one")
        if not self.queue.live:
            self.planner.reset_wait()
        arrival_s = self.state.now() if arrival_s is None else arrival_s
        other = None if like is None else self.queue.live[like]
        options = options.checked(self.limits.tag_keys) if other is None else other.options
        request = admit(
            self.limits,
            self._next_id,
            prompt_token_ids,
            params,
            prompt=prompt,
            options=options,
            arrival_s=arrival_s,
            watcher=watcher,
            like=other,
            pooling=pooling,
        )
        self._next_id += 1
        self._enqueue(request)
        if self.observers.hears("on_request_begin"):
            self.observers.notify("on_request_begin", info=request.begin())
        if options.timeout_s is not None:
            self.time_limits.add(arrival_s, request.id, options.timeout_s, self.queue.live)
        return request.id

    def _enqueue(self, request: Request) -> None:
        """Put a new request into the queue, or hold it back until what it needs is made ready."""
        if request.late is None:
            self.queue.add(request)
            return
        if self.state.late is None:
            raise RequestError(f"sampling.{request.late.field}: this engine has no {request.late.needs}")
        if self.state.late.open(request.id, request.late, request.tags):
            self.queue.add(request)
        else:
            self.queue.hold_back(request)

    def let_in_compiled(self) -> None:
        """Queue the requests that waited to be made ready, and finish those that could not be.

        A request that was held up by others (HeldUp) ends with reason ABORT, not ERROR.
        """
        assert self.state.late is not None
        is_idle = len(self.queue.compiling) == len(self.queue) and self.loop.in_flight is None
        for id_, error in self.state.late.opened(is_idle=is_idle):
            request = self.queue.compiling.get(id_)
            if request is not None and error:
                reason = FinishReason.ABORT if isinstance(error, HeldUp) else FinishReason.ERROR
                self._finisher.finish(request, reason, error)
            elif request is not None:
                self.queue.let_in(request)
        self.state.announce()

    def check_room(self, num_requests: int = 1) -> None:
        """Check max_queued_requests and max_queued_tokens, which `add` itself does not.

        Raises: QueueFullError if there is no room for this many more until others have started; RequestError if there
        never can be.
        """
        check_room(self.limits, self.queue, num_requests)

    def refuse(
        self,
        prompt_token_ids: Sequence[int],
        error: RequestError,
        prompt: str | None = None,
        options: RequestOptions = PLAIN,
    ) -> RequestOutput:
        """The output of a request that `add` refused; observers see it too. options: as they were given."""
        options = options.valid_part(self.limits.tag_keys)
        output = RequestOutput(
            self._next_id,
            prompt,
            list(prompt_token_ids),
            [],
            FinishReason.ERROR,
            error=str(error),
            tags=dict(options.tags or {}),
            priority=options.priority,
            deadline_s=options.deadline_s,
            refusal=error.reason,
            is_fault=isinstance(error, PluginError),
        )
        self._next_id += 1
        self.observers.notify("on_request_end", output=output)
        return output

    def abort(self, ids: Iterable[int], *, reason: FinishReason = FinishReason.ABORT) -> list[RequestOutput]:
        """Finish requests, waiting or running, and give their blocks back; unknown ids are ignored.

        reason: STOP if the caller found a stop string in the text.
        """
        finished = self.state.finished
        num_before = len(finished)
        for id_ in dict.fromkeys(ids):
            if (request := self.queue.live.get(id_)) is not None:
                self._finisher.finish(request, reason)
        self.state.announce()
        self.loop.tell_finished()
        outputs = finished[num_before:]
        del finished[num_before:]  # the next step returns them only if the policy failed when it was told
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
        make no progress. LostStep if the step could not be computed: its requests end. Any other error ends all
        requests. The next step returns the requests that ended, with finish_reason "error". A fault of single requests
        ends these alone, and nothing is raised.
        """
        self.home.check()
        queue, loop = self.queue, self.loop
        if self.time_limits:
            self._finisher.finish_overdue()
            loop.tell_finished()
        if queue.compiling:
            self.let_in_compiled()
        if len(queue) > len(queue.compiling) or loop.in_flight is not None:
            with self.watch.step():
                loop.advance()
        return self.pop_finished()

    def pop_finished(self) -> list[RequestOutput]:
        """The outputs of finished requests that no `step` has returned, e.g. because it raised; `step` calls this."""
        return self.state.pop_finished()

    def plan(self, *, may_wait: bool = True) -> CheckedPlan:
        """The scheduler's next plan, checked; waits if the plan asks to, and it may."""
        return self.loop.plan(may_wait=may_wait)

    def time_steps(self) -> None:
        """Put the device's times into StepStats from the next step on; costs a few microseconds a step."""
        self.loop.time_steps()

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """Have `tell` called, from another thread, if a step can never end; for executors that detect it."""
        self.executor.tell_if_stuck(tell)

    # ------------------------------------------------------------------------------------------------------------ end

    def close(self) -> None:
        """Abort all requests and release everything. A second call does nothing, nor does a call in a forked child.

        Raises: PluginError for an observer that raised meanwhile, once all is released.
        """
        if self._is_closed or self.home.is_elsewhere:
            return
        self._is_closed = True
        try:
            self.abort(list(self.queue.live))
            self.planner.feedback.broke_off(self.clock())
            self.observers.notify("on_engine_stop", engine=self)
        finally:
            if self.state.late is not None:
                self.state.late.close()
            self.state.decoding.close()
            self.executor.close()
        self.observers.check()
