"""Commits a launched step: keeps its tokens, finishes requests, and tells observers and the policy.

step_loop.py decides which step is committed when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.core.contracts import StepStats
from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.finish import Finisher, fault_of, finish_reason, stops_with
from hookline.core.engine.multi_token_commit import MultiTokenCommitter, first_draws
from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.policy import Planner
from hookline.core.engine.policy_feedback import prefilled
from hookline.core.engine.state import EngineState
from hookline.core.engine.step_builder import Dispatched, TokenOwners
from hookline.core.requests.late_input import LateInput
from hookline.core.requests.prompt_readers import ChunkRead
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import RunningTable, Sampled
from hookline.core.step.executor import StepResult, read_by
from hookline.core.util.arrays import Array, BoolArray, IntArray, no_ints


@dataclass(slots=True)
class LaunchedStep:
    """A launched step whose tokens are not known yet.

    started_s: when it was launched, on the engine's clock. host_s: seconds that its parts took on the host so far.
    num_context_tokens: how many tokens its decodes read from the cache; 0 unless the policy wants to know.
    """

    plan: CheckedPlan
    dispatched: Dispatched
    handle: Any
    started_s: float
    host_s: dict[str, float]
    num_context_tokens: int = 0
    owners: TokenOwners | None = None
    """Of its tokens; None unless its hidden states are read."""


@dataclass(slots=True)
class CollectedStep:
    """A step whose tokens have come to the host: N requests keep one.

    entries_N: of the running table. is_over_N: whether a late input ends the request; None if no request has one.
    """

    launched: LaunchedStep
    result: StepResult
    entries_N: IntArray
    tokens_N: IntArray
    is_over_N: BoolArray | None
    drawn: StepResult
    """The result with all draws; `result` has the first of each row."""
    num_more: Sequence[int] = ()
    """How many of the draws behind the first one count, of each row that has several."""
    is_kept: bool = False
    """Whether these were kept with the first ones, as none ends its request."""
    kept: KeptStep | None = None
    """Set once the step's tokens are kept."""


@dataclass(slots=True)
class KeptStep:
    """A step whose tokens were kept, and of which observers and the policy are still to be told.

    requests: those that keep a token of it, decodes first; empty unless the policy wants to know. num_more: how many
    draws behind the first one each row with several keeps, by the request's id.
    """

    requests: Sequence[Request]
    num_more: Mapping[int, int]
    num_tokens: int


