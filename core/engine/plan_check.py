"""Checks a scheduler's plan against the rules before any of it is carried out, and counts the blocks that it takes.

A plan that breaks a rule raises PlanError, before any request or block has changed. Every plan is checked by replaying
it on a fresh ledger: the KV cache as it would be if the plan were carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

import numpy as np

from hookline.core.contracts import ALL, Limits, Plan, RequestView
from hookline.core.errors import PlanError, shown
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.kv_cache.prefix_index import present
from hookline.core.requests.request import Request
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.util.arrays import IntArray, every, ints


@dataclass(slots=True)
class CheckedPlan:
    """A plan that was checked, with requests in place of ids.

    prefill: (request, tokens to compute beyond what the cache holds). decode: entries of `core.requests.running_table`.
    asked: the plan as the policy returned it.
    """

    prefill: Sequence[tuple[Request, int]]
    decode: IntArray
    preempt: Sequence[Request]
    asked: Plan

    @property
    def computes(self) -> bool:
        """Whether the step runs the model at all."""
        return len(self.prefill) > 0 or len(self.decode) > 0

    @property
    def does_anything(self) -> bool:
        """Whether there is anything to carry out."""
        return self.computes or len(self.preempt) > 0


def check_plan(plan: Plan, queue: RequestQueue, ledger: Ledger, limits: Limits, policy: str) -> CheckedPlan:
    """Resolve a plan's ids and replay it on a fresh ledger. policy: its name and origin, for errors.

    Raises: PlanError naming the policy, the rule, the value and the limit.
    """
    return _Checker(queue, ledger, limits, policy).check(plan)


def has_room(plan: CheckedPlan, queue: RequestQueue, ledger: Ledger, limits: Limits) -> bool:
    """Whether a fresh ledger has the blocks of a plan that was checked before its requests grew by several tokens.

    What the policy returned is not read again, as an iterator has nothing left.
    """
    try:
        _Checker(queue, ledger, limits, policy="").check_budget(plan.prefill, plan.decode, plan.preempt)
    except PlanError:
        return False
    return True


class _Checker:
    """Checks one plan; each method raises PlanError, with the rule, the value and the limit."""

    def __init__(self, queue: RequestQueue, ledger: Ledger, limits: Limits, policy: str) -> None:
        self.queue, self.ledger, self.limits, self.policy = queue, ledger, limits, policy
        self.seen: set[int] = set()

    def check(self, plan: Plan) -> CheckedPlan:
        """Check all rules, in the order in which the plan would be carried out."""
        if not isinstance(plan, Plan):
            raise self.error(f"returned a {type(plan).__name__}, not a Plan")
        try:
            preempt = [self.preempted(id_) for id_ in self.part(plan.preempt, "preempt")]
            decode = self.decoding() if plan.decode is ALL else self.decodes(self.part(plan.decode, "decode"))
            prefill = [
                self.prefilling(id_, index(num_tokens)) for id_, num_tokens in self.part(plan.prefill, "prefill")
            ]
        except (TypeError, ValueError) as error:
            raise self.error(f"returned a malformed plan ({error})") from error
        if not isinstance(plan.idle_s, int | float):
            raise self.error(f"asks to wait idle_s={shown(plan.idle_s)}, which is no number of seconds")
        self.check_limits(prefill, decode, preempt)
        self.check_budget(prefill, decode, preempt)
        return CheckedPlan(prefill, decode, preempt, plan)

    def part(self, named: Any, part: str) -> Sequence[Any]:
        """Copy a part of the plan. At most as many entries as there are requests are read, since a policy may return an
        endless iterator.
        """
        if isinstance(named, str):
            raise self.error(f"names {shown(named)} in {part}, not a list; all that can decode are contracts.ALL")
        limit = len(self.queue)
        if isinstance(named, (list, tuple)) and len(named) <= limit:
            return named
        found = list(islice(named, limit + 1))
        if len(found) > limit:
            raise self.error(f"names more requests in {part} than the {limit} that there are")
        return found

    def error(self, message: str) -> PlanError:
        """The error for a broken rule."""
        return PlanError(f"{self.policy} {message}; no part of this plan was carried out")

    def request(self, id_: int, part: str) -> Request:
        """The live request of this id, which the plan must name once only."""
        request = self.queue.live.get(id_)
        if request is None or id_ in self.queue.ending:
            raise self.error(f"names request {id_!r} in {part}, which is neither waiting nor running")
        if id_ in self.seen:
            raise self.error(f"names request {id_} twice")
        self.seen.add(id_)
        return request

    def preempted(self, id_: int) -> Request:
        """A request that the plan preempts, which must be running."""
        request = self.request(id_, "preempt")
        if id_ not in self.queue.running:
            raise self.error(f"preempts request {id_}, which is not running")
        return request

    def decoding(self) -> IntArray:
        """Table entries of all requests that can decode and that the plan does not preempt.

        They need not be noted as named: a plan that also prefills one is refused anyway, since that one is decoding.
        """
        entries = self.queue.decoding()
        return entries[~np.isin(self.queue.table.id_S[entries], list(self.seen))] if self.seen else entries

    def decodes(self, ids: Sequence[int]) -> IntArray:
        """Table entries of the requests that the plan decodes.

        All are checked at once; only if a check fails are they checked one by one, to name the request at fault.
        """
        found = [request for request in map(self.queue.running.get, ids) if request is not None]
        entries = ints(request.entry for request in found)
        seen = self.seen.union(ids)
        each_once = len(found) == len(ids) and len(seen) == len(self.seen) + len(ids)
        if not (each_once and every(self.queue.table.can_decode(entries))):
            return ints(self.decoded(id_).entry for id_ in ids)
        self.seen = seen
        return entries

    def decoded(self, id_: int) -> Request:
        """A request that the plan decodes, which must be running and have no known tokens left to compute."""
        request = self.request(id_, "decode")
        if id_ not in self.queue.running:
            raise self.error(f"decodes request {id_}, which is not running")
        if request.is_prefilling:
            raise self.error(f"decodes request {id_}, which is still prefilling")
        return request

    def prefilling(self, id_: int, num_tokens: int) -> tuple[Request, int]:
        """A request that the plan prefills, with 1 to as many tokens as it has left to compute."""
        request = self.request(id_, "prefill")
        if id_ in self.queue.running and not request.is_prefilling:
            raise self.error(f"prefills request {id_}, which is decoding")
        if num_tokens < 1:
            raise self.error(f"prefills {num_tokens!r} tokens of request {id_}; at least 1 is needed")
        left = request.num_tokens - request.num_computed_tokens
        if num_tokens > left:
            raise self.error(f"prefills {num_tokens} tokens of request {id_}, which has {left} left")
        return request, num_tokens

    def check_limits(
        self, prefill: Sequence[tuple[Request, int]], decode: IntArray, preempt: Sequence[Request]
    ) -> None:
        """Check max_num_batched_tokens and max_num_seqs."""
        num_tokens = len(decode) + sum(num_tokens for _, num_tokens in prefill)
        if num_tokens > self.limits.max_num_batched_tokens:
            limit = self.limits.max_num_batched_tokens
            raise self.error(f"plans {num_tokens} tokens, more than max_num_batched_tokens={limit}")
        admitted = sum(request.id in self.queue.waiting for request, _ in prefill)
        num_running = len(self.queue.running) - len(preempt) + admitted
        if admitted and num_running > self.limits.max_num_seqs:
            raise self.error(f"would run {num_running} requests, more than max_num_seqs={self.limits.max_num_seqs}")

    def check_budget(
        self, prefill: Sequence[tuple[Request, int]], decode: IntArray, preempt: Sequence[Request]
    ) -> None:
        """Take the plan's blocks from the ledger: there must be enough of them."""
        if not prefill and len(decode) * self.limits.max_blocks_per_token <= self.ledger.num_free:
            return
        for request in preempt:
            self.ledger.give_back(request.view)
        self.take_decodes(decode)
        for request, num_tokens in prefill:
            self.take(request, min(num_tokens, self.ledger.num_uncomputed_tokens(request.view)))

    def take_decodes(self, decode: IntArray) -> None:
        """Take the blocks of all decodes."""
        if not self.ledger.take_each(decode):
            for request in self.queue.table.requests(decode):  # to name the request that finds no block
                self.take(request, 1)

    def take(self, request: Request, num_tokens: int) -> None:
        """Take the blocks of some tokens of a request."""
        if not self.ledger.take(request.view, num_tokens):
            cost = self.ledger.cost(request.view, num_tokens)
            raise self.error(
                f"needs {cost} blocks for {num_tokens} tokens of request {request.id}, and {self.ledger.num_free} of "
                f"{self.limits.num_blocks} are free: preempt or wait"
            )


