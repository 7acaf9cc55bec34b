"""The ledger that a plan's blocks are counted on: the KV cache as it would be if the plan were carried out.

It reads the pool and the requests and changes neither. Core checks every plan by replaying it on a fresh ledger.
"""

from __future__ import annotations

import numpy as np

from hookline.core.contracts import RequestView
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.kv_cache.prefix_index import present
from hookline.core.requests.request import Request
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.util.arrays import IntArray


class Ledger:
    """`core.contracts.BlockBudget` over a pool and the live requests.

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
