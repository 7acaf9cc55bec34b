"""The ledger of plans where groups of layers have blocks of their own: one count of free blocks over all groups."""

from __future__ import annotations

from hookline.core.contracts import RequestView
from hookline.core.kv_cache.budget import Ledger
from hookline.core.kv_cache.group_manager import HOLE, GroupedCacheManager
from hookline.core.requests.request_queue import RequestQueue


class GroupedLedger(Ledger):
    """`core.contracts.BlockBudget` over a pool that several groups share.

    It never says that more is free than the step that is carried out will find; what leaves a window in that step is
    free for the one after. More tokens than a step can compute cost what they take at most at a time, chunk by chunk.
    """

    def __init__(self, cache: GroupedCacheManager, queue: RequestQueue) -> None:
        super().__init__(cache, queue)
        self._groups = cache

    def cost(self, request: RequestView, num_tokens: int) -> int:
        """See BlockBudget."""
        live, size = self._requests[request.id], self._pool.block_size
        if live.blocks:
            new = max(0, -(-(live.num_computed_tokens + num_tokens) // size) - len(live.blocks))
            return self._cost_of(new, [_num_held(blocks) for blocks in live.group_blocks])
        cached = self.num_cached_tokens(request)
        new = -(-(cached + num_tokens) // size) - cached // size
        found = self._groups.match_groups(live)
        revived = sum(map(self._is_free, self._cache.match_prefix(live)))
        return self._cost_of(new, [_num_held(blocks) for blocks in found]) + revived

    def _cost_of(self, num_columns: int, num_held_G: list[int]) -> int:
        """Blocks of so many further columns; num_held_G: of each group, those that the request has by then."""
        total = 0
        for most, num_held in zip(self._groups.most_columns, num_held_G, strict=True):
            total += num_columns if most is None else min(num_columns, max(0, most - num_held))
        return total


def _num_held(blocks: list[int]) -> int:
    """Blocks of a list; holes come first."""
    return len(blocks) - blocks.count(HOLE)
