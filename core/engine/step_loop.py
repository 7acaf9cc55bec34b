"""The step loop: plan and launch a step, commit the step before it, and recover when a step fails."""

from __future__ import annotations

from collections.abc import Callable

from hookline.core.engine.commit import CollectedStep, Committer, LaunchedStep
from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.finish import Finisher, at_fault, lost_step_error, starting_again
from hookline.core.engine.plan_check import CheckedPlan, has_room
from hookline.core.engine.policy import Planner
from hookline.core.engine.state import EngineState
from hookline.core.engine.step_builder import owners_of
from hookline.core.errors import LostStep, PlanError, PluginError, RequestFault, show_traceback
from hookline.core.outputs import FinishReason


class StepLoop:
    """The step loop of one engine. Outputs of requests that finish in a step are in EngineState.finished."""

    def __init__(self, state: EngineState, planner: Planner, dispatcher: Dispatcher, finisher: Finisher) -> None:
        self.in_flight: LaunchedStep | None = None
        self._collected: CollectedStep | None = None
        """The last step, between the arrival of its tokens and the end of its commit."""
        self._state, self._queue, self._watch = state, state.queue, state.watch
        self._planner, self._feedback = planner, planner.feedback
        self._dispatcher, self._finisher = dispatcher, finisher
        self._committer = Committer(state, planner, finisher, dispatcher)
        self._was_lost_without_fault = False
        """Whether the last lost step finished no request; if the next one finishes none either, all its requests do."""

    def advance(self) -> None:
        """Plan and launch one step, then commit the step before it (or, without overlap, this one).

        If the step needs the tokens of the one before, these are kept ahead of its launch, and all that can wait is
        done behind it, while the device computes.
        Raises: see Engine.step.
        """
        if self.in_flight is None:
            if self._feedback.is_wanted:
                self.time_steps()
            plan = self.plan()
            if not plan.does_anything:
                self._give_up()
                return
        elif (ahead := self._plan_ahead()) is not None and (
            self._state.decoding.may_overlap(ahead) or self._keeps_plan(ahead)
        ):
            plan = ahead
        else:
            self._collect()
            self._commit()
            return
        try:
            launched = self._launch(plan)
            self._collect()  # the step before this one
            has_faults = self._draw_late(launched)
            self._commit()
            if has_faults:
                self._finisher.finish_faulty(request for request, _ in launched.dispatched.late)
            self.in_flight = launched
            if not self._state.limits.overlap:
                self._collect()
                self._commit()
        except LostStep as error:
            if not error.ends_engine:
                self._lose(plan, error)
                return
            self._abandon(error)
            error.conclude("The engine has ended; make a new one")
            raise
        except BaseException as error:
            self._abandon(error)
            raise

    # --------------------------------------------------------------------------------------------------- the next plan

    def plan(self, *, may_wait: bool = True) -> CheckedPlan:
        """The scheduler's next plan, checked. may_wait: whether to wait here if the plan asks to."""
        with self._watch.part("plan"):
            try:
                plan = self._planner.ask()
            except PlanError:
                raise
            except PluginError as error:  # the policy failed when it was told that its plan was not carried out
                self._abandon(error)
                raise
        if plan.does_anything:
            self._planner.reset_wait()
        elif may_wait:
            try:
                self._planner.wait(plan.asked.idle_s)
            except BaseException:
                self._give_up()
                raise
        return plan

    def _plan_ahead(self) -> CheckedPlan | None:
        """The plan of the next step; None if the step in flight must be committed first.

        Plans are made before the last tokens' values are known. So the commit comes first if the plan preempts, since
        a preempted request computes its last token again; if extensions follow the tokens of a request; and if the plan
        does nothing or is refused, since requests that are about to finish may hold the blocks that it lacks.
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

    def _keeps_plan(self, plan: CheckedPlan) -> bool:
        """Keep the tokens of the step in flight; returns whether a plan that was made before is still right then.

        It is if no request has ended and if the blocks suffice, however many tokens were kept.
        """
        num_departures = self._state.table.num_departures
        if self.in_flight is not None:
            self._state.decoding.look_ahead(self.in_flight.dispatched)
        self._collect()
        self._keep()
        state = self._state
        is_right = num_departures == state.table.num_departures and has_room(
            plan, self._queue, state.ledger(), state.limits.plan
        )
        if not is_right:
            self._give_up()
        return is_right

    def _give_up(self) -> None:
        """Tell the policy that its newest plan is not carried out."""
        self._tell_policy(self._feedback.give_up)

    def tell_finished(self) -> None:
        """Tell the policy of requests that finished between steps."""
        self._tell_policy(self._feedback.tell_finished)

    def _tell_policy(self, tell: Callable[[float], None]) -> None:
        try:
            tell(self._state.now())
        except PluginError as error:
            self._abandon(error)
            raise

    # ------------------------------------------------------------------------------------------------ launch and commit

    def time_steps(self) -> None:
        """See Engine.time_steps."""
        assert self.in_flight is None, "a step is in flight"
        if self._watch.clock is None:
            self._watch.use_device_clock(self._state.executor.time_steps())

    def _launch(self, plan: CheckedPlan) -> LaunchedStep:
        """Carry out a plan, and launch its step. Raises: LostStep, as `_draw_late` does."""
        started_s, executor, table = self._state.now(), self._state.executor, self._state.table
        with self._watch.part("dispatch"):
            dispatched = self._dispatcher.carry_out(plan, is_ahead=self.in_flight is not None)
            self._planner.check_progress(got_further=dispatched.got_further)
        with self._watch.part("launch"):
            handle = executor.launch(dispatched.step) if plan.computes else None
            num_context = int(table.num_computed_tokens_S[plan.decode].sum()) if self._feedback.is_wanted else 0
            if not len(dispatched.step.late_draws):
                self._dispatcher.expect(dispatched)
        owners = owners_of(table, plan.decode, dispatched) if self._state.hidden_states.are_read else None
        return LaunchedStep(plan, dispatched, handle, started_s, self._watch.pop_seconds(), num_context, owners)

    def _draw_late(self, launched: LaunchedStep) -> bool:
        """Give a launched step the rows that its draws wait for, if any; all tokens before them are known by now.

        The device waits for the rows once its forward pass is over, so nothing is done here that can be done later.
        Returns whether a request has a fault now.
        """
        dispatched, executor, live = launched.dispatched, self._state.executor, self._queue.live
        if not len(dispatched.step.late_draws):
            return False
        assert self._state.late is not None
        with self._watch.part("release"):
            waiting = [(request.late if request.id in live else None, behind) for request, behind in dispatched.late]
            rows_NW = executor.late_rows(len(dispatched.step.late_draws))
            has_faults = self._state.late.write(waiting, rows_NW)
            executor.release(launched.handle, len(rows_NW))
            self._dispatcher.expect(dispatched)
        launched.host_s["launch"] += self._watch.pop_part("release")
        return has_faults

    def _collect(self) -> None:
        """Wait for the tokens of the step in flight, if there is one."""
        launched, self.in_flight = self.in_flight, None
        if launched is not None:
            try:
                self._collected = self._committer.collect(launched)
            except BaseException as error:
                self._abandon(error)
                raise

    def _keep(self) -> None:
        """Keep the tokens of the collected step, if there is one and that was not done."""
        collected = self._collected
        if collected is not None and collected.kept is None:
            try:
                self._committer.keep(collected)
            except BaseException as error:
                self._abandon(error)
                raise

    def _commit(self) -> None:
        """Commit the collected step, if there is one."""
        self._keep()
        collected, self._collected = self._collected, None
        if collected is not None:
            try:
                self._committer.conclude(collected)
            except BaseException as error:
                self._abandon(error)
                raise

    # ------------------------------------------------------------------------------------------------- after a failure

    def _lose(self, plan: CheckedPlan, error: LostStep) -> None:
        """After a launched step was lost: finish the requests at fault, and have the others compute their tokens again.

        The step before it is committed. Raises: the error, unless it concerns single requests.
        """
        lost = self._dispatcher.lose(plan)
        self._collect()
        self._commit()
        self._watch.pop_seconds()
        self._watch.drop_device_times()
        lost = [request for request in lost if request.id in self._queue.live]
        finishing = at_fault(error, lost)
        if not finishing and self._was_lost_without_fault:
            finishing = lost
        self._was_lost_without_fault = not finishing
        for request in finishing:
            self._finisher.finish(request, FinishReason.ERROR, lost_step_error(request, error))
        self._dispatcher.preempt(starting_again(error, lost, self._queue.running.values()))
        self._state.announce()
        self._give_up()
        if isinstance(error, RequestFault):
            show_traceback(error)
            return
        ended = frozenset(request.id for request in finishing)
        error.conclude("The requests of this step have ended, the engine goes on", ended)
        raise error

    def _abandon(self, error: BaseException) -> None:
        """Finish all requests after a step failed half-way."""
        self.in_flight = self._collected = None
        self._watch.drop_device_times()
        self._finisher.finish_all(error)
