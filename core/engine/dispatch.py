"""Carries out a checked plan: moves requests and blocks, and has the message written that the ranks compute from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from hookline.core.contracts import Joining
from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.step_builder import ArgumentWriter, Dispatched, StepDraft, StepWriter
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.kv_cache.shared_prefix import shared_prefix
from hookline.core.requests.request import Request
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.running_table import NO_REQUEST, Sampled
from hookline.core.util.arrays import IntArray, ints


class Dispatcher:
    """Owns the rows of the request table; has the KV cache manager hand out blocks."""

    def __init__(
        self,
        cache: KVCacheManager,
        queue: RequestQueue,
        max_num_seqs: int,
        *,
        shares_prefixes: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.queue = queue
        self.table = queue.table
        self.free_rows = deque(range(max_num_seqs))
        self.arguments = ArgumentWriter(max_num_seqs)
        self.writer = StepWriter(self.table, self.arguments, shares_prefixes=shares_prefixes)
        self.now = now

    def carry_out(self, plan: CheckedPlan) -> Dispatched:
        """Preempt, admit and grow as planned; returns the step to launch."""
        self.queue.count_step(len(plan.decode))
        self.preempt(plan.preempt)
        draft = StepDraft()
        for request, _ in plan.prefill:
            if not request.blocks:
                self.cache.touch_prefix(request, self.cache.match_prefix(request))
        self.grow_decodes(plan.decode, draft)
        for request, num_tokens in plan.prefill:
            self.start_chunk(request, num_tokens, draft)
        self.cache.end_step(plan.decode, draft.chunks)
        return self.writer.write(draft, plan.decode)

    def may_join(self, joining: Joining) -> bool:
        """Whether `joining` holds for the requests that decode now and for those that wait the longest.

        Not if one of them asks for what graphs with prompts do not have. And not if decodes share a long prefix: a step
        of decodes alone reads it once.
        """
        table, decoding = self.table, self.queue.decoding()
        if not 0 < len(decoding) <= joining.max_decodes or table.num_beyond_sampling:
            return False
        next_ones = islice(self.queue.waiting.values(), joining.max_prompts)
        if any(request.asks_beyond_sampling for request in next_ones):
            return False
        return not (self.writer.shares_prefixes and shared_prefix(list(table.requests(decoding)))[1])

    def preempt(self, requests: Sequence[Request]) -> None:
        """Take rows and blocks from running requests and queue them again; what they computed stays cached."""
        for request in requests:
            self.retire(request)
            request.num_preemptions += 1
            request.reset()
        if requests:
            self.queue.preempt(requests)

    def lose(self, plan: CheckedPlan) -> list[Request]:
        """Take back the counts of a launched step that was lost. Returns its requests, all of which must start again.

        Requests that have ended since it was launched are left out.
        """
        prefill = [(request, num_tokens) for request, num_tokens in plan.prefill if request.id in self.queue.live]
        for request, num_tokens in prefill:
            self.cache.uncache(request, num_tokens)
        decode = plan.decode[self.table.id_S[plan.decode] != NO_REQUEST]
        self.table.num_computed_tokens_S[decode] -= 1
        self.writer.lose()
        return [*(request for request, _ in prefill), *self.table.requests(decode)]

    def retire(self, request: Request) -> None:
        """Give back a request's row and blocks, if it has any.

        A launched step may still use them: their next owner is computed after it, on the same device queue.
        """
        self.cache.release(request)
        self.free_row(request)

    def free_row(self, request: Request) -> None:
        """Give back a request's row, if it has one."""
        if request.row >= 0:
            self.arguments.forget(request)
            self.free_rows.append(request.row)
            request.row = -1

    def expect(self, sampled: Sampled) -> None:
        """Count the tokens of a launched step; a request that gets its last one leaves the running requests."""
        table, entries_N = self.table, sampled.entries_N
        table.num_tokens_S[entries_N] += 1
        is_last = table.num_tokens_S[entries_N] >= table.max_len_S[entries_N]
        for request in table.requests(entries_N[is_last]):
            self.queue.end(request)
            self.free_row(request)

    def finish_pooled(self, requests: Sequence[Request]) -> None:
        """Take requests out of the running ones, since a launched step computes their vectors."""
        for request in requests:
            if request.id in self.queue.running:
                self.queue.end(request)
                self.free_row(request)

    def start_chunk(self, request: Request, num_tokens: int, draft: StepDraft) -> None:
        """Admit the request if it is waiting, give it blocks for its next tokens, and note the chunk in the draft."""
        if request.row < 0:
            self.cache.extend_prefix(request)
            num_tokens = min(num_tokens, request.num_tokens - request.num_computed_tokens)
            if self.cache.missing_blocks(request, num_tokens) > self.cache.pool.num_free:
                # Only colliding hashes lead here: the ledger foresaw a shared block that turned out to be another's.
                self.retire(request)
                request.reset()
                return
            self.admit(request, draft)
        start = request.num_computed_tokens
        draft.table += self.cache.allocate(request, self.cache.missing_blocks(request, num_tokens))
        request.num_computed_tokens += num_tokens
        draft.num_new_tokens.append(max(0, start + num_tokens - max(start, request.high_water)))
        self.note_progress(ints([request.entry]), draft)
        self.cache.cache_blocks(request)
        draft.chunks.append((request, start, num_tokens))

    def admit(self, request: Request, draft: StepDraft) -> None:
        """Give a waiting request a row of the request table, and note the blocks that it shares for the block table."""
        self.queue.admit(request)
        request.row = self.free_rows.popleft()
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            request.scheduled_s = self.now()
        draft.admitted.append(request)
        draft.table += self.cache.table_entries(request)

    def grow_decodes(self, decode: IntArray, draft: StepDraft) -> None:
        """Count one more computed token for each of these entries; those at a block boundary get a block."""
        draft.table += self.cache.allocate_next(decode)
        self.table.num_computed_tokens_S[decode] += 1
        self.note_progress(decode, draft)

    def note_progress(self, entries: IntArray, draft: StepDraft) -> None:
        """Raise the high-water marks of these entries, and note whether any rose."""
        computed, marks = self.table.num_computed_tokens_S[entries], self.table.high_water_S[entries]
        draft.got_further |= bool(np.count_nonzero(computed > marks))
        self.table.high_water_S[entries] = np.maximum(computed, marks)
