"""Carries out a checked plan: moves requests and blocks, and writes the step that the ranks compute.

Knows no policy and no tensors. Blocks a prompt chunk fills are findable from here on, so requests of the same step
share them: every layer writes all keys and values of a step before it attends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.arguments import ArgumentWriter, Chunk
from core.block_pool import BlockPool
from core.budget import match_prefix, max_cached_blocks
from core.plan_check import CheckedPlan
from core.queue import RequestQueue
from core.request import Request
from core.shared_prefix import shared_prefix
from core.slots import Drawn
from core.step import IntArray, Step, float_bits, ints, no_ints


@dataclass
class _Draft:
    """A step while it is being written."""

    admitted: list[Request] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)
    chunks: list[tuple[Request, int, int]] = field(default_factory=list)
    got_further: bool = False


@dataclass(frozen=True)
class Dispatched:
    """A step, and whose next tokens it draws."""

    step: Step
    drawn: Drawn
    num_prefill_tokens: int
    num_cached_tokens: int
    num_prompt_tokens: int
    """Tokens of the prompts that begin with this step; some may be cached."""
    got_further: bool
    """Whether any request computes a token it never computed before."""
    chunks: Sequence[Chunk] = ()
    """The prompt chunks, if the step scores tokens."""


class Dispatcher:
    """Owns the rows of the request table and, with the pool, every block a request holds."""

    def __init__(
        self,
        pool: BlockPool,
        queue: RequestQueue,
        max_num_seqs: int,
        *,
        shares_prefixes: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.queue = queue
        self.slots = queue.slots
        self.free_rows = deque(range(max_num_seqs))
        self.shares_prefixes = shares_prefixes
        self.arguments = ArgumentWriter(max_num_seqs)
        self.now = now
        self._decoding = no_ints()
        self._shared_len = 0

    def carry_out(self, plan: CheckedPlan) -> Dispatched:
        """Preempt, admit and grow as planned; returns the step to launch."""
        self.preempt(plan.preempt)
        draft = _Draft()
        for request, _ in plan.prefill:
            if not request.blocks:
                self.hold_prefix(request, match_prefix(self.pool, request))
        self.grow_decodes(plan.decode, draft)
        for request, num_tokens in plan.prefill:
            self.start_chunk(request, num_tokens, draft)
        return self.write(draft, plan.decode)

    def preempt(self, requests: Sequence[Request]) -> None:
        """Take rows and blocks from running requests and queue them again; what they computed stays findable."""
        for request in requests:
            self.retire(request)
            request.num_preemptions += 1
            request.reset()
        if requests:
            self.queue.preempt(requests)

    def retire(self, request: Request) -> None:
        """Give back a request's row and blocks, if it has any.

        A launched step may still use them: whoever gets them next is computed after it, on the same device queue.
        """
        self.pool.release(request.drop_blocks())
        self.free_row(request)

    def free_row(self, request: Request) -> None:
        """Give back a request's row, if it has one."""
        if request.row >= 0:
            self.arguments.forget(request)
            self.free_rows.append(request.row)
            request.row = -1

    def expect(self, drawn: Drawn) -> None:
        """Count the tokens of a launched step; a request's last one takes it out of the running ones."""
        slots, slots_N = self.slots, drawn.slots_N
        slots.num_tokens_S[slots_N] += 1
        is_last = slots.num_tokens_S[slots_N] >= slots.max_len_S[slots_N]
        for request in slots.requests(slots_N[is_last]):
            self.queue.end(request)
            self.free_row(request)

    def hold_prefix(self, request: Request, blocks: Sequence[int]) -> None:
        """Share further findable blocks with a request that has computed nothing beyond them."""
        self.pool.hold(blocks)
        request.add_blocks(blocks)
        if blocks:
            request.parent_serial = self.pool.serial(blocks[-1])
        request.num_registered_tokens = request.num_computed_tokens = request.num_block_tokens

    def start_chunk(self, request: Request, num_tokens: int, draft: _Draft) -> None:
        """Admit the request if it is waiting, then plan its next tokens."""
        if request.row < 0:
            self.extend_prefix(request)
            num_tokens = min(num_tokens, request.num_tokens - request.num_computed_tokens)
            if self.missing_blocks(request, num_tokens) > self.pool.num_free:
                # Only colliding hashes lead here: the ledger foresaw a shared block that turned out to be another's.
                self.retire(request)
                request.reset()
                return
            self.admit(request, draft)
        start = request.num_computed_tokens
        self.allocate(request, self.missing_blocks(request, num_tokens), draft)
        request.num_computed_tokens += num_tokens
        self.note_progress(ints([request.slot]), draft)
        self.register(request)
        draft.chunks.append((request, start, num_tokens))

    def extend_prefix(self, request: Request) -> None:
        """Share what earlier chunks of this very step will have computed."""
        for index in range(len(request.blocks), max_cached_blocks(request) if self.pool.caching else 0):
            tokens, parent = request.block_tokens(index), request.parent_serial
            block = self.pool.find(request.block_hash(index), tokens, parent)
            if block is None:
                return
            self.hold_prefix(request, [block])

    def admit(self, request: Request, draft: _Draft) -> None:
        """Give a waiting request a row; the blocks it shares go into the table."""
        self.queue.admit(request)
        request.row = self.free_rows.popleft()
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            request.scheduled_s = self.now()
        draft.admitted.append(request)
        draft.table.extend((request.row, column, block) for column, block in enumerate(request.blocks))

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` more tokens have a place."""
        return max(0, -(-(request.num_computed_tokens + num_tokens) // request.block_size) - len(request.blocks))

    def grow_decodes(self, decode: IntArray, draft: _Draft) -> None:
        """One more token for each of these slots; those at a block boundary get a block."""
        slots = self.slots
        is_full = slots.num_computed_tokens_S[decode] >= slots.num_block_tokens_S[decode]
        for request in slots.requests(decode[is_full]):
            self.allocate(request, 1, draft)
        slots.num_computed_tokens_S[decode] += 1
        self.note_progress(decode, draft)

    def allocate(self, request: Request, num_blocks: int, draft: _Draft) -> None:
        """Give a request further blocks."""
        first, blocks = len(request.blocks), self.pool.allocate(num_blocks)
        draft.table.extend((request.row, column, block) for column, block in enumerate(blocks, first))
        request.add_blocks(blocks)

    def note_progress(self, slots: IntArray, draft: _Draft) -> None:
        """Raise the high-water marks of these slots, and note whether any rose."""
        computed, marks = self.slots.num_computed_tokens_S[slots], self.slots.high_water_S[slots]
        draft.got_further |= bool((computed > marks).any())
        self.slots.high_water_S[slots] = np.maximum(computed, marks)

    def register_each(self, slots_N: IntArray) -> None:
        """`register` for those of these slots that have filled a block since."""
        if self.pool.caching:
            slots = self.slots
            final_N = np.minimum(slots.num_computed_tokens_S[slots_N], slots.num_known_tokens_S[slots_N])
            is_filled = final_N - slots.num_registered_tokens_S[slots_N] >= self.pool.block_size
            for request in slots.requests(slots_N[is_filled]):
                self.register(request)

    def register(self, request: Request) -> None:
        """Make the request's full blocks findable, as far as their tokens are known and so final."""
        if not self.pool.caching:
            return
        final = min(request.num_computed_tokens, request.num_known_tokens)
        while request.num_registered_tokens + request.block_size <= final:
            index = request.num_registered_tokens // request.block_size
            tokens, parent = request.block_tokens(index), request.parent_serial
            block = request.blocks[index]
            request.parent_serial = self.pool.register(block, request.block_hash(index), tokens, parent)
            request.num_registered_tokens += request.block_size

    def write(self, draft: _Draft, decode: IntArray) -> Dispatched:
        """The step, and who is drawn for."""
        slots, computing, drawn = self.slots, decode, decode
        step = Step(decode_rows=slots.row_S[decode])
        write_table(step, draft)
        if draft.chunks:
            write_chunks(step, draft.chunks)
            chunked = ints(request.slot for request, _, _ in draft.chunks)
            step.sampled_chunks = np.flatnonzero(slots.can_decode(chunked))
            computing = np.concatenate([decode, chunked])
            drawn = np.concatenate([decode, chunked[step.sampled_chunks]])
        self.write_mask(step, drawn)
        self.arguments.write(step, draft.admitted, draft.chunks, slots.requests(drawn))
        step.max_context_len = int(slots.num_computed_tokens_S[computing].max(initial=0))
        step.all_greedy = bool(slots.is_greedy_S[drawn].all())
        if self.shares_prefixes and not draft.chunks:
            self.write_shared_prefix(step, decode)
        begun = [request for request in draft.admitted if request.num_preemptions == 0]
        return Dispatched(
            step,
            slots.drawn(drawn),
            num_prefill_tokens=len(step.token_ids_T),
            num_cached_tokens=sum(request.num_cached_tokens for request in begun),
            num_prompt_tokens=sum(request.num_prompt_tokens for request in begun),
            got_further=draft.got_further,
            chunks=draft.chunks if step.num_logprobs >= 0 else (),
        )

    def write_mask(self, step: Step, drawn: IntArray) -> None:
        """Forbid stop tokens to requests that have not reached their min_tokens."""
        (places,) = (self.slots.num_tokens_S[drawn] < self.slots.min_len_S[drawn]).nonzero()
        if not len(places):
            return
        requests = self.slots.requests(drawn[places])
        pairs = [
            (place, token_id)
            for place, request in zip(places.tolist(), requests, strict=True)
            for token_id in sorted(request.stop_ids)
        ]
        step.mask_rows = ints(place for place, _ in pairs)
        step.mask_tokens = ints(token_id for _, token_id in pairs)

    def write_shared_prefix(self, step: Step, decode: IntArray) -> None:
        """Look for a common prefix whenever other requests decode than in the last step that looked."""
        decoding = self.slots.id_S[decode]
        if not np.array_equal(decoding, self._decoding):
            self._decoding = decoding
            group, self._shared_len = shared_prefix(list(self.slots.requests(decode)))
            step.shared_rows = ints(request.row for request in group)
        step.shared_len = self._shared_len


def write_table(step: Step, draft: _Draft) -> None:
    """Fill in the admitted requests and the new entries of the block table."""
    if draft.admitted:
        step.admit_rows = ints(request.row for request in draft.admitted)
        step.admit_seeds = ints(request.seed for request in draft.admitted)
        step.admit_temperatures = float_bits(request.temperature for request in draft.admitted)
    if draft.table:
        step.table_rows, step.table_columns, step.table_blocks = np.array(draft.table, dtype=np.int64).T


def write_chunks(step: Step, chunks: Sequence[tuple[Request, int, int]]) -> None:
    """Fill in the prompt chunks: (request, first position, number of tokens)."""
    step.chunk_rows = ints(request.row for request, _, _ in chunks)
    step.chunk_starts = ints(start for _, start, _ in chunks)
    step.chunk_lens = ints(num_tokens for _, _, num_tokens in chunks)
    tokens = [request.tokens[start : start + num_tokens] for request, start, num_tokens in chunks]
    step.token_ids_T = np.concatenate(tokens, dtype=np.int64)
