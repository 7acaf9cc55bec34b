"""Carries out a checked plan: moves requests and blocks, and writes the step's message for the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.state import EngineState
from hookline.core.engine.step_builder import ArgumentWriter, Dispatched, StepDraft, StepWriter
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import NO_REQUEST
from hookline.core.util.arrays import IntArray


class Dispatcher:
    """Owns the rows of the request table; has the KV cache manager hand out blocks."""

    def __init__(self, state: EngineState) -> None:
        self._state, self._queue, self._cache, self._table = state, state.queue, state.cache, state.table
        max_num_seqs = state.limits.plan.max_num_seqs
        self.free_rows = deque(range(max_num_seqs))
        self.arguments = ArgumentWriter(max_num_seqs)
        self.writer = StepWriter(state.table, self.arguments, shares_prefixes=state.shares_prefixes)

    def carry_out(self, plan: CheckedPlan, *, is_ahead: bool) -> Dispatched:
        """Preempt, admit and grow requests as planned; returns the step to launch. is_ahead: whether the tokens of the
        step in flight are not known yet.
        """
        cache, draft = self._cache, StepDraft()
        self._queue.count_step(len(plan.decode))
        self.preempt(plan.preempt)
        for request, _ in plan.prefill:
            if not request.blocks:
                cache.touch_prefix(request)
        draft.table.extend(cache.allocate_next(plan.decode))
        self._table.num_computed_tokens_S[plan.decode] += 1
        cache.save_decodes(plan.decode)
        got_further = self._note_progress(plan.decode)
        for request, num_tokens in plan.prefill:
            got_further |= self._start_chunk(request, num_tokens, draft)
        decodes = self._state.decoding.extend(plan, draft, is_ahead=is_ahead)
        cache.end_step(plan.decode, draft.chunks)  # frees blocks: no new one may be read by this step
        if cache.snapshots is not None:
            draft.note_states(cache.snapshots.pop_restored(), cache.snapshots.pop_saved())
        return self.writer.write(draft, decodes, got_further=got_further)

    def preempt(self, requests: Sequence[Request]) -> None:
        """Take rows and blocks from running requests and queue them again; full blocks stay in the prefix cache."""
        for request in requests:
            self.retire(request)
            request.preempt()
        if requests:
            self._queue.preempt(requests)

    def lose(self, plan: CheckedPlan) -> list[Request]:
        """Take back the counts of a launched step that was lost. Returns its requests, all of which must start again.

        Requests that have ended since it was launched are left out.
        """
        prefill = [(request, num_tokens) for request, num_tokens in plan.prefill if request.id in self._queue.live]
        for request, num_tokens in prefill:
            self._cache.uncache(request, num_tokens)
        decode = plan.decode[self._table.id_S[plan.decode] != NO_REQUEST]
        self._table.num_computed_tokens_S[decode] -= 1
        self.writer.lose()
        self._state.decoding.lose()
        if self._cache.snapshots is not None:
            self._cache.snapshots.clear()
        return [*(request for request, _ in prefill), *self._table.requests(decode)]

    def retire(self, request: Request) -> None:
        """Give back a request's row and blocks, if it has any.

        A launched step may still use them: their next owner is computed after it, on the same device queue.
        """
        self._cache.release(request)
        self._free_row(request)

    def expect(self, dispatched: Dispatched) -> None:
        """Count the tokens that a launched step draws; requests that need no further step leave the running ones."""
        self.count_draws(self._table.still_there(dispatched.sampled).entries_N, dispatched.ending)

    def count_kept(self, entries_N: IntArray, counts_N: IntArray | int = 1) -> None:
        """Count as computed the tokens that each of these requests keeps behind its newest one."""
        self._table.num_computed_tokens_S[entries_N] += counts_N
        self._note_progress(entries_N)

    def count_draws(self, entries_N: IntArray, ending: Sequence[Request] = ()) -> None:
        """Count a drawn token of each of these requests, as `expect` does. ending: end with their prompts."""
        table = self._table
        table.num_tokens_S[entries_N] += 1
        is_last = table.num_tokens_S[entries_N] >= table.max_len_S[entries_N]
        for request in [*table.requests(entries_N[is_last]), *ending]:
            if request.id in self._queue.running:
                self._queue.end(request)
                self._free_row(request)

    def _free_row(self, request: Request) -> None:
        if request.row >= 0:
            self.arguments.forget(request)
            self.free_rows.append(request.row)
            request.leave_row()

    def _start_chunk(self, request: Request, num_tokens: int, draft: StepDraft) -> bool:
        """Admit the request if it is waiting, give it blocks for its next tokens, and note the chunk in the draft.

        Returns whether the request computes a token that it never computed before.
        """
        cache = self._cache
        if request.row < 0:
            cache.extend_prefix(request)
            num_tokens = min(num_tokens, request.num_tokens - request.num_computed_tokens)
            if cache.missing_blocks(request, num_tokens) > cache.pool.num_free:
                # Only colliding hashes lead here: the content of a block that the ledger counted as shared differs.
                self.retire(request)
                request.reset()
                return False
            self._admit(request, draft)
        start = request.num_computed_tokens
        if cache.snapshots is not None:
            num_tokens = cache.snapshots.next_stop(request.id, start, start + num_tokens) - start
        draft.table.extend(cache.allocate(request, cache.missing_blocks(request, num_tokens)))
        num_new_tokens = request.count_computed(num_tokens)
        cache.cache_blocks(request)
        cache.save_chunk(request)
        draft.chunks.append((request, start, num_tokens))
        draft.num_new_tokens.append(num_new_tokens)
        return num_new_tokens > 0

    def _admit(self, request: Request, draft: StepDraft) -> None:
        """Give a waiting request a row of the request table, and note the blocks that it shares for the block table."""
        self._queue.admit(request)
        request.enter_row(self.free_rows.popleft(), self._state.now())
        draft.admitted.append(request)
        if self._cache.snapshots is not None:
            self._cache.snapshots.restore(request.id, request.row)
        draft.table.extend(self._cache.table_entries(request))

    def _note_progress(self, entries: IntArray) -> bool:
        """Raise the high-water marks of these entries; returns whether any rose."""
        computed, marks = self._table.num_computed_tokens_S[entries], self._table.high_water_S[entries]
        self._table.high_water_S[entries] = np.maximum(computed, marks)
        return bool(np.count_nonzero(computed > marks))
