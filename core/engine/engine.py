"""The step loop: ask the scheduler, check its plan, carry it out, commit the tokens.

Knows no model, no tensor and no tokenizer; an Executor computes steps. One engine is one object: nothing is global, so
several live side by side in a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from hookline.core.contracts import Plan, Scheduler, SchedulerView, StepStats
from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.plan_check import CheckedPlan, check_plan
from hookline.core.engine.step_builder import Dispatched, scored_chunks
from hookline.core.errors import PASSES, HooklineError, PlanError, PluginError, RequestError
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.budget import Ledger
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.plugin.blame import with_place
from hookline.core.plugin.observers import Observers
from hookline.core.requests.admission import EngineLimits, admit, check_room, checked_timeout_s
from hookline.core.requests.request import Request, Watcher
from hookline.core.requests.request_queue import RequestQueue, Views
from hookline.core.sampling_params import SamplingParams
from hookline.core.step.executor import Executor
from hookline.core.step.timing import StepWatch
from hookline.core.util.arrays import IntArray, no_ints

MAX_FRUITLESS_PLANS = 1000
"""Plans in a row that bring no request further than it ever was, after which a policy counts as stuck."""
MIN_DEADLINES_DROPPED = 64
"""Time limits of ended requests are dropped once this many more are kept than two for each live request."""
MAX_IDLE_S = 1.0
"""Longest single wait a plan can ask for."""
PARTS = ("plan", "dispatch", "launch", "wait", "commit")
"""The parts of a step on the host."""


@dataclass(frozen=True)
class _InFlight:
    """A launched step whose tokens are not known yet.

    started is on the engine's clock; host_s: seconds of the parts of its step so far.
    """

    plan: CheckedPlan
    dispatched: Dispatched
    handle: Any
    started: float
    host_s: Mapping[str, float]


class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe: one caller drives it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        pool: BlockPool,
        limits: EngineLimits,
        *,
        policy: str = "scheduler",
        origin: str = "",
        observers: Observers | None = None,
        shares_prefixes: bool = False,
        model_name: str = "",
    ) -> None:
        self.scheduler, self.executor, self.pool, self.limits = scheduler, executor, pool, limits
        self.policy, self.model_name = policy, model_name
        self._scheduler_name = f"scheduler '{policy}'" + (f" of {origin}" if origin else "")
        self.observers = observers
        self.queue = RequestQueue(limits.plan.max_num_seqs, limits.max_len)
        self.clock: Callable[[], float] = time.monotonic
        """All times are its; another one may take its place before the first request."""
        self.sleep: Callable[[float], None] = time.sleep
        """How to wait when a policy asks to; replaced where the engine's driver has other things to do meanwhile."""
        self.cache = KVCacheManager(pool, self.queue.table)
        self.dispatcher = Dispatcher(
            self.cache, self.queue, limits.plan.max_num_seqs, shares_prefixes=shares_prefixes, now=self._now
        )
        self.last_stats: StepStats | None = None
        self.watch = StepWatch(self._now)
        self._next_id = 0
        self._deadlines: list[tuple[float, int, float]] = []
        """A heap of (when, request, its timeout_s)."""
        self._ended: list[RequestOutput] = []
        """Outputs of requests that ended outside a commit; the next step returns them."""
        self._in_flight: _InFlight | None = None
        self._fruitless = 0
        self._idle_s = 0.0
        self._is_closed = False
        self._notify("on_engine_start", engine=self)

    # ------------------------------------------------------------------------------------- EngineView, for observers

    @property
    def num_running(self) -> int:
        """See EngineView."""
        return len(self.queue.running)

    @property
    def num_waiting(self) -> int:
        """See EngineView."""
        return len(self.queue.waiting)

    @property
    def num_blocks(self) -> int:
        """See EngineView."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """See EngineView."""
        return self.pool.num_free

    # ------------------------------------------------------------------------------------------------------- requests

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        arrival_s: float | None = None,
        watcher: Watcher | None = None,
        like: int | None = None,
    ) -> int:
        """Queue a request and return its id.

        priority: for schedulers that heed it; lower is more urgent. arrival_s: when it came, on `clock`; None is now.
        timeout_s: ends it so long after its arrival, with finish_reason "abort" and the reason.
        watcher: sees each of its tokens when it is known, and can end it.
        like: a queued completion of the same prompt, which differs in its seed alone; saves making the same again.
        Raises: RequestError if it can never be served: empty, over-long, or with a token id outside the vocabulary.
        """
        if self._is_closed:
            raise HooklineError("the engine is closed; make a new one")
        timeout_s = checked_timeout_s(timeout_s)
        arrival_s = self.clock() if arrival_s is None else arrival_s
        options: dict[str, Any] = {"prompt": prompt, "priority": priority, "arrival_s": arrival_s, "watcher": watcher}
        options["like"] = None if like is None else self.queue.live[like]
        request = admit(self.limits, self._next_id, prompt_token_ids, params, **options)
        self._next_id += 1
        self.queue.add(request)
        if timeout_s is not None:
            self._drop_met_deadlines()
            heappush(self._deadlines, (arrival_s + timeout_s, request.id, timeout_s))
        return request.id

    def _drop_met_deadlines(self) -> None:
        """Forget the time limits of requests that have ended, once these are most of all that is kept."""
        if len(self._deadlines) > MIN_DEADLINES_DROPPED + 2 * len(self.queue.live):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.queue.live]
            heapify(self._deadlines)

    def _now(self) -> float:
        return self.clock()

    def check_room(self, num_requests: int = 1) -> None:
        """Check max_queued_requests and max_queued_tokens, which `add` itself does not.

        Raises: QueueFullError if this many more requests must wait until others have started.
        """
        check_room(self.limits, self.queue, num_requests)

    def refuse(self, prompt_token_ids: Sequence[int], error: RequestError, prompt: str | None = None) -> RequestOutput:
        """The output of a request that `add` refused; observers see it too."""
        output = RequestOutput(self._next_id, prompt, list(prompt_token_ids), [], FinishReason.ERROR, error=str(error))
        self._next_id += 1
        self._notify("on_request_end", output=output)
        return output

    def abort(self, ids: Iterable[int]) -> list[RequestOutput]:
        """End requests wherever they stand and give their blocks back; unknown ids are ignored."""
        live = [self.queue.live[id_] for id_ in ids if id_ in self.queue.live]
        outputs = [self._end(request, FinishReason.ABORT) for request in live]
        self._notify_ends(outputs)
        return outputs

    def time_steps(self) -> None:
        """Put the device's times into StepStats from the next step on; costs a few microseconds a step."""
        assert self._in_flight is None, "a step is in flight"
        if self.watch.clock is None:
            self.watch.clock = self.executor.time_steps()

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self.queue) > 0 or self._in_flight is not None

    # ----------------------------------------------------------------------------------------------------------- step

    def step(self) -> list[RequestOutput]:
        """Plan and launch one step, then commit the step before it (or, without overlap, this one).

        Returns the requests that ended since the step before.
        Raises: PlanError if the scheduler breaks a rule; nothing of its plan is carried out then. Any other error ends
        all requests; the next step returns them with finish_reason "error".
        """
        if self._deadlines:
            self._end_late_ones()
        outputs: list[RequestOutput] = []
        if self.has_work:
            with self.watch.step():
                outputs = self._advance()
        ended, self._ended = self._ended, []
        return ended + outputs

    def _end_late_ones(self) -> None:
        late, now_s = [], self.clock()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, id_, timeout_s = heappop(self._deadlines)
            request = self.queue.live.get(id_)
            if request is not None:
                late.append(self._end(request, FinishReason.ABORT, f"timeout_s={timeout_s} passed before it was done"))
        self._ended += late
        self._notify_ends(late)

    def _advance(self) -> list[RequestOutput]:
        before = self._in_flight
        plan = self._plan_ahead() if before is not None else self.plan()
        if plan is None:
            return self._collect()
        if not plan.computes and not plan.preempt:
            return []
        try:
            launched = self._launch(plan)
            outputs = self._collect() if before is not None else []
            self._in_flight = launched
            return outputs if self.limits.overlap else outputs + self._collect()
        except BaseException as error:
            self._abandon(error)
            raise

    def _plan_ahead(self) -> CheckedPlan | None:
        """The plan of the step after the one in flight; None if that one must be committed first.

        Planning knows lengths and not values, so a preempted request, which computes its last token again, has to wait
        for it. And what is about to end may hold just the blocks that the policy misses.
        """
        if not self.queue.waiting and not self.queue.running:
            return None
        try:
            plan = self.plan(may_wait=False)
        except PlanError:
            return None
        return plan if plan.computes and not plan.preempt else None

    def _launch(self, plan: CheckedPlan) -> _InFlight:
        started = self.clock()
        with self.watch.part("dispatch"):
            dispatched = self.dispatcher.carry_out(plan)
            self._check_progress(dispatched)
        with self.watch.part("launch"):
            handle = self.executor.launch(dispatched.step) if plan.computes else None
            self.dispatcher.expect(dispatched.sampled)
        return _InFlight(plan, dispatched, handle, started, self.watch.take())

    def _collect(self) -> list[RequestOutput]:
        """Commit the step in flight."""
        launched = self._in_flight
        assert launched is not None, "no step is in flight"
        self._in_flight = None
        outputs: list[RequestOutput] = []
        try:
            with self.watch.part("wait"):
                tokens = self.executor.collect(launched.handle) if launched.plan.computes else no_ints()
            with self.watch.part("commit"):
                if tokens.ndim == 2:
                    tokens = self._keep_scores(launched.dispatched, tokens)
                self._note_first_tokens(launched)
                entries_N, tokens_N = self.queue.table.commit(launched.dispatched.sampled, tokens)
                outputs += self._commit(entries_N, tokens_N)
                self._notify_ends(outputs)
            self._report(launched, len(entries_N))
        except BaseException as error:
            self._ended += outputs
            self._abandon(error)
            raise
        return outputs

    def _keep_scores(self, dispatched: Dispatched, rows: IntArray) -> IntArray:
        """Give the requests their log-probabilities; returns the sampled tokens."""
        ids = dispatched.sampled.ids_N.tolist()
        for id_, row in zip(ids, rows, strict=False):
            request = self.queue.live.get(id_)
            if request is not None and request.scores is not None:
                request.scores.add(row)
        start = len(ids)
        for _, request, first, count in scored_chunks(dispatched.chunks):
            assert request.scores is not None
            request.scores.add_prompt(first, rows[start : start + count])
            start += count
        return rows[: len(ids), 0]

    def _note_first_tokens(self, launched: _InFlight) -> None:
        """Only a prompt's last chunk samples a first token; among the sampled rows, chunks follow the decodes."""
        for id_ in launched.dispatched.sampled.ids_N[len(launched.plan.decode) :].tolist():
            request = self.queue.live.get(id_)
            if request is not None and request.first_token_s is None:
                request.first_token_s = self.clock()

    def _abandon(self, error: BaseException) -> None:
        """End all requests after a step broke off half-way, and empty the cache: blocks it was to fill hold nothing."""
        self._in_flight = None
        if self.watch.clock is not None:
            self.watch.clock.clear()
        cause = f"the engine broke off: {str(error) or type(error).__name__}"
        broken = [self._end(request, FinishReason.ERROR, cause) for request in list(self.queue.live.values())]
        self._ended += broken
        self.pool.reset_cache()
        with suppress(PluginError):  # the error that led here is the one to see
            self._notify_ends(broken)

    def plan(self, *, may_wait: bool = True) -> CheckedPlan:
        """The scheduler's next plan, checked; waits if the plan asks to, and it may."""
        with self.watch.part("plan"):
            plan, checked = self._ask()
        if checked.computes or checked.preempt:
            self._idle_s = 0.0
        elif may_wait:
            self._wait(plan.idle_s)
        return checked

    def _ask(self) -> tuple[Plan, CheckedPlan]:
        queue, limits = self.queue, self.limits.plan
        budget, prefilling = Ledger(self.cache, queue), queue.prefilling()
        waiting, running = Views(queue.waiting), Views(queue.running)
        num_steps = queue.num_steps_without_decode
        view = SchedulerView(waiting, running, prefilling, limits, budget, self.clock(), num_steps)
        try:
            plan = self.scheduler.plan(view)
            return plan, check_plan(plan, queue, Ledger(self.cache, queue), limits, self.policy)
        except (PlanError, *PASSES):
            raise
        except BaseException as error:
            raise PlanError(f"{self._scheduler_name} fails in plan: {with_place(error)}") from error

    def _check_progress(self, dispatched: Dispatched) -> None:
        """Let a policy preempt and recompute for a while, but not for ever."""
        self._fruitless = 0 if dispatched.got_further else self._fruitless + 1
        if self._fruitless > MAX_FRUITLESS_PLANS:
            raise self._stuck(f"after {MAX_FRUITLESS_PLANS} plans in a row no request has got any further")

    def _wait(self, idle_s: float) -> None:
        if not idle_s > 0:
            waiting, running = len(self.queue.waiting), len(self.queue.running)
            load = f"{waiting} requests waiting and {running} running"
            raise self._stuck(f"plans nothing with {load}; set idle_s to wait")
        if self._idle_s > self.limits.stall_timeout_s:
            raise self._stuck(f"has waited longer than engine.stall_timeout_s={self.limits.stall_timeout_s}")
        idle_s = min(idle_s, MAX_IDLE_S)
        self._idle_s += idle_s
        self.sleep(idle_s)

    def _stuck(self, message: str) -> PlanError:
        return PlanError(f"scheduler '{self.policy}' makes no progress: {message}")

    def _commit(self, entries_N: IntArray, tokens_N: IntArray) -> list[RequestOutput]:
        """Act on new tokens; in Python only for requests that filled a block, are watched, or may have their last."""
        table = self.queue.table
        self.cache.cache_filled_blocks(entries_N)
        places = table.to_look_at(entries_N, tokens_N)
        looked_at = zip(list(table.requests(entries_N[places])), tokens_N[places].tolist(), strict=True)
        ends = [(request, self._seen_end_of(request, token_id)) for request, token_id in looked_at]
        return [self._end(request, reason) for request, reason in ends if reason is not None]

    def _seen_end_of(self, request: Request, token_id: int) -> FinishReason | None:
        """Why a request ends with this token, after its watcher saw it."""
        reason = self._end_of(request, token_id)
        if request.watcher is None:
            return reason
        request.stop_string = request.watcher.see(token_id, reason)
        return reason if request.stop_string is None else FinishReason.STOP

    def _end_of(self, request: Request, token_id: int) -> FinishReason | None:
        if token_id in request.stop_ids and request.num_known_outputs >= request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_known_outputs >= request.max_tokens else None

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        self.dispatcher.retire(request)
        self.queue.remove(request)
        return request.output(reason, self.clock(), error)

    def _notify_ends(self, outputs: Iterable[RequestOutput]) -> None:
        if self.observers is not None:
            for output in outputs:
                self.observers.notify("on_request_end", output=output)

    def _report(self, launched: _InFlight, num_generated_tokens: int) -> None:
        plan, dispatched = launched.plan, launched.dispatched
        # launched.host_s comes last: it replaces the time of a plan ahead that was not launched.
        parts = {**self.watch.take(), **launched.host_s}
        clock = self.watch.clock
        device = clock.read() if clock is not None and plan.computes else None
        self.last_stats = StepStats(
            num_running=len(self.queue.running),
            num_waiting=len(self.queue.waiting),
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            num_prefill_tokens=dispatched.num_prefill_tokens,
            num_decode_tokens=len(plan.decode),
            num_cached_tokens=dispatched.num_cached_tokens,
            num_preemptions=len(plan.preempt),
            num_prompt_tokens=dispatched.num_prompt_tokens,
            num_generated_tokens=num_generated_tokens,
            step_s=self.clock() - launched.started,
            host_s=sum(parts.values()) - parts["wait"] - (device.device_s if device and device.on_host else 0.0),
            **{f"{part}_s": parts[part] for part in PARTS},
            device_s=None if device is None else device.device_s,
            idle_s=None if device is None else device.idle_s,
        )
        self._notify("on_step_end", stats=self.last_stats)

    # ------------------------------------------------------------------------------------------------------------ end

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """Have `tell` called, from another thread, if a step can never end; for executors that find that out."""
        self.executor.tell_if_stuck(tell)

    def close(self) -> None:
        """Abort what is left and release everything; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.abort(list(self.queue.live))
            self._notify("on_engine_stop", engine=self)
        finally:
            self.executor.close()

    def _notify(self, hook: str, **arguments: Any) -> None:
        if self.observers is not None:
            self.observers.notify(hook, **arguments)
