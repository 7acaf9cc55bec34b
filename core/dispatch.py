"""Carries out a checked plan: moves requests and blocks, and writes the step that the ranks compute.

Knows no policy and no tensors. Blocks a prompt chunk fills are findable from here on, so requests of the same step
share them: every layer writes all keys and values of a step before it attends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.block_pool import BlockPool
from core.budget import match_prefix, max_cached_blocks
from core.plan_check import CheckedPlan
from core.queue import RequestQueue
from core.request import Request
from core.shared_prefix import shared_prefix
from core.step import Step, ints


@dataclass
class _Draft:
    """A step while it is being written."""

    admitted: list[Request] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)
    chunks: list[tuple[Request, int, int]] = field(default_factory=list)
    got_further: bool = False


@dataclass(frozen=True)
class Dispatched:
    """A step, and the requests whose next token it draws, in the order of the draws."""

    step: Step
    drawn: Sequence[Request]
    num_prefill_tokens: int
    num_cached_tokens: int
    got_further: bool
    """Whether any request computes a token it never computed before."""


class Dispatcher:
    """Owns the rows of the request table and, with the pool, every block a request holds."""

    def __init__(
        self, pool: BlockPool, queue: RequestQueue, max_num_seqs: int, *, shares_prefixes: bool = False
    ) -> None:
        self.pool = pool
        self.queue = queue
        self.free_rows = deque(range(max_num_seqs))
        self.shares_prefixes = shares_prefixes
        self._decoding: tuple[int, ...] = ()
        self._shared_len = 0

    def carry_out(self, plan: CheckedPlan) -> Dispatched:
        """Preempt, admit and grow as planned; returns the step to launch."""
        self.preempt(plan.preempt)
        draft = _Draft()
        for request, _ in plan.prefill:
            if not request.blocks:
                self.hold_prefix(request, match_prefix(self.pool, request))
        for request in plan.decode:
            self.grow(request, 1, draft)
        for request, num_tokens in plan.prefill:
            self.start_chunk(request, num_tokens, draft)
        return self.write(draft, plan.decode)

    def preempt(self, requests: Sequence[Request]) -> None:
        """Take rows and blocks from running requests and queue them again; what they computed stays findable."""
        for request in requests:
            self.retire(request)
            request.num_preemptions += 1
            request.reset()
        self.queue.preempt(requests)

    def retire(self, request: Request) -> None:
        """Give back a request's row and blocks, if it has any.

        A launched step may still use them: whoever gets them next is computed after it, on the same device queue.
        """
        self.pool.release(request.blocks)
        request.blocks = []
        self.free_row(request)

    def free_row(self, request: Request) -> None:
        """Give back a request's row, if it has one."""
        if request.row >= 0:
            self.free_rows.append(request.row)
            request.row = -1

    def expect(self, drawn: Sequence[Request]) -> None:
        """Count the tokens of a launched step; a request's last one takes it out of the running ones."""
        for request in drawn:
            request.num_tokens += 1
            if request.is_full:
                self.queue.end(request)
                self.free_row(request)

    def hold_prefix(self, request: Request, blocks: Sequence[int]) -> None:
        """Share further findable blocks with a request that has computed nothing beyond them."""
        self.pool.hold(blocks)
        request.blocks = [*request.blocks, *blocks]
        if blocks:
            request.parent_serial = self.pool.serial(blocks[-1])
        request.num_registered_blocks = len(request.blocks)
        request.num_computed_tokens = len(request.blocks) * request.block_size

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
        self.grow(request, num_tokens, draft)
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
        draft.admitted.append(request)
        draft.table.extend((request.row, column, block) for column, block in enumerate(request.blocks))

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` more tokens have a place."""
        return max(0, -(-(request.num_computed_tokens + num_tokens) // request.block_size) - len(request.blocks))

    def grow(self, request: Request, num_tokens: int, draft: _Draft) -> None:
        """Allocate what the next tokens need and count them as computed."""
        missing = self.missing_blocks(request, num_tokens)
        if missing:
            blocks = self.pool.allocate(missing)
            columns = range(len(request.blocks), len(request.blocks) + missing)
            draft.table.extend((request.row, column, block) for column, block in zip(columns, blocks, strict=True))
            request.blocks.extend(blocks)
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens > request.high_water:
            request.high_water = request.num_computed_tokens
            draft.got_further = True

    def register(self, request: Request) -> None:
        """Make the request's full blocks findable, as far as their tokens are known and so final."""
        if not self.pool.caching:
            return
        final = min(request.num_computed_tokens, request.num_known_tokens)
        while (request.num_registered_blocks + 1) * request.block_size <= final:
            index = request.num_registered_blocks
            tokens, parent = request.block_tokens(index), request.parent_serial
            block = request.blocks[index]
            request.parent_serial = self.pool.register(block, request.block_hash(index), tokens, parent)
            request.num_registered_blocks += 1

    def write(self, draft: _Draft, decode: Sequence[Request]) -> Dispatched:
        """The step, and who is drawn for."""
        sampled = [index for index, (request, _, _) in enumerate(draft.chunks) if not request.is_prefilling]
        drawn = [*decode, *(draft.chunks[index][0] for index in sampled)]
        step = Step(sampled_chunks=ints(sampled), decode_rows=ints(request.row for request in decode))
        write_table(step, draft)
        write_chunks(step, draft.chunks)
        write_mask(step, drawn)
        computed = (request.num_computed_tokens for request in (*decode, *(chunk[0] for chunk in draft.chunks)))
        step.max_context_len = max(computed, default=0)
        step.all_greedy = all(request.params.temperature == 0 for request in drawn)
        if self.shares_prefixes and not draft.chunks:
            self.write_shared_prefix(step, decode)
        cached = sum(request.num_cached_tokens for request in draft.admitted if request.num_preemptions == 0)
        return Dispatched(step, drawn, len(step.token_ids_T), cached, draft.got_further)

    def write_shared_prefix(self, step: Step, decode: Sequence[Request]) -> None:
        """Look for a common prefix whenever other requests decode than in the last step that looked."""
        decoding = tuple(request.id for request in decode)
        if decoding != self._decoding:
            self._decoding = decoding
            group, self._shared_len = shared_prefix(decode)
            step.shared_rows = ints(request.row for request in group)
        step.shared_len = self._shared_len


def write_table(step: Step, draft: _Draft) -> None:
    """Fill in the admitted requests and the new entries of the block table."""
    step.admit_rows = ints(request.row for request in draft.admitted)
    step.admit_seeds = ints(request.seed for request in draft.admitted)
    step.admit_temperatures = float_bits(request.params.temperature for request in draft.admitted)
    if draft.table:
        step.table_rows, step.table_columns, step.table_blocks = np.array(draft.table, dtype=np.int64).T


def write_chunks(step: Step, chunks: Sequence[tuple[Request, int, int]]) -> None:
    """Fill in the prompt chunks: (request, first position, number of tokens)."""
    step.chunk_rows = ints(request.row for request, _, _ in chunks)
    step.chunk_starts = ints(start for _, start, _ in chunks)
    step.chunk_lens = ints(num_tokens for _, _, num_tokens in chunks)
    if chunks:
        tokens = [request.tokens[start : start + num_tokens] for request, start, num_tokens in chunks]
        step.token_ids_T = np.concatenate(tokens, dtype=np.int64)


def write_mask(step: Step, drawn: Sequence[Request]) -> None:
    """Forbid stop tokens to requests that have not reached their min_tokens."""
    pairs = [
        (index, token_id)
        for index, request in enumerate(drawn)
        if request.num_output_tokens < request.params.min_tokens
        for token_id in sorted(request.stop_ids)
    ]
    step.mask_rows = ints(index for index, _ in pairs)
    step.mask_tokens = ints(token_id for _, token_id in pairs)


def float_bits(values: Iterable[float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """float32 bit patterns, as integers: how a Step carries temperatures."""
    return np.fromiter(values, dtype=np.float32).view(np.int32).astype(np.int64)
