"""Shares, allocates, caches and gives back the blocks of requests; prefix_index.py finds the blocks to share.

A request has one list of blocks for each group of layers (`core.kv_cache.groups`), all of the same length; a model with
full attention everywhere has one group. Blocks that lie wholly before a group's window of the next query are given back
and leave a HOLE; until they are handed out again, they can be found. A request carries its own blocks and hashes, and
changes them itself, on this module's behalf alone. Legend: G groups, S entries of the running table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from hookline.core.contracts import Limits
from hookline.core.kv_cache.block_pool import UNCACHED, BlockPool
from hookline.core.kv_cache.groups import CacheGroups, first_seen, most_columns
from hookline.core.kv_cache.prefix_index import HOLE, PrefixIndex, present
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import RunningTable
from hookline.core.util.arrays import IntArray


class KVCacheManager(PrefixIndex):
    """Hands out the blocks of a pool to requests, as many for every block_size tokens as there are groups.

    Blocks that a chunk fills are cached as soon as the chunk is planned: requests of the same step can share them,
    since every layer writes all keys and values of a step before it attends.

    A row of the block table has the columns of all groups one after the other; each group has as many columns as the
    longest sequence needs. max_decoded: most tokens that a decode computes in a step.
    """

    def __init__(
        self, pool: BlockPool, table: RunningTable, groups: CacheGroups, limits: Limits, max_decoded: int = 1
    ) -> None:
        super().__init__(pool, groups)
        self.table, self._max_decoded = table, max_decoded
        self.blocks_per_column = groups.num_groups
        """How many blocks every block_size tokens of a request take."""
        self.row_columns = -(-limits.max_model_len // pool.block_size)
        self.by_window: dict[int, list[int]] = {}
        for group, window in self.windowed:
            self.by_window.setdefault(window, []).append(group)
        self.most_columns = [
            (group, most)
            for group, window in self.windowed
            if (most := most_columns(window, pool.block_size, limits.max_num_batched_tokens)) is not None
        ]
        """Most columns of each group with a window in which a request has blocks at a time."""
        self._computing: set[int] = set()
        """Hashes of the blocks that chunks of the step being carried out compute."""
        self._trimmed: list[int] = []
        """Blocks that left a window with the step carried out last."""

    # --------------------------------------------------------------------------------------------------- the contents

    def held_blocks(self, request: Request) -> list[int]:
        """All blocks that the request holds."""
        return [block for blocks in request.group_blocks for block in present(blocks)]

    def table_entries(self, request: Request) -> list[tuple[int, int, int]]:
        """The entries of the request's blocks in the block table: (row, column, block)."""
        row, width = request.row, self.row_columns
        return [
            (row, column, block)
            for group, blocks in enumerate(request.group_blocks)
            for column, block in enumerate(blocks, group * width)
            if block != HOLE
        ]

    # ------------------------------------------------------------------------------------------------------- prefixes

    def touch_prefix(self, request: Request) -> None:
        """Share the cached blocks of `match_groups` with a request that has computed no token; they count as computed.

        Blocks of the cache leave the free list by this, so that no other request of the step is given them.
        """
        groups = self.match_groups(request)
        self._share(request, groups)
        if self.snapshots is not None:
            self._begin_states(request, groups)

    def _begin_states(self, request: Request, found: Sequence[list[int]]) -> None:
        """Start from the states saved with these cached blocks. Plan to save states at the prompt's last full block and
        at the last block that is cached without states, where other prompts diverge from this one.
        """
        assert self.snapshots is not None
        length, most, size = len(found[0]), self.max_cached_blocks(request), request.block_size
        run = self._find_run(request, 0, range(length, most), request.parent_serial) if self.full else []
        stops = sorted({stop for stop in (length + len(run), most) if stop > length})
        key = self._state_key(request, length, found[0]) if length else None
        self.snapshots.begin(request.id, key, [stop * size for stop in stops])

    def save_chunk(self, request: Request) -> None:
        """Save the states after a chunk, if it ends with a full block. Its blocks are cached by now."""
        num_tokens = request.num_computed_tokens
        if self.snapshots is None or num_tokens != request.num_cached_block_tokens:
            return
        key = request.parent_serial
        if not self._follows_serials:
            key = self.block_hash(request, num_tokens // request.block_size - 1)
        if key != UNCACHED:
            self.snapshots.save(request.id, request.row, num_tokens, key)

    def save_decodes(self, entries_N: IntArray) -> None:
        """Save the states of the decoding requests that fill a block in this step."""
        if self.snapshots is not None:
            size = self.pool.block_size
            for request in self.table.requests(entries_N[self.table.num_computed_tokens_S[entries_N] % size == 0]):
                self.snapshots.move(request.id, request.row, request.num_computed_tokens // size - 1)

    def extend_prefix(self, request: Request) -> None:
        """Share blocks that earlier chunks of this same step compute, in all groups."""
        if not self._computing or self.snapshots is not None:  # their states are not there yet
            return
        first, last = len(request.blocks), self.max_cached_blocks(request)
        found: list[list[int]] = []
        for group in range(len(self.windows)):
            found.append(self._find_run(request, group, range(first, last), request.parent_serial))
            last = first + len(found[-1])
        if last > first:
            self._share(request, [blocks[: last - first] for blocks in found])

    def _share(self, request: Request, found: Sequence[list[int]]) -> None:
        """Add cached blocks, and count their tokens as computed and cached."""
        for blocks in found:
            self.pool.hold(present(blocks))
        parent = request.parent_serial
        if self._follows_serials and found[0]:
            parent = self.pool.serial(found[0][-1])
        request.add_computed_blocks(found, parent)

    # ----------------------------------------------------------------------------------------------------- allocation

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """How many blocks to allocate, in all groups together, so that `num_tokens` more tokens fit."""
        num_columns = -(-(request.num_computed_tokens + num_tokens) // request.block_size) - len(request.blocks)
        return max(0, num_columns) * self.blocks_per_column

    def allocate(self, request: Request, num_blocks: int) -> list[tuple[int, int, int]]:
        """Give a request further blocks; returns the new entries of the block table: (row, column, block).

        num_blocks: of all groups together, each of which gets as many.
        """
        row, first, count, entries = request.row, len(request.blocks), num_blocks // self.blocks_per_column, []
        for group, held in enumerate(request.group_blocks):
            blocks = self.pool.allocate(count)
            held += blocks
            entries += [(row, column, block) for column, block in enumerate(blocks, group * self.row_columns + first)]
        request.count_blocks()
        return entries

    def allocate_next(self, entries_N: IntArray) -> list[tuple[int, int, int]]:
        """Make room for one more token of each of these running requests; returns the new block table entries."""
        table, width = self.table, self.row_columns
        full_N = entries_N[table.num_computed_tokens_S[entries_N] >= table.num_block_tokens_S[entries_N]]
        if not len(full_N):
            return []
        entries, blocks = [], iter(self.pool.allocate(len(full_N) * self.blocks_per_column))
        for request in table.requests(full_N):
            row, column = request.row, len(request.blocks)
            for group, held in enumerate(request.group_blocks):
                block = next(blocks)
                held.append(block)
                entries.append((row, group * width + column, block))
        table.num_block_tokens_S[full_N] += self.pool.block_size
        return entries

    def release(self, request: Request) -> None:
        """Give back a request's blocks, if it has any; cached blocks can still be found.

        The last columns of all groups are given back first, so that the beginning of the prefix is evicted last.
        """
        if self.snapshots is not None:
            self.snapshots.end(request.id)
        groups = request.drop_blocks()
        blocks = groups[0] if len(groups) == 1 else list(chain.from_iterable(zip(*groups, strict=True)))
        self.pool.release([block for block in blocks if block != HOLE] if self.windowed else blocks)

    def end_step(self, decode: IntArray, chunks: Sequence[tuple[Request, int, int]]) -> None:
        """Give back the blocks that leave the windows of these requests with this step, whose queries still see them.

        That is safe: their next holder writes to them in a later step, which the device computes after this one.
        Called when a step has all its blocks. decode: entries that decode in it. chunks: the chunks that it computes.
        """
        self._computing.clear()
        if not self.windowed:
            return
        self._trimmed.clear()
        table, size = self.table, self.pool.block_size
        computed = table.num_computed_tokens_S[decode]
        leaves = np.zeros(len(decode), dtype=np.bool_)
        for window in self.by_window:
            first = computed - window + 1
            leaves |= (first > 0) & (first % size < self._max_decoded)  # it may have come past a block's end
        for request in table.requests(decode[leaves]):
            self._trim(request)
        for request, _, _ in chunks:
            self._trim(request)

    def _trim(self, request: Request) -> None:
        """Give back the blocks that the request's next query does not see in any layer of their group."""
        left: list[int] = []
        num_computed_tokens, size = request.num_computed_tokens, request.block_size
        for window, groups in self.by_window.items():
            last = first_seen(num_computed_tokens, window, size) - 1
            for group in groups:
                blocks, index = request.group_blocks[group], last
                while index >= 0 and blocks[index] != HOLE:
                    left.append(blocks[index])
                    blocks[index] = HOLE
                    index -= 1
        self.pool.release(left)  # the first blocks are taken first: they are the least use to others
        self._trimmed += left

    # -------------------------------------------------------------------------------------------------------- caching

    def cache_filled_blocks(self, entries_N: IntArray) -> None:
        """`cache_blocks` for the running requests that have filled another block."""
        if self.pool.caching:
            table = self.table
            final_N = np.minimum(table.num_computed_tokens_S[entries_N], table.num_known_tokens_S[entries_N])
            is_filled = final_N - table.num_cached_block_tokens_S[entries_N] >= self.pool.block_size
            for request in table.requests(entries_N[is_filled]):
                self.cache_blocks(request)
            self._computing.clear()  # these are computed

    def cache_blocks(self, request: Request) -> None:
        """Make the request's full blocks findable whose tokens are all known."""
        if not self.pool.caching:
            return
        final = min(request.num_computed_tokens, request.num_known_tokens)
        while request.num_cached_block_tokens + request.block_size <= final:
            index = request.num_cached_block_tokens // request.block_size
            tokens, hash_ = self.block_tokens(request, index), self.block_hash(request, index)
            parent = request.parent_serial
            if self._follows_serials:
                parent = self.pool.cache(request.blocks[index], hash_, tokens, parent)
            else:
                self._cache_column(request, index, hash_, tokens)
            request.note_cached_block(parent)
            self._computing.add(hash_)
            if self.snapshots is not None and (key := parent if self._follows_serials else hash_) != UNCACHED:
                self.snapshots.name_due(request.id, index, key)

    def _cache_column(self, request: Request, index: int, hash_: int, tokens: bytes) -> None:
        """Make the blocks of a column cached, each in place of a free one with the same content if there is one.

        There may be one if the prefix was not found because another group lacked a block. A request that shares this
        block, which has a holder, takes none of the free ones.
        """
        root = request.prefix_root
        for group, blocks in enumerate(request.group_blocks):
            if blocks[index] == HOLE:
                continue
            key = self.key(group, hash_)
            known = self.pool.find(key, tokens, root)
            if known is not None and self.pool.references(known) == 0:
                self.pool.forget([known])
            self.pool.cache(blocks[index], key, tokens, root)

    def uncache(self, request: Request, num_tokens: int) -> None:
        """Make the blocks unfindable that hold any of the request's last `num_tokens` tokens, which were not computed.

        Only requests of the same step can share them by now, and that step was lost. What left a window with the step
        may have been computed by it, too.
        """
        first = max(0, request.num_computed_tokens - num_tokens) // request.block_size
        for blocks in request.group_blocks:
            self.pool.forget(present(blocks[first:]))
        self.pool.forget(self._trimmed)