class Committer:
    """Commits the steps of one engine."""

    def __init__(self, state: EngineState, planner: Planner, finisher: Finisher, dispatcher: Dispatcher) -> None:
        self._state, self._queue, self._table, self._watch = state, state.queue, state.table, state.watch
        self._feedback, self._served, self._finisher = planner.feedback, planner.served, finisher
        self._hears_gaps = state.observers.hears("on_token_gaps")
        self._hears_first = state.observers.hears("on_first_token")
        self._last_commit_s = 0.0
        self._decoding = state.decoding
        self._multi_token = MultiTokenCommitter(state, dispatcher, self._keep_as_a_step)

    def collect(self, launched: LaunchedStep) -> CollectedStep:
        """Wait for a step's tokens, give them to their requests, and advance late inputs by them."""
        with self._watch.part("wait"):
            executor = self._state.executor
            result = drawn = executor.collect(launched.handle) if launched.plan.computes else StepResult(no_ints())
        with self._watch.part("advance"):
            dispatched = launched.dispatched
            if extensions := dispatched.step.extensions:
                self._state.limits.extensions.note_step(extensions, result.extension_seconds)
            num_more: Sequence[int] = ()
            if dispatched.multi_token:
                drawn, num_more = self._decoding.accept(dispatched, drawn)
                if self._multi_token.keep_at_once(dispatched, drawn, num_more):
                    entries_N = dispatched.sampled.entries_N
                    return CollectedStep(launched, drawn, entries_N, no_ints(), None, drawn, num_more, is_kept=True)
                result = first_draws(dispatched, drawn)
            kept = self._advance(dispatched.sampled, result.tokens, result.extras)
        return CollectedStep(launched, result, *kept, drawn, num_more)

    def _advance(
        self, sampled: Sampled, tokens_N: IntArray, extras: Mapping[str, Array]
    ) -> tuple[IntArray, IntArray, BoolArray | None]:
        """Give requests their tokens; returns entries_N, tokens_N and is_over_N of the requests that keep one."""
        table = self._table
        if extras:
            keep_extras(self._queue.live, sampled.ids_N, extras)
        entries_N, kept_N = table.commit(sampled, tokens_N)
        is_over_N = advance_late(self._state.late, table, entries_N, kept_N) if table.num_late else None
        return entries_N, kept_N, is_over_N

    def keep(self, step: CollectedStep) -> None:
        """Cache filled blocks, keep further draws, and finish the requests at their last token.

        The next step may depend on this; on `conclude`, which has to follow, it does not.
        """
        launched, dispatched, entries_N, result = step.launched, step.launched.dispatched, step.entries_N, step.result
        with self._watch.part("commit"):
            if dispatched.chunks:
                self._note_first_tokens(dispatched)
            if dispatched.reads:
                keep_reads(self._queue.live, dispatched.reads, result.apart)
            tells_policy = self._feedback.is_wanted or self._served.is_wanted
            requests = list(self._table.requests(entries_N)) if tells_policy else []
            num_more: Mapping[int, int] = {}
            if step.is_kept:
                self._keep_kept(step)
                rows = dispatched.multi_token
                num_more = {row.request.id: more for row, more in zip(rows, step.num_more, strict=True)}
            else:
                self._keep(entries_N, step.tokens_N, step.is_over_N)
                if dispatched.multi_token:
                    num_more = self._multi_token.commit(dispatched, step.drawn, step.num_more)
            if launched.owners is not None and launched.plan.computes:
                self._state.hidden_states.hand_on(launched.owners, result.apart)
            self._decoding.note_kept(dispatched, num_more, self._state.now)
            if dispatched.ending:
                self._finisher.finish_prompts(dispatched.ending)
        for part in ("wait", "advance", "commit"):
            launched.host_s[part] = self._watch.pop_part(part)
        step.kept = KeptStep(requests, num_more, len(entries_N) + sum(num_more.values()))

    def conclude(self, step: CollectedStep) -> None:
        """Tell observers and the policy of a step whose tokens were kept."""
        launched, kept = step.launched, step.kept
        assert kept is not None, "its tokens are to be kept first"
        with self._watch.part("conclude"):
            self._decoding.count_step(launched.dispatched.multi_token, kept.num_more)
            self._state.announce()
        self._state.note_stats(self._stats(launched, kept))
        if self._feedback.is_wanted or self._served.is_wanted:
            self._tell_policy(launched, kept.requests)

    def _note_first_tokens(self, dispatched: Dispatched) -> None:
        """Note the time of requests' first tokens; their rows follow the decodes' rows among the sampled ones."""
        for id_ in dispatched.sampled.ids_N[len(dispatched.step.decode_rows) : dispatched.num_plain_draws].tolist():
            request = self._queue.live.get(id_)
            if request is not None and request.first_token_s is None:
                now_s = self._state.now()
                request.note_first_token(now_s)
                if self._hears_first:
                    info = request.begin()
                    self._state.observers.notify("on_first_token", info=info, first_token_s=now_s)

    def _keep_as_a_step(self, sampled: Sampled, tokens_N: IntArray, extras: Mapping[str, Array]) -> None:
        """Keep a token of each of these requests, as if a step of its own had drawn them."""
        self._keep(*self._advance(sampled, tokens_N, extras))

    def _keep(self, entries_N: IntArray, tokens_N: IntArray, is_over_N: BoolArray | None) -> None:
        """Cache the blocks that these requests fill with a token each, and finish requests at their last token."""
        self._tell_gaps(entries_N)
        self._state.cache.cache_filled_blocks(entries_N)
        self._finish_by_tokens(entries_N, tokens_N, is_over_N)

    def _keep_kept(self, step: CollectedStep) -> None:
        """Cache the blocks that requests fill with draws which end none of them."""
        self._tell_gaps(step.entries_N)
        if self._hears_gaps and (num_more := sum(step.num_more)):  # they come at the same moment as the first draw
            self._state.observers.notify("on_token_gaps", gaps_s=np.zeros(num_more))
        self._state.cache.cache_filled_blocks(step.entries_N)

    def _tell_gaps(self, entries_N: IntArray) -> None:
        if self._hears_gaps and len(gaps_s := self._table.gaps_s(entries_N, self._state.now())):
            self._state.observers.notify("on_token_gaps", gaps_s=gaps_s)

    def _finish_by_tokens(self, entries_N: IntArray, tokens_N: IntArray, is_over_N: BoolArray | None) -> None:
        """Finish the requests that have their last token.

        Only requests that are watched or may finish are visited one by one.
        """
        places = self._table.to_look_at(entries_N, tokens_N, is_over_N)
        if not len(places):
            return
        requests, tokens = list(self._table.requests(entries_N[places])), tokens_N[places].tolist()
        reasons = [finish_reason(request, token_id) for request, token_id in zip(requests, tokens, strict=True)]
        for request, token_id, reason in zip(requests, tokens, reasons, strict=True):
            if reason is not None and token_id < 0:
                self._finisher.finish_without_token(request, token_id)
            elif reason is not None:
                self._finisher.finish(request, reason, fault_of(request))

    def _stats(self, launched: LaunchedStep, kept: KeptStep) -> StepStats:
        """The statistics of a committed step for observers."""
        plan, dispatched, clock, pool = launched.plan, launched.dispatched, self._watch.clock, self._state.cache.pool
        now_s, parts = self._state.now(), launched.host_s
        parts["commit"] += parts.pop("advance") + self._watch.pop_part("conclude")
        device = clock.read() if clock is not None and plan.computes else None
        return StepStats(
            num_running=len(self._queue.running),
            num_waiting=len(self._queue.waiting),
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            num_prefill_tokens=dispatched.num_prefill_tokens,
            num_decode_tokens=len(plan.decode),
            num_cached_tokens=dispatched.num_cached_tokens,
            num_preemptions=len(plan.preempt),
            num_prompt_tokens=dispatched.num_prompt_tokens,
            num_generated_tokens=kept.num_tokens,
            step_s=now_s - launched.started_s,
            host_s=sum(parts.values()) - parts["wait"] - (device.device_s if device and device.on_host else 0.0),
            plan_s=parts["plan"],
            dispatch_s=parts["dispatch"],
            launch_s=parts["launch"],
            wait_s=parts["wait"],
            commit_s=parts["commit"],
            device_s=None if device is None else device.device_s,
            idle_s=None if device is None else device.idle_s,
        )

    def _tell_policy(self, launched: LaunchedStep, kept: Sequence[Request]) -> None:
        """Tell the policy of a committed step. kept: the requests that keep a token of it, decodes first."""
        plan, dispatched, stats, now_s = launched.plan, launched.dispatched, self._state.last_stats, self._state.now()
        if self._served.is_wanted:
            new_tokens = zip(dispatched.chunks, dispatched.num_new_tokens, strict=True)
            self._served.add(((chunk[0], num_tokens) for chunk, num_tokens in new_tokens), kept)
        if self._feedback.is_wanted:
            chunked = {request.id for request, _, _ in dispatched.chunks}
            self._feedback.committed(
                plan.asked,
                now_s,
                prefilled=prefilled(dispatched, kept),
                decoded=[request.view for request in kept if request.id not in chunked],
                preempted=[request.view for request in plan.preempt],
                num_decodes=len(plan.decode),
                num_context_tokens=launched.num_context_tokens,
                busy_s=now_s - max(launched.started_s, self._last_commit_s),
                device_s=None if stats is None else stats.device_s,
            )
        self._last_commit_s = now_s


