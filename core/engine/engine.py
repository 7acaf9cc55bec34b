"""The step loop: ask the scheduler, check its plan, carry it out, commit the tokens.

Knows no model, no tensor and no tokenizer; an Executor computes steps. One engine is one object: nothing is global, so
several live side by side in a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hookline.core.contracts import Scheduler, StepStats, TappedStates
from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.draws import advance_grammars, keep_scores
from hookline.core.engine.ends import end_with, fault_of
from hookline.core.engine.feedback import prefilled
from hookline.core.engine.in_flight import InFlight, step_stats
from hookline.core.engine.lost_step import concerned, starting_again
from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.planning import Planner
from hookline.core.engine.step_builder import tokens_of
from hookline.core.engine.time_limits import TimeLimits
from hookline.core.errors import (
    HooklineError,
    LostStep,
    PlanError,
    PluginError,
    RequestError,
    RequestFault,
    show_traceback,
)
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.budget import Ledger
from hookline.core.kv_cache.group_budget import GroupedLedger
from hookline.core.kv_cache.group_manager import GroupedCacheManager
from hookline.core.kv_cache.groups import ALL_TOKENS, CacheGroups
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.plugin.observers import Observers
from hookline.core.pooling_params import PoolingParams
from hookline.core.request_info import RequestInfo
from hookline.core.requests.admission import EngineLimits, admit, check_room, checked_timeout_s
from hookline.core.requests.request import Request, Watcher
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.structured_output import StructuredOutput
from hookline.core.sampling_params import SamplingParams
from hookline.core.step.executor import Executor
from hookline.core.step.timing import StepWatch
from hookline.core.util.arrays import BoolArray, IntArray, no_ints
from hookline.core.util.process import Home


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
        job_folder: Path | None = None,
        structured_output: StructuredOutput | None = None,
        groups: CacheGroups = ALL_TOKENS,
    ) -> None:
        self.groups = groups
        self.executor, self.pool, self.limits = executor, pool, limits
        self.policy, self.model_name, self.job_folder = policy, model_name, job_folder
        self._last_end_s = 0.0
        self.observers = observers
        hears = observers.hears if observers is not None else lambda hook: False
        self._hears_begin, self._hears_first, self._hears_gaps = (
            hears(hook) for hook in ("on_request_begin", "on_first_token", "on_token_gaps")
        )
        self._hears_states = bool(limits.taps) and hears("on_hidden_states")
        self.queue = RequestQueue(limits.plan.max_num_seqs, limits.max_len)
        self.clock: Callable[[], float] = time.monotonic
        """All times are its; another one may take its place before the first request."""
        self.sleep: Callable[[float], None] = time.sleep
        """How to wait when a policy asks to; replaced where the engine's driver has other things to do meanwhile."""
        self.cache = self._make_cache()
        self.planner = Planner(
            scheduler,
            limits,
            self.queue,
            policy=policy,
            origin=origin,
            ledger=self.ledger,
            now=self._now,
            sleep=lambda seconds: self.sleep(seconds),
        )
        self.feedback, self.served = self.planner.feedback, self.planner.served
        self.dispatcher = Dispatcher(
            self.cache, self.queue, limits.plan.max_num_seqs, shares_prefixes=shares_prefixes, now=self._now
        )
        self.structured_output = structured_output
        """None: requests with structured outputs are refused."""
        self.last_stats: StepStats | None = None
        self.watch = StepWatch(self._now)
        self._next_id = 0
        self.time_limits = TimeLimits()
        self._ended: list[RequestOutput] = []
        """Outputs of requests that ended outside a commit; the next step returns them."""
        self._in_flight: InFlight | None = None
        self._lost_for_nobody = False
        """Whether the last lost step ended nobody; if the next one does no better, it ends all its requests."""
        self._is_closed = False
        self.home = Home()
        self._notify("on_engine_start", engine=self)

    @property
    def scheduler(self) -> Scheduler:
        """The policy; another one may take its place between steps."""
        return self.planner.scheduler

    @scheduler.setter
    def scheduler(self, policy: Scheduler) -> None:
        self.planner.scheduler = policy

    def _make_cache(self) -> KVCacheManager:
        if self.groups.is_plain:
            return KVCacheManager(self.pool, self.queue.table)
        return GroupedCacheManager(self.pool, self.queue.table, self.groups, self.limits.plan)

    def ledger(self) -> Ledger:
        """A fresh ledger of the pool as it is now."""
        if isinstance(self.cache, GroupedCacheManager):
            return GroupedLedger(self.cache, self.queue)
        return Ledger(self.cache, self.queue)

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
        timeout_s: ends it so long after its arrival, with finish_reason "abort" and the reason.
        watcher: sees each of its tokens when it is known, and can end it.
        like: a queued completion of the same prompt, which differs in its seed alone; saves making the same again.
        pooling: it ends with a vector once its prompt is computed, and draws nothing; params are not looked at then.
        Raises: RequestError if it can never be served: empty, over-long, or with a token id outside the vocabulary; or
        if any of its arguments is wrong.
        """
        self.home.check()
        if self._is_closed:
            raise HooklineError("the engine is closed; make a new one")
        timeout_s = checked_timeout_s(timeout_s)
        arrival_s = self.clock() if arrival_s is None else arrival_s
        other = None if like is None else self.queue.live[like]
        given = {"priority": priority, "tags": tags, "deadline_s": deadline_s, "cache_salt": cache_salt}
        info = RequestInfo.validated(**given, tag_keys=self.limits.tag_keys) if other is None else other.info
        options: dict[str, Any] = {"prompt": prompt, "info": info, "arrival_s": arrival_s, "watcher": watcher}
        options["like"], options["pooling"] = other, pooling
        request = admit(self.limits, self._next_id, prompt_token_ids, params, **options)
        self._next_id += 1
        self._enqueue(request)
        if self._hears_begin:
            self._notify("on_request_begin", info=request.begin())
        if timeout_s is not None:
            self.time_limits.add(arrival_s, request.id, timeout_s, self.queue.live)
        return request.id

    def _enqueue(self, request: Request) -> None:
        """Put a new request into the queue, once the grammar that its completion follows is there."""
        if request.constraint is None:
            self.queue.add(request)
            return
        if self.structured_output is None:
            raise RequestError("sampling.structured_outputs: this engine has no grammar back end")
        if self.structured_output.open(request.id, request.constraint):
            self.queue.add(request)
        else:
            self.queue.hold_back(request)

    def _let_in_compiled(self) -> None:
        """Queue the requests whose grammar has come, and end those whose grammar will not."""
        assert self.structured_output is not None
        is_idle = len(self.queue.compiling) == len(self.queue) and self._in_flight is None
        refused = []
        for id_, error in self.structured_output.opened(is_idle=is_idle):
            request = self.queue.compiling.get(id_)
            if request is not None and error:
                refused.append(self._end(request, FinishReason.ERROR, error))
            elif request is not None:
                self.queue.let_in(request)
        self._ended += refused
        self._notify_ends(refused)

    def _now(self) -> float:
        return self.clock()

    def check_room(self, num_requests: int = 1) -> None:
        """Check max_queued_requests and max_queued_tokens, which `add` itself does not.

        Raises: QueueFullError if this many more requests must wait until others have started.
        """
        check_room(self.limits, self.queue, num_requests)

    def refuse(
        self, prompt_token_ids: Sequence[int], error: RequestError, prompt: str | None = None, **said: Any
    ) -> RequestOutput:
        """The output of a request that `add` refused; observers see it too. said: its INFO_KEYS, if they were given."""
        info = RequestInfo.of_valid(said, self.limits.tag_keys)
        output = RequestOutput(
            self._next_id,
            prompt,
            list(prompt_token_ids),
            [],
            FinishReason.ERROR,
            error=str(error),
            tags=dict(info.tags),
            priority=info.priority,
            deadline_s=info.deadline_s,
            refusal=error.reason,
        )
        self._next_id += 1
        self._notify("on_request_end", output=output)
        return output

    def abort(self, ids: Iterable[int], *, reason: FinishReason = FinishReason.ABORT) -> list[RequestOutput]:
        """End requests wherever they stand and give their blocks back; unknown ids are ignored.

        reason: STOP if the caller found a stop string in the text.
        """
        live = [self.queue.live[id_] for id_ in dict.fromkeys(ids) if id_ in self.queue.live]
        outputs = [self._end(request, reason) for request in live]
        self._notify_ends(outputs)
        self._tell_ended()
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
        Raises: PlanError if the scheduler breaks a rule; nothing of its plan is carried out then. LostStep if the step
        could not be computed: its requests end. Any other error ends all requests. The next step returns those that
        ended, with finish_reason "error". What fails for single requests ends them alone, and nothing is raised.
        """
        self.home.check()
        if self.time_limits:
            self._end_late_ones()
        outputs: list[RequestOutput] = []
        if self.queue.compiling:
            self._let_in_compiled()
        if len(self.queue) > len(self.queue.compiling) or self._in_flight is not None:
            with self.watch.step():
                outputs = self._advance()
        ended, self._ended = self._ended, []
        return ended + outputs

    def _end_late_ones(self) -> None:
        live = self.queue.live
        late = [
            self._end(live[id_], FinishReason.ABORT, f"timeout_s={timeout_s} passed before it was done")
            for id_, timeout_s in self.time_limits.passed(self.clock())
            if id_ in live
        ]
        self._ended += late
        self._notify_ends(late)
        self._tell_ended()

    def _tell_ended(self) -> None:
        try:
            self.feedback.tell_ended(self.clock())
        except PluginError as error:
            self._abandon(error)
            raise

    def _advance(self) -> list[RequestOutput]:
        before = self._in_flight
        if self.feedback.is_wanted and before is None:
            self.time_steps()
        plan = self._plan_ahead() if before is not None else self.plan()
        if plan is None:
            return self._collect()
        if not plan.computes and not plan.preempt:
            self._give_up()
            return []
        outputs: list[RequestOutput] = []
        try:
            launched = self._launch(plan)
            release = partial(self._release, launched) if len(launched.dispatched.step.masked_draws) else None
            if before is not None:
                outputs = self._collect(release)
            elif release is not None:
                release()
            if release is not None:
                outputs += self._end_faulty(launched)
            self._in_flight = launched
            return outputs if self.limits.overlap else outputs + self._collect()
        except LostStep as error:
            if not error.ends_engine:
                self._ended += outputs
                return self._lose(plan, error)
            self._abandon(error)
            error.args = (f"{error}. The engine has ended; make a new one",)
            raise
        except BaseException as error:
            self._abandon(error)
            raise

    def _plan_ahead(self) -> CheckedPlan | None:
        """The plan of the step after the one in flight; None if that one must be committed first.

        Planning knows lengths and not values, so a preempted request, which computes its last token again, has to wait
        for it. So does a request whose processors follow its tokens, and a policy that lacks blocks, since a request
        about to end may hold them.
        """
        if self.dispatcher.arguments.awaited or not (self.queue.waiting or self.queue.running):
            return None
        try:
            plan = self.plan(may_wait=False)
        except PlanError:
            return None
        if plan.computes and not plan.preempt:
            return plan
        self._give_up()
        return None

    def _give_up(self) -> None:
        """Nothing is done of the newest plan."""
        try:
            self.feedback.give_up(self.clock())
        except PluginError as error:
            self._abandon(error)
            raise

    def _launch(self, plan: CheckedPlan) -> InFlight:
        started = self.clock()
        with self.watch.part("dispatch"):
            dispatched = self.dispatcher.carry_out(plan)
            self.planner.check_progress(got_further=dispatched.got_further)
        with self.watch.part("launch"):
            handle = self.executor.launch(dispatched.step) if plan.computes else None
            num_context_tokens = self._context_tokens(plan)
            if not len(dispatched.step.masked_draws):
                self.dispatcher.expect(dispatched.sampled)
                if dispatched.pooled:
                    self.dispatcher.finish_pooled(dispatched.pooled)
        tapped = tokens_of(self.queue.table, plan.decode, dispatched.chunks) if self._hears_states else None
        return InFlight(plan, dispatched, handle, started, self.watch.take(), num_context_tokens, tapped)

    def _context_tokens(self, plan: CheckedPlan) -> int:
        """Tokens that the decodes of a step read, if anybody wants to know."""
        if not self.feedback.is_wanted:
            return 0
        return int(self.queue.table.num_computed_tokens_S[plan.decode].sum())

    def _release(self, launched: InFlight) -> None:
        """Give a launched step the masks that its draws wait for, all tokens before them being known by now.

        The device waits meanwhile, once its forward pass is over: nothing is done here that can be done later.
        """
        assert self.structured_output is not None
        step, sampled = launched.dispatched.step, launched.dispatched.sampled
        with self.watch.part("release"):
            live = self.queue.live
            requests = [live.get(id_) for id_ in sampled.ids_N[step.masked_draws].tolist()]  # some may have ended
            constraints = [None if request is None else request.constraint for request in requests]
            self.structured_output.fill(constraints, self.executor.mask_rows(len(requests)))
            self.executor.release(launched.handle, len(requests))
            self.dispatcher.expect(self.queue.table.still_there(sampled))
            if launched.dispatched.pooled:
                self.dispatcher.finish_pooled(launched.dispatched.pooled)
        launched.host_s["launch"] += self.watch.seconds.pop("release")

    def _end_faulty(self, launched: InFlight) -> list[RequestOutput]:
        """End the requests that have no mask because of a fault; what is drawn for them is dropped."""
        ids = launched.dispatched.sampled.ids_N[launched.dispatched.step.masked_draws].tolist()
        requests = [request for id_ in ids if (request := self.queue.live.get(id_)) is not None]
        faulty = [request for request in requests if fault_of(request) is not None]
        outputs = [self._end(request, FinishReason.ERROR, fault_of(request)) for request in faulty]
        self._notify_ends(outputs)
        return outputs

    def _collect(self, release: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Commit the step in flight. release: what the next step's draws wait for, called as soon as it can be.

        Raises: LostStep if that fails; the step in flight is committed all the same.
        """
        launched = self._in_flight
        assert launched is not None, "no step is in flight"
        self._in_flight = None
        outputs: list[RequestOutput] = []
        lost: LostStep | None = None
        table = self.queue.table
        try:
            with self.watch.part("wait"):
                tokens = self.executor.collect(launched.handle) if launched.plan.computes else no_ints()
            with self.watch.part("advance"):
                if tokens.ndim == 2:
                    tokens = keep_scores(self.queue.live, launched.dispatched, tokens)
                entries_N, tokens_N = table.commit(launched.dispatched.sampled, tokens)
                is_over_N = None
                if table.num_constrained:
                    is_over_N = advance_grammars(self.structured_output, table, entries_N, tokens_N)
            if release is not None:
                try:
                    release()
                except LostStep as error:
                    lost = error
            with self.watch.part("commit"):
                if launched.tapped is not None and launched.plan.computes:
                    states = self.executor.collect_states(launched.handle)
                    self._notify("on_hidden_states", states=TappedStates(*launched.tapped, states))
                self._note_first_tokens(launched)
                kept = list(table.requests(entries_N)) if self._counts_tokens else []
                if self._hears_gaps:
                    self._tell_gaps(entries_N)
                outputs += self._commit(entries_N, tokens_N, is_over_N)
                if launched.dispatched.pooled:
                    outputs += self._end_pooled(launched)
                self._notify_ends(outputs)
            self._report(launched, len(entries_N))
            if self._counts_tokens:
                self._tell_committed(launched, kept)
        except BaseException as error:
            self._ended += outputs
            self._abandon(error)
            raise
        if lost is not None:
            self._ended += outputs
            raise lost
        return outputs

    @property
    def _counts_tokens(self) -> bool:
        """Whether the policy wants to know whose tokens a step was."""
        return self.feedback.is_wanted or self.served.is_wanted

    def _tell_committed(self, launched: InFlight, kept: Sequence[Request]) -> None:
        """Tell the policy of a step. kept: the requests that keep a token of it, those that decoded first."""
        plan, dispatched, now_s = launched.plan, launched.dispatched, self.clock()
        if self.served.is_wanted:
            new_tokens = zip(dispatched.chunks, dispatched.num_new_tokens, strict=True)
            self.served.add(((chunk[0], num_tokens) for chunk, num_tokens in new_tokens), kept)
        if self.feedback.is_wanted:
            chunked = {request.id for request, _, _ in dispatched.chunks}
            self.feedback.committed(
                plan.asked,
                now_s,
                prefilled=prefilled(dispatched, kept),
                decoded=[request.view for request in kept if request.id not in chunked],
                preempted=[request.view for request in plan.preempt],
                num_decodes=len(plan.decode),
                num_context_tokens=launched.num_context_tokens,
                busy_s=now_s - max(launched.started, self._last_end_s),
                device_s=None if self.last_stats is None else self.last_stats.device_s,
            )
        self._last_end_s = now_s

    def _end_pooled(self, launched: InFlight) -> list[RequestOutput]:
        """End the requests whose vectors a step brought, but for those that have left since."""
        vectors, ended = self.executor.collect_vectors(launched.handle), []
        for request, vector in zip(launched.dispatched.pooled, vectors, strict=True):
            if request.id in self.queue.live:
                assert request.pooling is not None
                request.vector, fault = request.pooling.kept(vector)
                ended.append(self._end(request, FinishReason.ERROR if fault else FinishReason.STOP, fault))
        return ended

    def _note_first_tokens(self, launched: InFlight) -> None:
        """Only a prompt's last chunk samples a first token; among the sampled rows, chunks follow the decodes."""
        for id_ in launched.dispatched.sampled.ids_N[len(launched.plan.decode) :].tolist():
            request = self.queue.live.get(id_)
            if request is not None and request.first_token_s is None:
                request.first_token_s = now_s = self.clock()
                if self._hears_first:
                    self._notify("on_first_token", info=request.begin(), first_token_s=now_s)

    def _lose(self, plan: CheckedPlan, error: LostStep) -> list[RequestOutput]:
        """A plan was launched in vain: end those that its fault concerns, and have the others compute it again.

        Returns the requests that ended. Raises: the error, unless it concerns single requests.
        """
        self.watch.take()
        inside = self.dispatcher.lose(plan)
        outputs = self._collect() if self._in_flight is not None else []
        if self.watch.clock is not None:
            self.watch.clock.clear()
        inside = [request for request in inside if request.id in self.queue.live]
        ending = concerned(error, inside)
        if not ending and self._lost_for_nobody:
            ending = inside
        self._lost_for_nobody = not ending
        text = f"{error}" if isinstance(error, RequestFault) else f"the engine lost a step: {error}"
        ended = [self._end(request, FinishReason.ERROR, f"request {request.id}: {text}") for request in ending]
        self.dispatcher.preempt(starting_again(error, inside, self.queue.running.values()))
        self.feedback.give_up(self.clock())
        self._notify_ends(ended)
        if isinstance(error, RequestFault):
            show_traceback(error)
            return outputs + ended
        self._ended += outputs + ended
        error.args = (f"{error}. The requests of this step have ended, the engine goes on",)
        error.ended = frozenset(output.request_id for output in ended)
        raise error

    def _abandon(self, error: BaseException) -> None:
        """End all requests after a step broke off half-way, and empty the cache: blocks it was to fill hold nothing."""
        self._in_flight = None
        if self.watch.clock is not None:
            self.watch.clock.clear()
        cause = f"the engine broke off: {str(error) or type(error).__name__}"
        broken = [self._end(request, FinishReason.ERROR, cause) for request in list(self.queue.live.values())]
        self._ended += broken
        self.pool.reset_cache()
        self.feedback.broke_off(self.clock())
        self._notify_ends(broken)

    def plan(self, *, may_wait: bool = True) -> CheckedPlan:
        """The scheduler's next plan, checked; waits if the plan asks to, and it may."""
        with self.watch.part("plan"):
            try:
                plan, checked = self.planner.ask()
            except PlanError:
                raise
            except PluginError as error:  # the policy failed when it was told that its plan came to nothing
                self._abandon(error)
                raise
        if checked.computes or checked.preempt:
            self.planner.computes()
        elif may_wait:
            self.planner.wait(plan.idle_s)
        return checked

    def _commit(
        self, entries_N: IntArray, tokens_N: IntArray, is_over_N: BoolArray | None = None
    ) -> list[RequestOutput]:
        """Act on new tokens; in Python only for requests that filled a block, are watched, or may have their last.

        is_over_N: those that their grammars end, if any have one.
        """
        table = self.queue.table
        self.cache.cache_filled_blocks(entries_N)
        places = table.to_look_at(entries_N, tokens_N, is_over_N)
        looked_at = zip(list(table.requests(entries_N[places])), tokens_N[places].tolist(), strict=True)
        ends = [(request, end_with(request, token_id)) for request, token_id in looked_at]
        return [self._end(request, reason, fault_of(request)) for request, reason in ends if reason is not None]

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        if request.id in self.queue.compiling and self.structured_output is not None:
            self.structured_output.forget(request.id)
        self.dispatcher.retire(request)
        self.queue.remove(request)
        self.feedback.ended(request, reason, error)
        return request.output(reason, self.clock(), error)

    def _notify_ends(self, outputs: Iterable[RequestOutput]) -> None:
        if self.observers is not None:
            for output in outputs:
                self.observers.notify("on_request_end", output=output)

    def _tell_gaps(self, entries_N: IntArray) -> None:
        gaps_s = self.queue.table.gaps_s(entries_N, self.clock())
        if len(gaps_s):
            self._notify("on_token_gaps", gaps_s=gaps_s)

    def _report(self, launched: InFlight, num_generated_tokens: int) -> None:
        self.last_stats = step_stats(launched, num_generated_tokens, self.queue, self.pool, self.watch, self.clock())
        self._notify("on_step_end", stats=self.last_stats)

    # ------------------------------------------------------------------------------------------------------------ end

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """Have `tell` called, from another thread, if a step can never end; for executors that find that out."""
        self.executor.tell_if_stuck(tell)

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
            self._notify("on_engine_stop", engine=self)
        finally:
            if self.structured_output is not None:
                self.structured_output.close()
            self.executor.close()
        if self.observers is not None:
            self.observers.check()

    def _notify(self, hook: str, **arguments: Any) -> None:
        if self.observers is not None:
            self.observers.notify(hook, **arguments)
