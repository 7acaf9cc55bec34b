"""The blocks of requests if layers differ in what they keep: a request has a list of blocks for each group of layers.

All groups' lists have the same length. Blocks that lie wholly before a group's window of the next query are given back
and leave a HOLE; until they are handed out again, they can be found. A block's content is identified by its group and
by a cryptographic hash of all tokens up to its end, so that it stays findable when blocks before it are gone, as those
before a window are. Legend: G groups, S entries of the running table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

from hookline.core.contracts import Limits
from hookline.core.kv_cache.block_pool import ROOT, BlockPool
from hookline.core.kv_cache.groups import CacheGroups, first_seen, most_columns
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import RunningTable
from hookline.core.util.arrays import IntArray

HOLE = -1
"""Stands in a request's list for a block that it no longer needs."""
HASH_BYTES = 32
"""Bytes of a blake2b hash: two prefixes with the same hash cannot be constructed, so tokens need not be compared."""


def chain_hash(previous: int, tokens: bytes) -> int:
    """Cryptographic hash of all tokens up to a block's end: of the hash before it, then of its own token ids."""
    return int.from_bytes(
        blake2b(previous.to_bytes(HASH_BYTES, "little") + tokens, digest_size=HASH_BYTES).digest(), "little"
    )


class GroupedCacheManager(KVCacheManager):
    """See KVCacheManager; `request.group_blocks` has a list for each group, of which `request.blocks` is the first.

    A row of the block table has the columns of each group one after the other, each wide enough for the longest
    sequence.
    """

    def __init__(self, pool: BlockPool, table: RunningTable, groups: CacheGroups, limits: Limits) -> None:
        super().__init__(pool, table)
        self.windows = groups.windows
        self.row_columns = -(-limits.max_model_len // pool.block_size)
        self.full = [group for group, window in enumerate(groups.windows) if window is None]
        self.windowed = [(group, window) for group, window in enumerate(groups.windows) if window is not None]
        self.by_window: dict[int, list[int]] = {}
        for group, window in self.windowed:
            self.by_window.setdefault(window, []).append(group)
        self.most_columns = [
            most_columns(window, pool.block_size, limits.max_num_batched_tokens) for window in self.windows
        ]
        self.blocks_per_column = groups.num_groups
        self._computing: set[int] = set()
        """Hashes of the blocks that chunks of the step being carried out compute."""
        self._trimmed: list[int] = []
        """Blocks that left a window with the step carried out last."""

    # --------------------------------------------------------------------------------------------------- the contents

    def block_hash(self, request: Request, index: int) -> int:
        """`chain_hash` of the request's full block `index`; each is computed once."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            previous = hashes[-1] if hashes else request.prefix_root
            hashes.append(chain_hash(previous, self.block_tokens(request, len(hashes))))
        return hashes[index]

    def _key(self, group: int, hash_: int) -> int:
        """The key of a group's block in the pool's index."""
        return hash_ * len(self.windows) + group

    def _find(self, group: int, hash_: int) -> int | None:
        return self.pool.find(self._key(group, hash_), b"", ROOT)

    def held_blocks(self, request: Request) -> list[int]:
        """See KVCacheManager."""
        return [block for blocks in request.group_blocks for block in blocks if block != HOLE]

    def table_entries(self, request: Request) -> list[tuple[int, int, int]]:
        """See KVCacheManager."""
        return self._entries(request, 0)

    def _entries(self, request: Request, first: int) -> list[tuple[int, int, int]]:
        row, width = request.row, self.row_columns
        return [
            (row, group * width + column, blocks[column])
            for group, blocks in enumerate(request.group_blocks)
            for column in range(first, len(blocks))
            if blocks[column] != HOLE
        ]

    # ------------------------------------------------------------------------------------------------------- prefixes

    def match_groups(self, request: Request) -> list[list[int]]:
        """For each group, the cached blocks of the longest prefix from which all can go on; HOLE for unneeded ones."""
        if request.match[0] != self.pool.version:
            found = self._find_groups(request) if self.pool.caching else [[] for _ in self.windows]
            request.match = (self.pool.version, found)
        groups: list[list[int]] = request.match[1]
        return groups

    def match_prefix(self, request: Request) -> list[int]:
        """The cached blocks of `match_groups`, of all groups."""
        return [block for blocks in self.match_groups(request) for block in blocks if block != HOLE]

    def num_matched(self, request: Request) -> int:
        """See KVCacheManager."""
        return len(self.match_groups(request)[0])

    def _find_groups(self, request: Request) -> list[list[int]]:
        size, known = self.pool.block_size, dict[tuple[int, int], int | None]()

        def _found(group: int, index: int) -> int | None:
            if (group, index) not in known:
                known[group, index] = self._find(group, self.block_hash(request, index))
            return known[group, index]

        length, most = 0, self.max_cached_blocks(request)
        while length < most and all(_found(group, length) is not None for group in self.full):
            length += 1
        while (missing := self._missing(length, _found)) is not None:
            length = missing  # no prefix in between ends before the missing block leaves the window
        starts = [0 if window is None else first_seen(length * size, window, size) for window in self.windows]
        return [
            [HOLE if index < start else known[group, index] for index in range(length)]  # type: ignore[misc]
            for group, start in enumerate(starts)
        ]

    def _missing(self, length: int, found: Callable[[int, int], int | None]) -> int | None:
        """The last block that is not cached and that a window needs after a prefix of `length` blocks, if any."""
        size = self.pool.block_size
        for group, window in self.windowed:
            for index in reversed(range(first_seen(length * size, window, size), length)):
                if found(group, index) is None:
                    return index
        return None

    def touch_prefix(self, request: Request, blocks: Sequence[int]) -> None:
        """Share the cached blocks of `match_groups`, given as `blocks`, with a request that has computed no token."""
        self.pool.hold(blocks)
        request.group_blocks = [list(group) for group in self.match_groups(request)]
        self._note_columns(request)
        request.num_cached_block_tokens = request.num_computed_tokens = request.num_block_tokens

    def extend_prefix(self, request: Request) -> None:
        """Share blocks that earlier chunks of this same step compute, in all groups."""
        if not self._computing:
            return
        found: list[list[int]] = [[] for _ in self.windows]
        index, most = len(request.blocks), self.max_cached_blocks(request)
        while index < most and (hash_ := self.block_hash(request, index)) in self._computing:
            column = [self._find(group, hash_) for group in range(len(self.windows))]
            if None in column:
                break
            for blocks, block in zip(found, column, strict=True):
                assert block is not None
                blocks.append(block)
            index += 1
        if not found[0]:
            return
        for held, blocks in zip(request.group_blocks, found, strict=True):
            self.pool.hold(blocks)
            held.extend(blocks)
        self._note_columns(request)
        request.num_cached_block_tokens = request.num_computed_tokens = request.num_block_tokens

    def _note_columns(self, request: Request) -> None:
        request.blocks = request.group_blocks[0]
        request.num_block_tokens = len(request.blocks) * request.block_size

    # ----------------------------------------------------------------------------------------------------- allocation

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """See KVCacheManager; of all groups together."""
        return super().missing_blocks(request, num_tokens) * len(self.windows)

    def allocate(self, request: Request, num_blocks: int) -> list[tuple[int, int, int]]:
        """See KVCacheManager; num_blocks: of all groups together."""
        if not request.group_blocks:
            request.group_blocks = [[] for _ in self.windows]
        count, first = num_blocks // len(self.windows), len(request.group_blocks[0])
        blocks = self.pool.allocate(num_blocks)
        for group, held in enumerate(request.group_blocks):
            held.extend(blocks[group * count : (group + 1) * count])
        self._note_columns(request)
        return self._entries(request, first)

    def release(self, request: Request) -> None:
        """See KVCacheManager. The last columns of all groups are given back first, so that a common prefix is left."""
        columns = zip(*request.group_blocks, strict=True)
        request.blocks, request.group_blocks, request.num_block_tokens = [], [], 0
        self.pool.release([block for column in columns for block in column if block != HOLE])

    def end_step(self, decode: IntArray, chunks: Sequence[tuple[Request, int, int]]) -> None:
        """Give back the blocks that leave the windows of these requests with this step, whose queries still see them.

        That is safe: their next holder writes to them in a later step, which the device computes after this one.
        """
        self._computing.clear()
        self._trimmed.clear()
        if not self.windowed:
            return
        table, size = self.table, self.pool.block_size
        computed = table.num_computed_tokens_S[decode]
        leaves = np.zeros(len(decode), dtype=np.bool_)
        for window in self.by_window:
            first = computed - window + 1
            leaves |= (first > 0) & (first % size == 0)
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

    def cache_blocks(self, request: Request) -> None:
        """See KVCacheManager."""
        if not self.pool.caching:
            return
        final = min(request.num_computed_tokens, request.num_known_tokens)
        while request.num_cached_block_tokens + request.block_size <= final:
            index = request.num_cached_block_tokens // request.block_size
            hash_ = self.block_hash(request, index)
            for group, blocks in enumerate(request.group_blocks):
                if blocks[index] != HOLE:
                    self._cache_block(blocks[index], group, hash_)
            request.num_cached_block_tokens += request.block_size
            self._computing.add(hash_)

    def cache_filled_blocks(self, entries_N: IntArray) -> None:
        """See KVCacheManager."""
        super().cache_filled_blocks(entries_N)
        self._computing.clear()  # these are computed

    def _cache_block(self, block: int, group: int, hash_: int) -> None:
        """Make a block cached, in place of a free one with the same content if there is one.

        There may be one if the prefix was not found because another group lacked a block. A request that shares this
        block, which has a holder, takes none of the free ones.
        """
        known = self._find(group, hash_)
        if known is not None and self.pool.references(known) == 0:
            self.pool.forget([known])
        self.pool.cache(block, self._key(group, hash_), b"", ROOT)

    def uncache(self, request: Request, num_tokens: int) -> None:
        """See KVCacheManager. What left a window with the step may have been computed by it, too."""
        first = max(0, request.num_computed_tokens - num_tokens) // request.block_size
        for blocks in request.group_blocks:
            self.pool.forget(block for block in blocks[first:] if block != HOLE)
        self.pool.forget(self._trimmed)
