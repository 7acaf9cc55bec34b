"""The way of filling masks that is quickest where an engine runs."""

import pytest

from hookline.plugins.grammars.quickest import FIRST_TRIES, MEMORY, RETRY_EVERY, Quickest


def ways_taken(quickest, costs, num_times):
    taken = []
    for _ in range(num_times):
        taken.append(quickest.choose())
        quickest.took(taken[-1], costs[taken[-1]])
    return taken


@pytest.mark.parametrize("best", [0, 1, 2])
def test_after_a_few_tries_of_each_the_quickest_is_taken(best):
    quickest, costs = Quickest(3), [3.0, 3.0, 3.0]
    costs[best] = 1.0
    assert sorted(ways_taken(quickest, costs, 3 * FIRST_TRIES)) == sorted([0, 1, 2] * FIRST_TRIES)
    taken = ways_taken(quickest, costs, 10 * RETRY_EVERY)
    assert taken.count(best) >= len(taken) - 10


def test_the_first_try_of_a_way_does_not_count():
    quickest = Quickest(2)
    for way in (0, 1):
        quickest.took(way, 1000.0 if way else 1.0)
    ways_taken(quickest, [2.0, 1.0], 2 * FIRST_TRIES)
    assert set(ways_taken(quickest, [2.0, 1.0], RETRY_EVERY // 2)) == {1}


def test_a_way_that_becomes_slower_is_left_for_another():
    quickest = Quickest(2)
    ways_taken(quickest, [1.0, 2.0], 3 * RETRY_EVERY)
    later = ways_taken(quickest, [9.0, 2.0], 3 * RETRY_EVERY)
    assert later[:2] == [0, 0] and later[MEMORY:].count(1) > 2 * RETRY_EVERY


def test_one_way_is_no_choice():
    assert set(ways_taken(Quickest(1), [1.0], 200)) == {0}