def keep_reads(
    live: Mapping[int, Request], reads: Sequence[tuple[Request, ChunkRead]], apart: Mapping[str, Array]
) -> None:
    """Give each request the rows that its reader made of its prompt in this step. apart: see StepResult."""
    starts = Counter[str]()
    for request, chunk in reads:
        name, num_rows = read_by(chunk.index), chunk.num_rows
        if num_rows and request.id in live:
            request.keep_read(chunk, apart[name][starts[name] : starts[name] + num_rows])
        starts[name] += num_rows


def keep_extras(live: Mapping[int, Request], ids_N: IntArray, extras: Mapping[str, Array]) -> None:
    """Hand to each request the extra values of its draw. extras: (N, W) numbers by name, see StepResult."""
    for name, values_NW in extras.items():
        for id_, values_W in zip(ids_N.tolist(), values_NW, strict=True):
            request = live.get(id_)
            if request is not None:
                request.keep_extra(name, values_W)


def advance_late(late: LateInput | None, table: RunningTable, entries_N: IntArray, tokens_N: IntArray) -> BoolArray:
    """Advance the late inputs of these requests by their new tokens; returns which of them end with theirs (N,)."""
    assert late is not None, "a request has a late input, and the engine none"
    is_over_N = np.zeros(len(entries_N), dtype=np.bool_)
    (places,) = table.is_late_S[entries_N].nonzero()
    tokens = tokens_N[places].tolist()
    for place, request, token_id in zip(places, table.requests(entries_N[places]), tokens, strict=True):
        state = request.late
        assert state is not None
        if token_id < 0:  # NO_TOKEN, which finishes the request elsewhere
            continue
        if stops_with(request, token_id):
            state.stop()
        else:
            late.take(state, token_id)
        is_over_N[place] = state.end is not None
    return is_over_N
