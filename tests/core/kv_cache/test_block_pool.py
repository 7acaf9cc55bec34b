"""Blocks: ownership, the prefix index, and the order of reuse."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hookline.core.kv_cache import block_pool
from hookline.core.kv_cache.block_pool import ROOT, UNCACHED, BlockPool, hash_block
from tests.fuzzing import examples


def fill(pool, block, tokens, previous_hash=0, parent=ROOT):
    content = np.asarray(tokens, dtype=np.int32).tobytes()
    hash_ = hash_block(previous_hash, content)
    return hash_, content, pool.cache(block, hash_, content, parent)


def test_a_released_block_is_found_again_by_its_content():
    pool = BlockPool(4, 2)
    (block,) = pool.allocate(1)
    hash_, content, serial = fill(pool, block, [1, 2])
    pool.release([block])
    assert pool.find(hash_, content, ROOT) == block
    assert pool.serial(block) == serial
    pool.hold([block])
    assert pool.num_free == 3


def test_a_reallocated_block_loses_its_old_content():
    pool = BlockPool(1, 2)
    (block,) = pool.allocate(1)
    hash_, content, _ = fill(pool, block, [1, 2])
    pool.release([block])
    pool.allocate(1)
    assert pool.find(hash_, content, ROOT) is None
    assert pool.serial(block) == UNCACHED


def test_a_hit_on_another_parent_is_refused():
    pool = BlockPool(4, 2)
    first, second = pool.allocate(2)
    hash_, _, serial = fill(pool, first, [1, 2])
    child_hash, child, _ = fill(pool, second, [3, 4], hash_, serial)
    assert pool.find(child_hash, child, serial) == second
    assert pool.find(child_hash, child, serial + 1) is None


def test_colliding_hashes_never_share_a_block(monkeypatch):
    monkeypatch.setattr(block_pool, "hash_block", lambda previous, tokens: 7)
    pool = BlockPool(4, 2)
    first, second = pool.allocate(2)
    one, other = b"one.", b"othr"
    assert pool.cache(first, 7, one, ROOT) > ROOT
    assert pool.cache(second, 7, other, ROOT) == UNCACHED
    assert pool.find(7, one, ROOT) == first
    assert pool.find(7, other, ROOT) is None
    assert pool.cache(second, 9, b"next", UNCACHED) == UNCACHED


def test_the_same_content_in_a_second_block_keeps_the_first_one_findable():
    pool = BlockPool(4, 2)
    first, second = pool.allocate(2)
    hash_, content, serial = fill(pool, first, [1, 2])
    assert fill(pool, second, [1, 2])[2] == serial
    assert pool.find(hash_, content, ROOT) == first
    pool.release([second])
    assert pool.find(hash_, content, ROOT) == first


def test_the_least_recently_used_content_is_dropped_first_and_a_prefix_outlives_its_tail():
    pool = BlockPool(3, 2)
    blocks = pool.allocate(3)
    hashes, parent = [], ROOT
    for index, block in enumerate(blocks):
        hash_, content, parent = fill(pool, block, [index, index], hashes[-1][0] if hashes else 0, parent)
        hashes.append((hash_, content))
    pool.release(blocks)
    pool.allocate(1)
    assert pool.find(*hashes[0], ROOT) == blocks[0]
    assert pool.find(*hashes[2], parent) is None


def test_blocks_without_content_are_reused_before_findable_ones():
    pool = BlockPool(2, 2)
    known, plain = pool.allocate(2)
    hash_, content, _ = fill(pool, known, [1, 2])
    pool.release([known])
    pool.release([plain])
    assert pool.allocate(1) == [plain]
    assert pool.find(hash_, content, ROOT) == known


def test_nothing_is_findable_without_caching():
    pool = BlockPool(2, 2, caching=False)
    (block,) = pool.allocate(1)
    hash_, content, serial = fill(pool, block, [1, 2])
    assert serial == UNCACHED
    assert pool.find(hash_, content, ROOT) is None


def test_reset_cache_forgets_contents_and_keeps_holders():
    pool = BlockPool(2, 2)
    (block,) = pool.allocate(1)
    hash_, content, _ = fill(pool, block, [1, 2])
    pool.reset_cache()
    assert pool.find(hash_, content, ROOT) is None
    assert pool.references(block) == 1
    pool.check()


def test_releasing_a_block_nobody_holds_is_our_bug():
    with pytest.raises(AssertionError, match="released more often"):
        BlockPool(2, 2).release([0])


class PoolMachine(RuleBasedStateMachine):
    """Holders with token sequences; a model of what each block must contain."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks, 2)
        self.holders = []
        self.truth = {}

    @rule(tokens=st.lists(st.integers(0, 1), max_size=8))
    def admit(self, tokens):
        pages = [tuple(tokens[i : i + 2]) for i in range(0, len(tokens) - 1, 2)]
        blocks, parent, previous = [], ROOT, 0
        for page in pages:
            content = np.asarray(page, dtype=np.int32).tobytes()
            found = self.pool.find(hash_block(previous, content), content, parent)
            if found is None:
                break
            assert self.truth[found] == pages[: len(blocks) + 1], "a hit holds another prefix"
            self.pool.hold([found])
            blocks.append(found)
            parent, previous = self.pool.serial(found), hash_block(previous, content)
        missing = len(pages) - len(blocks)
        if missing > self.pool.num_free:
            self.pool.release(blocks)
            return
        for block in self.pool.allocate(missing):
            blocks.append(block)
            self.truth[block] = pages[: len(blocks)]
            content = np.asarray(pages[len(blocks) - 1], dtype=np.int32).tobytes()
            previous = hash_block(previous, content)
            parent = self.pool.cache(block, previous, content, parent)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data):
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def reset(self):
        self.pool.reset_cache()

    @invariant()
    def nothing_is_lost_or_owned_twice(self):
        self.pool.check()
        held = [block for blocks in self.holders for block in blocks]
        assert all(self.pool.references(block) == held.count(block) for block in range(self.pool.num_blocks))
        assert self.pool.num_free == self.pool.num_blocks - len(set(held))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)
