"""The blocks of requests: found by their prefix, shared, allocated, cached and given back.

A request carries its own blocks and hashes; only this module, and group_manager.py, change them. Legend: S entries of
the running table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hookline.core.kv_cache.block_pool import MAX_HASH, BlockPool, hash_block
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import RunningTable
from hookline.core.util.arrays import IntArray


class KVCacheManager:
    """Hands out the blocks of a pool to requests.

    Blocks that a chunk fills are cached as soon as the chunk is planned: requests of the same step can share them,
    since every layer writes all keys and values of a step before it attends. For models with full attention everywhere;
    `core.kv_cache.group_manager` extends it for the others.
    """

    blocks_per_column = 1
    """How many blocks every block_size tokens of a request take."""

    def __init__(self, pool: BlockPool, table: RunningTable) -> None:
        self.pool, self.table = pool, table

    # --------------------------------------------------------------------------------------------------- the contents

    def held_blocks(self, request: Request) -> list[int]:
        """All blocks that the request holds."""
        return request.blocks

    def table_entries(self, request: Request) -> list[tuple[int, int, int]]:
        """The entries of the request's blocks in the block table: (row, column, block)."""
        return [(request.row, column, block) for column, block in enumerate(request.blocks)]

    def block_tokens(self, request: Request, index: int) -> bytes:
        """Token ids of the request's full block `index`, as bytes."""
        size = request.block_size
        return request.tokens[index * size : (index + 1) * size].tobytes()

    def block_hash(self, request: Request, index: int) -> int:
        """Chained hash of the request's full block `index`; each is computed once."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            tokens = self.block_tokens(request, len(hashes))
            hashes.append(hash_block(self._hash_before(request), tokens))
        return hashes[index]

    def _hash_before(self, request: Request) -> int:
        """The hash that the request's next block hash is chained to; before the first, that of its cache salt."""
        hashes = request.block_hashes
        return hashes[-1] if hashes else request.prefix_root & MAX_HASH

    # ------------------------------------------------------------------------------------------------------- prefixes

    def max_cached_blocks(self, request: Request) -> int:
        """How many blocks may be taken from the cache: the full ones before the request's last known token.

        None while its prompt has to be scored, or if its pooler reads all of the prompt.
        """
        if request.pooling is not None and request.pooling.reads_all_tokens:
            return 0
        if request.scores is not None and request.scores.misses_prompt:
            return 0
        return (request.num_tokens - 1) // request.block_size

    def match_prefix(self, request: Request) -> list[int]:
        """Cached blocks that hold the request's first tokens; never all tokens, since the last is always computed."""
        if request.match[0] != self.pool.version:
            request.match = (
                self.pool.version,
                self._find_prefix(request, 0, request.prefix_root) if self.pool.caching else [],
            )
        blocks: list[int] = request.match[1]
        return blocks

    def num_matched(self, request: Request) -> int:
        """How many blocks of tokens `match_prefix` covers, from the request's first token on."""
        return len(self.match_prefix(request))

    def _find_prefix(self, request: Request, first: int, parent: int) -> list[int]:
        """The cached blocks that hold the request's tokens from block `first` on. parent: serial of the last one."""
        blocks: list[int] = []
        hashes, tokens, size = request.block_hashes, request.tokens, request.block_size
        for index in range(first, self.max_cached_blocks(request)):
            content = tokens[index * size : (index + 1) * size].tobytes()
            if index == len(hashes):
                hashes.append(hash_block(self._hash_before(request), content))
            block = self.pool.find(hashes[index], content, parent)
            if block is None:
                break
            blocks.append(block)
            parent = self.pool.serial(block)
        return blocks

    def touch_prefix(self, request: Request, blocks: Sequence[int]) -> None:
        """Share cached blocks with a request that has computed no token beyond those it has; they count as computed."""
        self.pool.hold(blocks)
        self._add(request, blocks)
        if blocks:
            request.parent_serial = self.pool.serial(blocks[-1])
        request.num_cached_block_tokens = request.num_computed_tokens = request.num_block_tokens

    def extend_prefix(self, request: Request) -> None:
        """Share blocks that earlier chunks of this same step compute."""
        if self.pool.caching:
            found = self._find_prefix(request, len(request.blocks), request.parent_serial)
            self.touch_prefix(request, found)

    # ----------------------------------------------------------------------------------------------------- allocation

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """How many blocks to allocate so that `num_tokens` more tokens fit."""
        return max(0, -(-(request.num_computed_tokens + num_tokens) // request.block_size) - len(request.blocks))

    def allocate(self, request: Request, num_blocks: int) -> list[tuple[int, int, int]]:
        """Give a request further blocks; returns the new entries of the block table: (row, column, block)."""
        first, blocks = len(request.blocks), self.pool.allocate(num_blocks)
        self._add(request, blocks)
        return [(request.row, column, block) for column, block in enumerate(blocks, first)]

    def allocate_next(self, entries_N: IntArray) -> list[tuple[int, int, int]]:
        """Make room for one more token of each of these running requests; returns the new block table entries."""
        table, changes = self.table, []
        is_full = table.num_computed_tokens_S[entries_N] >= table.num_block_tokens_S[entries_N]
        for request in table.requests(entries_N[is_full]):
            changes += self.allocate(request, self.blocks_per_column)
        return changes

    def _add(self, request: Request, blocks: Sequence[int]) -> None:
        request.blocks.extend(blocks)
        request.num_block_tokens = len(request.blocks) * request.block_size

    def release(self, request: Request) -> None:
        """Give back a request's blocks, if it has any; those that are cached can still be found."""
        blocks, request.blocks, request.num_block_tokens = request.blocks, [], 0
        request.parent_serial = request.prefix_root
        self.pool.release(blocks)

    def end_step(self, decode: IntArray, chunks: Sequence[tuple[Request, int, int]]) -> None:
        """Called when a step has all its blocks. decode: entries that decode in it. chunks: those that it computes."""

    # -------------------------------------------------------------------------------------------------------- caching

    def cache_filled_blocks(self, entries_N: IntArray) -> None:
        """`cache_blocks` for those of these running requests that have filled another block."""
        if self.pool.caching:
            table = self.table
            final_N = np.minimum(table.num_computed_tokens_S[entries_N], table.num_known_tokens_S[entries_N])
            is_filled = final_N - table.num_cached_block_tokens_S[entries_N] >= self.pool.block_size
            for request in table.requests(entries_N[is_filled]):
                self.cache_blocks(request)

    def cache_blocks(self, request: Request) -> None:
        """Make the request's full blocks findable whose tokens are all known."""
        if not self.pool.caching:
            return
        final = min(request.num_computed_tokens, request.num_known_tokens)
        while request.num_cached_block_tokens + request.block_size <= final:
            index = request.num_cached_block_tokens // request.block_size
            tokens, parent = self.block_tokens(request, index), request.parent_serial
            hash_ = self.block_hash(request, index)
            request.parent_serial = self.pool.cache(request.blocks[index], hash_, tokens, parent)
            request.num_cached_block_tokens += request.block_size

    def uncache(self, request: Request, num_tokens: int) -> None:
        """Make the blocks unfindable that hold any of the request's last `num_tokens` tokens, which were not computed.

        Only requests of the same step can share them by now, and that step was lost.
        """
        first = max(0, request.num_computed_tokens - num_tokens) // request.block_size
        self.pool.forget(request.blocks[first:])
