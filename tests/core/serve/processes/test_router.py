"""Which replica a request goes to: by what was computed before, within bounds, and never to a dead one."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hookline.core.serve.processes.router import FACTOR, MAX_KEYS, MAX_REMEMBERED, SLACK, SPAN, Router, prefix_keys

CAPACITY = 1000


def keys_of(*numbers: int, salt: str | None = None, session: str | None = None) -> list[int]:
    """Keys of a prompt whose spans are these numbers, again and again."""
    return prefix_keys([number for number in numbers for _ in range(SPAN)], salt, session)


@pytest.mark.parametrize("prompt", ["a" * SPAN * 3 + "b", [7] * SPAN * 3 + [8]])
def test_a_prompt_has_a_key_for_each_beginning_and_longer_prompts_share_them(prompt: str | list[int]) -> None:
    keys = prefix_keys(prompt, None, None)
    assert len(set(keys)) == 3
    assert prefix_keys(prompt * 2, None, None)[:3] == keys
    assert prefix_keys(prompt[::-1], None, None)[0] != keys[0]  # the last one is another


def test_another_salt_or_a_session_makes_other_keys_and_keys_are_bounded() -> None:
    assert not set(keys_of(1, 2)) & set(keys_of(1, 2, salt="a"))
    assert keys_of(1, session="me") == keys_of(2, 3, session="me") != keys_of(1, session="you")
    assert len(prefix_keys([1] * 10**6, None, None)) == MAX_KEYS


@pytest.mark.parametrize(
    "prompt", [[1] * (SPAN - 1), [], "", [{"role": "user", "content": "x"}] * SPAN, [2**70] * SPAN]
)
def test_what_is_too_short_or_no_text_has_no_keys(prompt: object) -> None:
    assert prefix_keys(prompt, None, None) == []


def test_requests_without_keys_go_to_the_least_busy_replica_and_equals_take_turns() -> None:
    router = Router(3, CAPACITY)
    assert router.choose([], [3, 1, 2]) == 1
    for number in (2, 3, 4):
        router = Router(number, CAPACITY)
        assert {router.choose([], [0] * number) for _ in range(number)} == set(range(number))


def test_a_prompt_goes_where_its_longest_beginning_was_computed() -> None:
    router = Router(2, CAPACITY)
    first = router.choose(keys_of(1, 2), [0, 0])
    other = 1 - first
    loads = [0, 0]
    loads[first] = SLACK + 1  # another conversation with the same beginning is moved away
    assert router.choose(keys_of(1, 3), loads) == other
    assert router.choose(keys_of(1, 2, 5), [0, 0]) == first
    assert router.choose(keys_of(1, 3, 5), [0, 0]) == other


def test_two_front_ends_choose_the_same_replica_for_a_new_beginning_and_spread_several() -> None:
    one, other = Router(4, CAPACITY), Router(4, CAPACITY)
    other.choose([], [0] * 4)  # what they have had to do before is not the same
    chosen = [one.choose(keys_of(number), [0] * 4) for number in range(200)]
    assert chosen == [other.choose(keys_of(number), [0] * 4) for number in range(200)]
    assert min(Counter(chosen).values()) > 25 and len(set(chosen)) == 4


def test_a_dead_replica_gets_nothing_and_only_what_it_had_moves() -> None:
    router = Router(3, CAPACITY)
    before = [router.choose(keys_of(number), [0] * 3) for number in range(60)]
    after = [router.choose(keys_of(number), [0, None, 0]) for number in range(60)]
    assert 1 not in after and [one for one in before if one == 1]
    assert [one for one, old in zip(after, before, strict=True) if old != 1] == [one for one in before if one != 1]
    assert Router(2, CAPACITY).choose(keys_of(1), [None, None]) is None


def test_a_full_replica_is_passed_over_and_if_all_are_full_the_least_busy_refuses() -> None:
    router = Router(2, capacity=4)
    first = router.choose(keys_of(1), [0, 0])
    loads = [0, 0]
    loads[first] = 4
    assert router.choose(keys_of(1), loads) == 1 - first
    assert router.choose(keys_of(1), [5, 4]) == 1
    assert router.choose(keys_of(2), [5, 4]) == 1, "a new beginning, too"


@pytest.mark.parametrize(
    ("capacity", "load", "stays"),
    [(4, 3, True), (4, 4, False), (CAPACITY, SLACK, True), (CAPACITY, SLACK + 1, False)],
)
def test_a_beginning_stays_where_it_was_up_to_the_capacity_and_the_bound(capacity: int, load: int, stays: bool) -> None:
    router, loads = Router(2, capacity), [0, 0]
    first = router.choose(keys_of(1), loads)
    assert first is not None
    loads[first] = load
    assert (router.choose(keys_of(1), loads) == first) == stays


def test_the_beginning_that_was_asked_for_longest_ago_is_forgotten_first() -> None:
    router = Router(2, CAPACITY)
    for key in range(MAX_REMEMBERED):
        router.choose([key], [0, 0])
    router.choose([0], [0, 0])
    router.choose([MAX_REMEMBERED], [0, 0])
    assert {0, 2, MAX_REMEMBERED} <= set(router._remembered) and 1 not in router._remembered


def test_a_session_has_a_key_for_each_salt_and_half_a_character_is_one_of_a_text() -> None:
    keys = [keys_of(1, session="me", salt=salt)[0] for salt in (None, "a", "b")]
    assert len(set(keys)) == 3
    assert len(prefix_keys("\ud83d" * SPAN, None, None)) == 1


def test_what_is_remembered_is_bounded() -> None:
    router = Router(2, CAPACITY)
    for number in range(MAX_REMEMBERED // 2 + 10):
        router.choose([number, -number - 1], [0, 0]) if number == 0 else router.choose(
            [2 * number, 2 * number + 1], [0, 0]
        )
    assert len(router._remembered) == MAX_REMEMBERED


def serve(speeds: list[int], num_requests: int, rng: random.Random) -> tuple[Counter[int], int, float]:
    """Simulate: each replica ends so many requests a tick. Returns requests by replica, the largest excess of one over
    the bound when it was chosen, and the part of the requests that found their beginning where they went."""
    router, open_ = Router(len(speeds), CAPACITY), [0.0] * len(speeds)
    cached: list[set[int]] = [set() for _ in speeds]
    counts, excess, hits = Counter[int](), 0, 0
    for number in range(num_requests):
        beginning = min(int(rng.paretovariate(0.8)), 30)  # the first one is most of all
        loads: list[int | None] = [int(load) for load in open_]
        chosen = router.choose(keys_of(beginning, 1000 + number), loads)
        assert chosen is not None
        bound = min(load for load in loads if load is not None) * FACTOR + SLACK
        excess = max(excess, int((loads[chosen] or 0) - bound))
        hits += beginning in cached[chosen]
        cached[chosen].add(beginning)
        counts[chosen] += 1
        open_ = [max(0.0, load + (one == chosen) - speeds[one] / 10) for one, load in enumerate(open_)]
    return counts, excess, hits / num_requests


def test_skewed_beginnings_mostly_find_their_cache_and_never_exceed_the_bound() -> None:
    counts, excess, hits = serve([3, 3, 3], 2000, random.Random(1))
    assert excess <= 0 and min(counts.values()) > 300
    assert hits > 0.95


def test_a_slow_replica_gets_less_than_its_share() -> None:
    counts, excess, _ = serve([5, 5, 1], 3000, random.Random(2))
    assert excess <= 0
    assert counts[2] < 0.6 * min(counts[0], counts[1])


def test_conversations_behind_one_system_prompt_stay_where_they_began() -> None:
    router, rng, open_ = Router(4, CAPACITY), random.Random(3), list[int]()
    turns, last, hits = [number for number in range(60) for _ in range(6)], dict[int, int](), list[bool]()
    rng.shuffle(turns)
    lengths = Counter[int]()
    for conversation in turns:
        lengths[conversation] += 2
        keys = keys_of(*[1] * 8, *[100 + conversation] * lengths[conversation])
        chosen = router.choose(keys, [open_.count(one) for one in range(4)])
        assert chosen is not None
        if conversation in last:
            hits.append(last[conversation] == chosen)
        last[conversation] = chosen
        open_.append(chosen)
        if len(open_) > 40:
            open_.pop(rng.randrange(len(open_)))
    assert sum(hits) > 0.9 * len(hits)
