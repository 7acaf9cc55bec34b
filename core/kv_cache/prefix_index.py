"""Finds the cached blocks of the longest prefix of a request's tokens that the pool still has.

Changes no block; keeps each request's block hashes and its last match. Legend: G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hookline.core.kv_cache.block_pool import HASH_BITS, MAX_HASH, BlockPool, hash_block, hash_prefix
from hookline.core.kv_cache.groups import CacheGroups, first_seen
from hookline.core.requests.request import Request

HOLE = -1
"""Stands in a request's list for a block that it no longer needs."""


def present(blocks: list[int]) -> list[int]:
    """A group's blocks without the holes, which come first; not to be written to."""
    return blocks[blocks.count(HOLE) :] if blocks and blocks[0] == HOLE else blocks


class PrefixIndex:
    """Finds the blocks of a pool by the prefixes that they hold, in all groups of layers.

    A cached block is identified exactly. With full attention everywhere, by its tokens and the serial of the block
    before it. With windows, the blocks before it may be gone: then its hash is a cryptographic hash of all tokens up to
    its end, and the root of the prefix stands in the serial's place.
    """

    def __init__(self, pool: BlockPool, groups: CacheGroups) -> None:
        self.pool, self.snapshots, self.windows = pool, pool.snapshots, groups.windows
        self.full = [group for group, window in enumerate(groups.windows) if window is None]
        self.windowed = [(group, window) for group, window in enumerate(groups.windows) if window is not None]
        self._follows_serials = groups.is_plain
        self._hash: Callable[[int, bytes], int] = hash_block if groups.is_plain else hash_prefix
        self._root_bits = MAX_HASH if groups.is_plain else -1
        """Bits of a prefix's root that its first block's hash is chained to: as many as `_hash` takes; -1 for all."""

    def block_tokens(self, request: Request, index: int) -> bytes:
        """Token ids of the request's full block `index`, as bytes."""
        size = request.block_size
        return request.tokens[index * size : (index + 1) * size].tobytes()

    def hashes(self, request: Request, first: int, last: int) -> Iterator[int]:
        """Chained hashes of the request's full blocks `first` .. `last` - 1; each is computed once, when it is due."""
        known = request.block_hashes
        for index in range(first, last):
            while index >= len(known):
                previous = known[-1] if known else request.prefix_root & self._root_bits
                known.append(self._hash(previous, self.block_tokens(request, len(known))))
            yield known[index]

    def block_hash(self, request: Request, index: int) -> int:
        """Chained hash of the request's full block `index`."""
        return next(self.hashes(request, index, index + 1))

    def key(self, group: int, hash_: int) -> int:
        """The key of a group's block in the pool's index; that of the first group is its hash."""
        return hash_ + (group << HASH_BITS)

    def max_cached_blocks(self, request: Request) -> int:
        """How many blocks may be taken from the cache: the full ones before the request's last known token.

        0 if all of its prompt has to be read.
        """
        if request.reader is not None and request.reader.needs_whole_prompt:
            return 0
        return (request.num_tokens - 1) // request.block_size

    def match_groups(self, request: Request) -> list[list[int]]:
        """For each group, the cached blocks of the longest prefix from which all can go on; HOLE for unneeded ones.

        Never all tokens of the request, since the last is always computed.
        """
        version, groups = request.match
        if version != self.pool.version:
            groups = self._find_groups(request) if self.pool.caching else [[] for _ in self.windows]
            request.keep_match(self.pool.version, groups)
        return groups

    def match_prefix(self, request: Request) -> list[int]:
        """The cached blocks of `match_groups`, of all groups; not to be written to."""
        groups = self.match_groups(request)
        return present(groups[0]) if len(groups) == 1 else [block for blocks in groups for block in present(blocks)]

    def num_matched(self, request: Request) -> int:
        """How many blocks of tokens `match_groups` covers, from the request's first token on."""
        return len(self.match_groups(request)[0])

    def _find_groups(self, request: Request) -> list[list[int]]:
        length = self.max_cached_blocks(request)
        found: list[list[int]] = [[] for _ in self.windows]
        for group in self.full:
            found[group] = self._find_run(request, group, range(length), request.prefix_root)
            length = len(found[group])
        while True:
            if self.windowed:
                length = self._find_windows(request, length, found)
            for group in self.full:
                del found[group][length:]
            if self.snapshots is None or (saved := self._num_saved(request, found)) == length:
                return found
            length = saved

    def _num_saved(self, request: Request, found: Sequence[list[int]]) -> int:
        """Blocks of the longest prefix among these cached blocks whose states were saved."""
        assert self.snapshots is not None
        for length in range(len(found[0]), 0, -1):
            if self.snapshots.find(self._state_key(request, length, found[0])) is not None:
                return length
        return 0

    def _state_key(self, request: Request, length: int, blocks: list[int]) -> int:
        """The snapshots' key of the prefix of `length` blocks. blocks: the cached blocks of the first group."""
        return self.pool.serial(blocks[length - 1]) if self._follows_serials else self.block_hash(request, length - 1)

    def _find_windows(self, request: Request, most: int, found: list[list[int]]) -> int:
        """Find the blocks of groups with windows, with holes before the windows, for the longest prefix that has all.

        Returns how many blocks of tokens that prefix is long, at most `most`.
        """
        size, length, known = self.pool.block_size, most, dict[tuple[int, int], int | None]()

        def find(group: int, index: int) -> int | None:
            if (group, index) not in known:
                known[group, index] = self._find(request, group, index, request.prefix_root)
            return known[group, index]

        while (missing := self._missing(length, find)) is not None:
            length = missing  # no prefix in between ends before the missing block leaves the window
        for group, window in self.windowed:
            start = first_seen(length * size, window, size)
            found[group] = [HOLE] * start + [known[group, index] for index in range(start, length)]  # type: ignore[misc]
        return length

    def _find_run(self, request: Request, group: int, indices: range, parent: int) -> list[int]:
        """The cached blocks of a group that hold the request's blocks of these indices, up to the first one missing.

        parent: what the pool knows the first of them by besides its hash and tokens.
        """
        blocks: list[int] = []
        # A long prompt looks up hundreds of blocks, so that calls of `_find` would be felt in a step.
        hashes, size, first_key = request.block_hashes, request.block_size, self.key(group, 0)
        find, serial, follows_serials = self.pool.find, self.pool.serial, self._follows_serials
        tokens = request.tokens[indices.start * size : indices.stop * size]
        contents, num_bytes = tokens.tobytes(), size * tokens.itemsize
        for place, index in enumerate(indices):
            content = contents[place * num_bytes : (place + 1) * num_bytes]
            if index == len(hashes):
                hashes.append(self._hash(hashes[-1] if hashes else request.prefix_root & self._root_bits, content))
            block = find(hashes[index] + first_key if group else hashes[index], content, parent)
            if block is None:
                break
            blocks.append(block)
            if follows_serials:
                parent = serial(block)
        return blocks

    def _find(self, request: Request, group: int, index: int, parent: int) -> int | None:
        """The cached block that holds the request's block `index` of a group, or None."""
        key = self.key(group, self.block_hash(request, index))
        return self.pool.find(key, self.block_tokens(request, index), parent)

    def _missing(self, length: int, find: Callable[[int, int], int | None]) -> int | None:
        """The last block that is not cached and that a window needs after a prefix of `length` blocks, if any."""
        size = self.pool.block_size
        for group, window in self.windowed:
            for index in reversed(range(first_seen(length * size, window, size), length)):
                if find(group, index) is None:
                    return index
        return None
