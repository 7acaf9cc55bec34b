"""KV-cache blocks: their reference counts, the free ones, and the index of contents by prefix.

Blocks are numbers here; the memory behind them is the worker's. Every operation is O(1) per block. A block without a
holder keeps its content until it is handed out again, least recently used first, so a later request can still find it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import xxhash

from hookline.core.kv_cache.snapshots import Snapshots

ROOT = 0
"""Serial of the empty prefix; a request with a cache salt has another one in its place (RequestOptions.prefix_root)."""
MAX_HASH = 2**64 - 1
HASH_BITS = 256
"""Bits of a hash that names a whole prefix."""
UNCACHED = -1
"""Serial of content that cannot be found again; content that follows it cannot be found either."""


def hash_block(previous_hash: int, tokens: bytes) -> int:
    """Chained xxhash64 of a full block: the hash of everything before it, then its own token ids."""
    return xxhash.xxh64_intdigest(previous_hash.to_bytes(8, "little") + tokens)


def hash_prefix(previous_hash: int, tokens: bytes) -> int:
    """Chained blake2b of a full block, which names all tokens up to its end.

    Two prefixes with the same hash cannot be constructed, so blocks before it need not be compared. Takes five times as
    long as `hash_block`.
    """
    num_bytes = HASH_BITS // 8
    digest = blake2b(previous_hash.to_bytes(num_bytes, "little") + tokens, digest_size=num_bytes).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class Content:
    """A full block's tokens. `serial` is unique in the pool's life, so (parent, tokens) names one whole prefix."""

    hash: int
    tokens: bytes
    parent: int
    serial: int


class BlockPool:
    """Fixed-size blocks 0 .. num_blocks - 1 with reference counts and an index of their contents by chained hash.

    A hit compares the tokens and the parent's serial, so colliding hashes never share a block.

    snapshots: of models with states, without which no prefix is found.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, snapshots: Snapshots | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching, self.snapshots = caching, snapshots
        self._version = 0
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._contents: list[Content | None] = [None] * num_blocks
        self._index: dict[int, int] = {}
        self._next_serial = ROOT + 1

    @property
    def version(self) -> int:
        """Changes whenever the outcome of a match can change."""
        return self._version if self.snapshots is None else self._version + self.snapshots.version

    @property
    def num_free(self) -> int:
        """How many blocks have no holder, cached or not."""
        return len(self._free)

    def references(self, block: int) -> int:
        """How many holders a block has."""
        return self._references[block]

    def serial(self, block: int) -> int:
        """Serial of a block's content if it is cached, else UNCACHED."""
        content = self._contents[block]
        return UNCACHED if content is None else content.serial

    def find(self, hash_: int, tokens: bytes, parent: int) -> int | None:
        """The block that holds exactly these tokens after exactly this parent, or None."""
        block = self._index.get(hash_)
        if block is None:
            return None
        content = self._contents[block]
        assert content is not None, "the index names a block without content"
        return block if content.tokens == tokens and content.parent == parent else None

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block. A free block leaves the free list and keeps its content."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                del self._free[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one holder each, least recently used first; their old contents are dropped."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free: the plan was not checked"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Take one holder off each block, last block first, so that a prefix outlives what follows it."""
        references = self._references
        for block in reversed(blocks):
            references[block] = left = references[block] - 1
            assert left >= 0, f"block {block} released more often than held"
            if left == 0:
                self._free[block] = None
                if self._contents[block] is None:
                    self._free.move_to_end(block, last=False)

    def cache(self, block: int, hash_: int, tokens: bytes, parent: int) -> int:
        """Make a full block findable by its content; returns its serial, which the blocks after it name as parent.

        If the same content is cached already, in another block, that one stays and its serial is returned.
        """
        if not self.caching or parent == UNCACHED:
            return UNCACHED
        known = self._index.get(hash_)
        if known is not None:
            return self.serial(known) if self.find(hash_, tokens, parent) is not None else UNCACHED
        self._contents[block] = Content(hash_, tokens, parent, self._next_serial)
        self._index[hash_] = block
        self._next_serial += 1
        self._version += 1
        return self._next_serial - 1

    def forget(self, blocks: Iterable[int]) -> None:
        """Make these blocks' contents unfindable; their holders keep them."""
        for block in blocks:
            if self._contents[block] is not None and block in self._free:
                self._free.move_to_end(block, last=False)
            self._forget(block)

    def reset_cache(self) -> None:
        """Make all contents unfindable; holders keep their blocks."""
        self.forget(reversed(range(self.num_blocks)))
        if self.snapshots is not None:
            self.snapshots.clear()

    def check(self) -> None:
        """Assert the invariants: free or held but never both, and the index in step with the contents."""
        for block in range(self.num_blocks):
            assert (self._references[block] == 0) == (block in self._free), f"block {block} is free and held, or lost"
        for hash_, block in self._index.items():
            content = self._contents[block]
            assert content is not None and content.hash == hash_, f"stale index entry for block {block}"
        cached = sum(content is not None for content in self._contents)
        assert cached == len(self._index), "a block's content is not in the index"
        if self.snapshots is not None:
            self.snapshots.check()

    def _forget(self, block: int) -> None:
        content = self._contents[block]
        if content is not None:
            del self._index[content.hash]
            if self.snapshots is not None:  # a key is either
                self.snapshots.drop(content.serial)
                self.snapshots.drop(content.hash)
            self._contents[block] = None
            self._version += 1
