"""What heads that draft tokens share: the places of their entries, and draws that leave tokens out."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from hookline.plugins.drafters.head_cache import HeadCache
from hookline.plugins.drafters.heads import MOST_LIKELY, truncated


@pytest.mark.parametrize("seed", range(5))
def test_no_block_of_a_head_is_owned_twice_or_lost_whatever_requests_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    cache, block_size = HeadCache(4, 40, 9, 8, torch.device("cpu")), 8
    num_refused = num_dropped = 0
    for _ in range(300):
        needed = set(rng.sample(range(9), 3))
        for id_ in sorted(needed):
            before = {one for one in range(9) if cache.get(one)}
            known = cache.get(id_)
            count = min(rng.randint(1, 20), 40 - (known.length if known else 0))
            sequence = cache.with_room(id_, count, needed)
            dropped = before - {one for one in range(9) if cache.get(one)}
            assert not dropped & needed
            num_dropped += len(dropped)
            if sequence is None:
                num_refused += 1
                cache.forget(id_)
            elif rng.random() < 0.8:  # else the entries were drafts
                sequence.length += count
        if rng.random() < 0.3:
            cache.forget(rng.randrange(9))
        cache.send()
        live = [sequence for one in range(9) if (sequence := cache.get(one))]
        owned = [block for sequence in live for block in sequence.blocks]
        assert len(owned) == len(set(owned)) and set(owned) <= set(range(9))
        assert len({sequence.row for sequence in live}) == len(live) <= 4
        for sequence in live:
            assert len(sequence.blocks) * block_size >= sequence.length
            assert cache.table_RM[sequence.row, : len(sequence.blocks)].tolist() == sequence.blocks
        assert cache.table_RM[cache.padding_row].eq(9).all()
    assert num_refused and num_dropped
    cache.clear()
    with_all = [cache.with_room(id_, 24, ()) for id_ in range(3)]
    assert sorted(block for one in with_all if one for block in one.blocks) == list(range(9))


def test_entries_lie_in_the_slots_that_the_table_says() -> None:
    cache = HeadCache(2, 32, 4, 8, torch.device("cpu"))
    first, second = cache.with_room(5, 9, ()), cache.with_room(6, 3, ())
    assert first is not None and second is not None
    cache.send()
    rows = torch.tensor([first.row, first.row, second.row, cache.padding_row])
    slots = cache.slots(cache.table_RM.index_select(0, rows), torch.tensor([7, 8, 2, 0]))
    assert slots.tolist() == [8 * first.blocks[0] + 7, 8 * first.blocks[1], 8 * second.blocks[0] + 2, 4 * 8]


def _left(logits_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that a request's own draw chooses among, by their definition."""
    chances = (logits_V / temperature).softmax(0)
    order = chances.argsort(descending=True)[: top_k or len(chances)]
    chances = chances[order] / chances[order].sum()
    left, total = set(), 0.0
    for token, chance in zip(order.tolist(), chances.tolist(), strict=True):
        if total < top_p and chance >= min_p * float(chances[0]):
            left.add(token)
        total += chance
    return left


def test_a_draw_of_a_head_leaves_out_what_the_request_leaves_out() -> None:
    asked = [(1.0, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.1), (0.7, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.5, 0, 1.0, 0.2),
             (1.3, 20, 0.6, 0.05), (0.5, 1, 1.0, 0.0)]  # fmt: skip
    torch.manual_seed(0)
    logits = torch.randn(len(asked), 150)
    columns = [torch.tensor(column) for column in zip(*asked, strict=True)]
    found = truncated(logits, *columns)
    for row, params in enumerate(asked):
        is_plain = params[0] == 0 or params[1:] == (0, 1.0, 0.0)
        wanted = set(range(150)) if is_plain else _left(logits[row], *params)
        assert {token for token in range(150) if found[row, token] > -torch.inf} == wanted
        assert found[row, list(wanted)].equal(logits[row, list(wanted)])


def test_a_truncated_draw_looks_at_the_likeliest_tokens_alone() -> None:
    logits = torch.randn(1, 4 * MOST_LIKELY) * 0.01
    found = truncated(logits, *(torch.tensor([value]) for value in (1.0, 0, 0.9, 0.0)))
    assert set(found.isfinite().nonzero()[:, 1].tolist()) == set(logits.topk(MOST_LIKELY).indices[0].tolist())
