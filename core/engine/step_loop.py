"""One step after the other: plan, launch, and commit the step before; and what is done when one of these fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hookline.core.engine.commit import Committer
from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.endings import Endings
from hookline.core.engine.ends import concerned, end_of, starting_again
from hookline.core.engine.in_flight import InFlight
from hookline.core.engine.listeners import Listeners
from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.planning import Planner
from hookline.core.engine.step_builder import tokens_of
from hookline.core.engine.times import Times
from hookline.core.errors import LostStep, PlanError, PluginError, RequestFault, show_traceback
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.requests.structured_output import StructuredOutput
from hookline.core.step.executor import Executor
from hookline.core.step.timing import StepWatch


class StepLoop:
    """The step loop of one engine. executor: may be replaced between steps.

    overlaps: whether a step is launched before the one before it is committed. has_taps: whether hidden states are
    kept for observers.
    """

    def __init__(
        self,
        executor: Executor,
        planner: Planner,
        dispatcher: Dispatcher,
        endings: Endings,
        listeners: Listeners,
        structured_output: StructuredOutput | None,
        times: Times,
        *,
        overlaps: bool,
        has_taps: bool,
    ) -> None:
        self.executor = executor
        self.watch = StepWatch(times.read)
        self.in_flight: InFlight | None = None
        self._planner, self._dispatcher, self._queue = planner, dispatcher, dispatcher.queue
        self._feedback, self._endings, self._listeners = planner.feedback, endings, listeners
        self._structured_output, self._times = structured_output, times
        self._overlaps, self._keeps_states = overlaps, has_taps and listeners.hears_states
        self.committer = Committer(
            dispatcher.cache,
            self._queue,
            planner.feedback,
            planner.served,
            endings,
            listeners,
            structured_output,
            self.watch,
            times,
        )
        self._lost_without_end = False
        """Whether the last lost step ended no request; if the next one ends none either, all its requests end."""

    def time_steps(self) -> None:
        """See Engine.time_steps."""
        assert self.in_flight is None, "a step is in flight"
        if self.watch.clock is None:
            self.watch.clock = self.executor.time_steps()

    def advance(self) -> list[RequestOutput]:
        """Plan and launch one step, then commit the step before it (or, without overlap, this one).

        Returns the requests that a commit ended. Raises: see Engine.step.
        """
        before = self.in_flight
        if self._feedback.is_wanted and before is None:
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
            if launched.has_faults:
                outputs += self._endings.end_maskless(launched)
            self.in_flight = launched
            return outputs if self._overlaps else outputs + self._collect()
        except LostStep as error:
            if not error.ends_engine:
                self._endings.kept += outputs
                return self._lose(plan, error)
            self._abandon(error)
            error.args = (f"{error}. The engine has ended; make a new one",)
            raise
        except BaseException as error:
            self._abandon(error)
            raise

    def plan(self, *, may_wait: bool = True) -> CheckedPlan:
        """The scheduler's next plan, checked. may_wait: whether to wait here if the plan asks to."""
        with self.watch.part("plan"):
            try:
                plan, checked = self._planner.ask()
            except PlanError:
                raise
            except PluginError as error:  # the policy failed when it was told that its plan was not carried out
                self._abandon(error)
                raise
        if checked.computes or checked.preempt:
            self._planner.reset_wait()
        elif may_wait:
            try:
                self._planner.wait(plan.idle_s)
            except BaseException:
                self._give_up()
                raise
        return checked

    def _plan_ahead(self) -> CheckedPlan | None:
        """The plan of the step after the one in flight; None if that one must be committed first.

        Plans are made before the last tokens' values are known. So the commit comes first if the plan preempts, since
        a preempted request computes its last token again; if processors follow the tokens of a request; and if the plan
        does nothing or is refused, since requests that are about to end may hold the blocks that it lacks.
        """
        if self._dispatcher.arguments.awaited or not (self._queue.waiting or self._queue.running):
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
        """Tell the policy that its newest plan is not carried out."""
        try:
            self._feedback.give_up(self._times.now())
        except PluginError as error:
            self._abandon(error)
            raise

    def _launch(self, plan: CheckedPlan) -> InFlight:
        started = self._times.now()
        with self.watch.part("dispatch"):
            dispatched = self._dispatcher.carry_out(plan)
            self._planner.check_progress(got_further=dispatched.got_further)
        with self.watch.part("launch"):
            handle = self.executor.launch(dispatched.step) if plan.computes else None
            num_context_tokens = self._context_tokens(plan)
            if not len(dispatched.step.masked_draws):
                self._dispatcher.expect(dispatched.sampled)
                if dispatched.pooled:
                    self._dispatcher.finish_pooled(dispatched.pooled)
        tapped = tokens_of(self._queue.table, plan.decode, dispatched.chunks) if self._keeps_states else None
        return InFlight(plan, dispatched, handle, started, self.watch.take(), num_context_tokens, tapped=tapped)

    def _context_tokens(self, plan: CheckedPlan) -> int:
        """Tokens that the decodes of a step read; 0 unless the policy wants to know."""
        if not self._feedback.is_wanted:
            return 0
        return int(self._queue.table.num_computed_tokens_S[plan.decode].sum())

    def _release(self, launched: InFlight) -> None:
        """Give a launched step the masks that its draws wait for; all tokens before them must be known by now.

        The device waits for this once its forward pass is over, so what can be done later is not done here.
        """
        assert self._structured_output is not None
        step, sampled = launched.dispatched.step, launched.dispatched.sampled
        with self.watch.part("release"):
            live = self._queue.live
            requests = [live.get(id_) for id_ in sampled.ids_N[step.masked_draws].tolist()]  # some may have ended
            constraints = [None if request is None else request.constraint for request in requests]
            launched.has_faults = self._structured_output.fill(constraints, self.executor.mask_rows(len(requests)))
            self.executor.release(launched.handle, len(requests))
            self._dispatcher.expect(self._queue.table.still_there(sampled))
            if launched.dispatched.pooled:
                self._dispatcher.finish_pooled(launched.dispatched.pooled)
        launched.host_s["launch"] += self.watch.seconds.pop("release")

    def _collect(self, release: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Commit the step in flight. release: see Committer.commit.

        Raises: LostStep if `release` fails; the step in flight is committed all the same.
        """
        launched = self.in_flight
        assert launched is not None, "no step is in flight"
        self.in_flight = None
        try:
            outputs, lost = self.committer.commit(self.executor, launched, release)
        except BaseException as error:
            self._abandon(error)
            raise
        if lost is not None:
            self._endings.kept += outputs
            raise lost
        return outputs

    def _lose(self, plan: CheckedPlan, error: LostStep) -> list[RequestOutput]:
        """After a launched step was lost: end the requests at fault, and have the others compute their tokens again.

        Returns the requests that ended. Raises: the error, unless it concerns single requests.
        """
        self.watch.take()
        inside = self._dispatcher.lose(plan)
        outputs = self._collect() if self.in_flight is not None else []
        if self.watch.clock is not None:
            self.watch.clock.clear()
        inside = [request for request in inside if request.id in self._queue.live]
        ending = concerned(error, inside)
        if not ending and self._lost_without_end:
            ending = inside
        self._lost_without_end = not ending
        ended = [self._endings.end(one, FinishReason.ERROR, end_of(one, error)) for one in ending]
        self._dispatcher.preempt(starting_again(error, inside, self._queue.running.values()))
        outputs += ended
        try:
            self._listeners.notify_ends(ended)
            self._give_up()
        except BaseException:
            self._endings.kept += outputs
            raise
        if isinstance(error, RequestFault):
            show_traceback(error)
            return outputs
        self._endings.kept += outputs
        error.args = (f"{error}. The requests of this step have ended, the engine goes on",)
        error.ended = frozenset(output.request_id for output in ended)
        raise error

    def tell_ended(self) -> None:
        """Tell the policy of requests that ended between steps."""
        try:
            self._feedback.tell_ended(self._times.now())
        except PluginError as error:
            self._abandon(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        """End all requests after a step failed half-way."""
        self.in_flight = None
        if self.watch.clock is not None:
            self.watch.clock.clear()
        self._endings.break_off(error)
