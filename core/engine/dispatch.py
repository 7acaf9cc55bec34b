"""Carries out a checked plan: moves requests and blocks, and writes the step's message for the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.state import EngineState
from hookline.core.engine.step_builder import ArgumentWriter, Dispatched, OnDevice, StepDraft, StepWriter
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import NO_REQUEST
from hookline.core.util.arrays import IntArray, ints, no_ints, without


class Dispatcher:
    """Owns the rows of the request table; has the KV cache manager hand out blocks."""

    def __init__(self, state: EngineState) -> None:
        self._state, self._queue, self._cache, self._table = state, state.queue, state.cache, state.table
        max_num_seqs = state.limits.plan.max_num_seqs
        self.free_rows = deque(range(max_num_seqs))
        self.arguments = ArgumentWriter(max_num_seqs)
        self.writer = StepWriter(state.table, self.arguments, shares_prefixes=state.shares_prefixes)

    def carry_out(self, plan: CheckedPlan, *, is_ahead: bool, num_drafts: int) -> Dispatched:
        """Preempt, admit and grow requests as planned; returns the step to launch. is_ahead: whether the tokens of the
        step in flight are not known yet. num_drafts: what `num_on_device` says.
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
        if num_drafts:
            self._draft_on_device(plan, draft, num_drafts, is_ahead=is_ahead)
        decode = no_ints() if num_drafts else self._draft(plan, draft, is_ahead=is_ahead)
        cache.end_step(plan.decode, draft.chunks)  # last, as a draft's block may be none that this step still reads
        if cache.snapshots is not None:
            draft.note_states(cache.snapshots.pop_restored(), cache.snapshots.pop_saved())
        return self.writer.write(draft, decode, got_further=got_further)

    def num_on_device(self, plan: CheckedPlan, *, is_ahead: bool) -> int:
        """How many drafts the device makes for each request of the plan's step; 0 if the host makes them, if there are
        none, or if they need more blocks than there are. is_ahead: as in `carry_out`.
        """
        speculation, table, cache, entries = self._state.speculation, self._table, self._cache, plan.decode
        if speculation is None or plan.prefill or plan.preempt:
            return 0
        num_drafts = speculation.num_on_device(table, entries, is_ahead=is_ahead)
        if not num_drafts:
            return 0
        needed = self._most_computed(entries, 1 + num_drafts, is_ahead=is_ahead) - table.num_block_tokens_S[entries]
        num_columns = int((-(-np.maximum(needed, 0) // cache.pool.block_size)).sum())
        return num_drafts if num_columns * cache.blocks_per_column <= cache.pool.num_free else 0

    def _most_computed(self, entries: IntArray, num_tokens: int, *, is_ahead: bool) -> IntArray:
        """How many tokens these requests can have in the cache after so many more, whatever the step in flight kept."""
        speculation, table = self._state.speculation, self._table
        assert speculation is not None and speculation.device is not None
        unknown = speculation.device.depth if is_ahead else 0
        most: IntArray = np.minimum(
            table.num_computed_tokens_S[entries] + num_tokens + unknown, table.max_len_S[entries]
        )
        return most

    def _draft_on_device(self, plan: CheckedPlan, draft: StepDraft, num_drafts: int, *, is_ahead: bool) -> None:
        """Have the device make drafts for all decodes of the step; there are blocks for them."""
        speculation, table, cache, entries = self._state.speculation, self._table, self._cache, plan.decode
        assert speculation is not None and speculation.device is not None
        most_computed = self._most_computed(entries, num_drafts, is_ahead=is_ahead)
        is_short = most_computed > table.num_block_tokens_S[entries]
        computed = table.num_computed_tokens_S[entries]
        for request, count in zip(
            table.requests(entries[is_short]), (most_computed - computed)[is_short].tolist(), strict=True
        ):
            draft.table.extend(cache.allocate(request, cache.missing_blocks(request, count)))
        shown = {} if is_ahead else speculation.device.show(table.requests(entries))
        rows = speculation.draft_on_device(table, entries, num_drafts)
        draft.add_drafted(rows, entries)
        draft.on_device = OnDevice(num_drafts, int(most_computed.max()), shown)

    def _draft(self, plan: CheckedPlan, draft: StepDraft, *, is_ahead: bool) -> IntArray:
        """Give decodes drafts as far as the step's tokens and free blocks last; returns the decodes without drafts."""
        speculation, cache = self._state.speculation, self._cache
        if speculation is None:
            return plan.decode
        if is_ahead:
            speculation.skip_step(len(plan.decode))
            return plan.decode
        num_tokens = len(plan.decode) + sum(length for _, _, length in draft.chunks)
        rows = speculation.drafted(self._table, plan.decode, num_tokens)
        if not rows:
            return plan.decode
        are_all = len(rows) == len(plan.decode)  # which are in the same order
        entries = plan.decode if are_all else ints(row.request.entry for row in rows)
        # The newest token counts as computed by now, and has its block.
        num_computed = self._table.num_computed_tokens_S[entries] + ints(row.num_drafts for row in rows)
        for place in (num_computed > self._table.num_block_tokens_S[entries]).nonzero()[0].tolist():
            row = rows[place]
            missing = cache.missing_blocks(row.request, row.num_drafts)
            if missing > cache.pool.num_free:
                row.drop_drafts()
                continue
            draft.table.extend(cache.allocate(row.request, missing))
        draft.add_drafted(rows, entries)
        speculation.launched(rows)
        return no_ints() if are_all else without(plan.decode, entries)

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
        if self._state.speculation is not None and self._state.speculation.device is not None:
            self._state.speculation.device.lose()
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
        """Count the drafts that each of these requests keeps as computed."""
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
