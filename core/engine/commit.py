"""Commits a launched step: its tokens are kept, requests end, and observers and the policy are told.

Which step is committed when is decided in step_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hookline.core.contracts import StepStats, TappedStates
from hookline.core.engine.endings import Endings
from hookline.core.engine.ends import end_with, fault_of
from hookline.core.engine.feedback import PolicyFeedback, prefilled
from hookline.core.engine.in_flight import InFlight, step_stats
from hookline.core.engine.listeners import Listeners
from hookline.core.engine.served import ServedCounts
from hookline.core.engine.step_results import advance_grammars, keep_scores
from hookline.core.engine.times import Times
from hookline.core.errors import LostStep
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.requests.request import Request
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.structured_output import StructuredOutput
from hookline.core.step.executor import Executor
from hookline.core.step.timing import StepWatch
from hookline.core.util.arrays import BoolArray, IntArray, no_ints


class Committer:
    """Commits the steps of one engine."""

    def __init__(
        self,
        cache: KVCacheManager,
        queue: RequestQueue,
        feedback: PolicyFeedback,
        served: ServedCounts,
        endings: Endings,
        listeners: Listeners,
        structured_output: StructuredOutput | None,
        watch: StepWatch,
        times: Times,
    ) -> None:
        self._cache, self._queue, self._table = cache, queue, queue.table
        self._feedback, self._served, self._endings = feedback, served, endings
        self._listeners, self._structured_output = listeners, structured_output
        self._watch, self._times = watch, times
        self._last_end_s = 0.0
        self.last_stats: StepStats | None = None
        """StepStats of the step that was committed last."""

    def commit(
        self, executor: Executor, launched: InFlight, release: Callable[[], None] | None
    ) -> tuple[list[RequestOutput], LostStep | None]:
        """Wait for a step's tokens and act on them.

        release: gives the next step the masks that its draws wait for; called once the grammars have these tokens.
        Returns the outputs of requests that ended, and the LostStep that `release` raised, if it did: the next step is
        lost then, and this one is committed all the same. If anything else is raised, the outputs are in Endings.kept.
        """
        outputs: list[RequestOutput] = []
        try:
            entries_N, tokens_N, is_over_N = self._collect(executor, launched)
            lost = None if release is None else _lost_by(release)
            with self._watch.part("commit"):
                self._tell_of_tokens(executor, launched, entries_N)
                kept = list(self._table.requests(entries_N)) if self._counts_tokens else []
                outputs += self._end_with_tokens(entries_N, tokens_N, is_over_N)
                if launched.dispatched.pooled:
                    outputs += self._end_pooled(executor, launched)
                self._listeners.notify_ends(outputs)
            self._tell_end(launched, len(entries_N), kept)
        except BaseException:
            self._endings.kept += outputs
            raise
        return outputs, lost

    @property
    def _counts_tokens(self) -> bool:
        return self._feedback.is_wanted or self._served.is_wanted

    def _collect(self, executor: Executor, launched: InFlight) -> tuple[IntArray, IntArray, BoolArray | None]:
        """Wait for a step's tokens, give them to their requests, and advance the grammars by them.

        Returns the entries of the requests that keep a token, their tokens, and which of them a grammar ends.
        """
        table = self._table
        with self._watch.part("wait"):
            tokens = executor.collect(launched.handle) if launched.plan.computes else no_ints()
        with self._watch.part("advance"):
            if tokens.ndim == 2:
                tokens = keep_scores(self._queue.live, launched.dispatched, tokens)
            entries_N, tokens_N = table.commit(launched.dispatched.sampled, tokens)
            is_over_N = None
            if table.num_constrained:
                is_over_N = advance_grammars(self._structured_output, table, entries_N, tokens_N)
        return entries_N, tokens_N, is_over_N

    def _tell_of_tokens(self, executor: Executor, launched: InFlight, entries_N: IntArray) -> None:
        """Tell observers of hidden states, of first tokens, and of the times between tokens."""
        if launched.tapped is not None and launched.plan.computes:
            states = executor.collect_states(launched.handle)
            self._listeners.notify("on_hidden_states", states=TappedStates(*launched.tapped, states))
        self._note_first_tokens(launched)
        if self._listeners.hears_gaps:
            self._tell_gaps(entries_N)

    def _tell_end(self, launched: InFlight, num_tokens: int, kept: Sequence[Request]) -> None:
        """Tell observers of the step's end, and the policy. kept: see `_tell_policy`."""
        now_s = self._times.now()
        self.last_stats = step_stats(launched, num_tokens, self._queue, self._cache.pool, self._watch, now_s)
        self._listeners.notify("on_step_end", stats=self.last_stats)
        if self._counts_tokens:
            self._tell_policy(launched, kept)

    def _note_first_tokens(self, launched: InFlight) -> None:
        """Set first_token_s of requests whose prompt is complete: of the sampled rows, those behind the decodes."""
        for id_ in launched.dispatched.sampled.ids_N[len(launched.plan.decode) :].tolist():
            request = self._queue.live.get(id_)
            if request is not None and request.first_token_s is None:
                request.first_token_s = now_s = self._times.now()
                if self._listeners.hears_first:
                    self._listeners.notify("on_first_token", info=request.begin(), first_token_s=now_s)

    def _tell_gaps(self, entries_N: IntArray) -> None:
        gaps_s = self._table.gaps_s(entries_N, self._times.now())
        if len(gaps_s):
            self._listeners.notify("on_token_gaps", gaps_s=gaps_s)

    def _end_with_tokens(
        self, entries_N: IntArray, tokens_N: IntArray, is_over_N: BoolArray | None
    ) -> list[RequestOutput]:
        """Cache filled blocks, and end the requests that have their last token; returns their outputs.

        Only requests that filled a block, are watched, or may end are visited one by one. is_over_N: whether a grammar
        ends the request; None if no request has a grammar.
        """
        self._cache.cache_filled_blocks(entries_N)
        places = self._table.to_look_at(entries_N, tokens_N, is_over_N)
        looked_at = zip(list(self._table.requests(entries_N[places])), tokens_N[places].tolist(), strict=True)
        ends = [(request, token_id, end_with(request, token_id)) for request, token_id in looked_at]
        return [
            self._endings.end_tokenless(request, token_id)
            if token_id < 0
            else self._endings.end(request, reason, fault_of(request))
            for request, token_id, reason in ends
            if reason is not None
        ]

    def _end_pooled(self, executor: Executor, launched: InFlight) -> list[RequestOutput]:
        """End the requests whose vectors a step computed, except those that have ended already."""
        vectors, ended = executor.collect_vectors(launched.handle), []
        for request, vector in zip(launched.dispatched.pooled, vectors, strict=True):
            if request.id in self._queue.live:
                assert request.pooling is not None
                request.vector, fault = request.pooling.kept(vector)
                ended.append(self._endings.end(request, FinishReason.ERROR if fault else FinishReason.STOP, fault))
        return ended

    def _tell_policy(self, launched: InFlight, kept: Sequence[Request]) -> None:
        """Tell the policy of a committed step. kept: the requests that keep a token of it, decodes first."""
        plan, dispatched, now_s = launched.plan, launched.dispatched, self._times.now()
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
                busy_s=now_s - max(launched.started, self._last_end_s),
                device_s=None if self.last_stats is None else self.last_stats.device_s,
            )
        self._last_end_s = now_s


def _lost_by(release: Callable[[], None]) -> LostStep | None:
    """Give the next step its masks; returns the error if it is lost by that."""
    try:
        release()
    except LostStep as error:
        return error
    return None