class Ledger:
    """`core.contracts.BlockBudget` over a pool and the live requests, which policies count on, too; it changes neither.

    It never counts more blocks as free than there are when the plan is carried out; blocks that leave a window in that
    step are free for the next one. More tokens than one step can compute cost the most blocks that they hold at a time
    when they are computed chunk by chunk.
    """

    def __init__(self, cache: KVCacheManager, queue: RequestQueue) -> None:
        self._cache, self._pool = cache, cache.pool
        self._queue = queue
        self._requests = queue.live
        self._num_free = cache.pool.num_free
        self._pending: set[int] = set()
        """Hashes of the blocks that the plan computes so far."""
        self._num_found: dict[int, int] = {}
        """Blocks that each waiting request found at its last look-up; never fewer later, as `_pending` only grows."""
        self._revived: set[int] = set()
        self._released: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """See BlockBudget."""
        return self._num_free

    def num_cached_tokens(self, request: RequestView) -> int:
        """See BlockBudget."""
        live = self._requests[request.id]
        if live.blocks or not self._pool.caching:
            return 0
        num_found = self._num_found.get(live.id) or self._cache.num_matched(live)
        if self._pending:
            last = self._cache.max_cached_blocks(live)
            for hash_ in self._cache.hashes(live, num_found, last):
                if hash_ not in self._pending:
                    break
                num_found += 1
            self._num_found[live.id] = num_found
        return num_found * live.block_size

    def num_uncomputed_tokens(self, request: RequestView) -> int:
        """See BlockBudget."""
        live = self._requests[request.id]
        return live.num_tokens - live.num_computed_tokens - self.num_cached_tokens(request)

    def cost(self, request: RequestView, num_tokens: int) -> int:
        """See BlockBudget."""
        live = self._requests[request.id]
        if live.blocks:
            new = max(0, -(-(live.num_computed_tokens + num_tokens) // live.block_size) - len(live.blocks))
            return self._cost_of(new, live.group_blocks)
        cached = self.num_cached_tokens(request)
        new = -(-(cached + num_tokens) // live.block_size) - cached // live.block_size
        found, revived = self._cache.match_prefix(live), self._revived
        to_revive = [block for block in found if block not in revived]  # none where the plan shares the prefix already
        return self._cost_of(new, self._cache.match_groups(live)) + sum(map(self._is_free, to_revive))

    def _cost_of(self, num_columns: int, held: list[list[int]]) -> int:
        """Blocks that this many further columns take. held: for each group, the blocks that the request then has."""
        total = num_columns * len(self._cache.full)
        for group, most in self._cache.most_columns:
            total += min(num_columns, max(0, most - len(present(held[group]))))
        return total

    def take(self, request: RequestView, num_tokens: int) -> bool:
        """See BlockBudget."""
        cost = self.cost(request, num_tokens)
        if cost > self._num_free:
            return False
        self._num_free -= cost
        self._foresee(self._requests[request.id], num_tokens)
        return True

    def take_decodes(self) -> bool:
        """See BlockBudget."""
        return self.take_each(self._queue.decoding())

    def take_each(self, entries: IntArray) -> bool:
        """`take_decodes` for the requests at these table entries; all of them decode, and none was given back."""
        table = self._queue.table
        crossing = np.count_nonzero(table.num_computed_tokens_S[entries] >= table.num_block_tokens_S[entries])
        cost = int(crossing) * self._cache.blocks_per_column
        if cost > self._num_free:
            return False
        self._num_free -= cost
        return True

    def give_back(self, request: RequestView) -> None:
        """See BlockBudget."""
        for block in self._cache.held_blocks(self._requests[request.id]):
            self._released[block] = self._released.get(block, 0) + 1
            self._num_free += self._is_free(block)

    def _foresee(self, request: Request, num_tokens: int) -> None:
        """Count the request's cached blocks as held, and the blocks that it will compute as found by later requests."""
        start = request.num_computed_tokens
        if not request.blocks:
            start = self.num_cached_tokens(request.view)
            self._revived.update(self._cache.match_prefix(request))
        shares_at_once = self._pool.caching and self._pool.snapshots is None  # no states are saved before the step ends
        if shares_at_once and request.is_prefilling:  # a decode's newest token may not be known yet
            first, last = start // request.block_size, (start + num_tokens) // request.block_size
            self._pending.update(self._cache.hashes(request, first, last))

    def _is_free(self, block: int) -> bool:
        return block not in self._revived and self._pool.references(block) == self._released.get(block, 0)
