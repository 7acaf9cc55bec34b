"""The way of filling masks that is quickest where an engine runs."""

import random
from itertools import pairwise

import pytest

from hookline.plugins.grammars.quickest import FIRST_TRIES, RETRY_EVERY, RETURN_EVERY, Quickest

ROWS, THREADS = 32, [1, 4, 12]


class Machine:
    """Threads that take `waking_us` to wake. done_us: how long each step took."""

    def __init__(self, waking_us, row_us=10.0):
        self.quickest, self.waking_us, self.row_us, self.done_us = Quickest(THREADS), waking_us, row_us, []

    def fill(self, num_times):
        """Fill the masks of so many steps; returns the ways they were begun in."""
        return [self._fill() for _ in range(num_times)]

    def _fill(self):
        way = begun = self.quickest.choose(ROWS)
        num_done, spent_us = 0, 0.0
        while way == 0 and num_done < ROWS:
            num_done += 1
            spent_us = num_done * self.row_us
            if num_done < ROWS and spent_us > 1e6 * self.quickest.patience_s:
                way = self.quickest.rest(spent_us / 1e6, num_done, ROWS - num_done)
        if num_done:
            self.quickest.took(0, spent_us / 1e6, num_done)
        if num_done < ROWS:
            took_us = self.waking_us[way] + (ROWS - num_done) * self.row_us / THREADS[way]
            self.quickest.took(way, took_us / 1e6, ROWS - num_done)
            spent_us += took_us
        self.done_us.append(spent_us)
        return begun


@pytest.mark.parametrize(
    ("waking_us", "row_us", "best"),
    [((0, 400, 900), 10.0, 0), ((0, 60, 900), 10.0, 1), ((0, 400, 1200), 100.0, 1), ((0, 400, 410), 100.0, 2)],
)
def test_after_a_few_tries_of_each_the_quickest_is_taken(waking_us, row_us, best):
    machine = Machine(waking_us, row_us)
    assert sorted(machine.fill(3 * FIRST_TRIES)) == sorted([0, 1, 2] * FIRST_TRIES)
    begun = machine.fill(10 * RETRY_EVERY)
    assert begun.count(best) >= 0.9 * len(begun)


def test_the_first_try_of_a_way_does_not_count():
    machine = Machine((0, 10**6, 10**6))
    machine.fill(3)
    machine.waking_us = (0, 20, 30)
    machine.fill(3 * (FIRST_TRIES - 1))
    assert set(machine.fill(3)) == {2}


def test_after_a_few_steps_with_long_masks_one_thread_fills_the_short_ones_again():
    machine = Machine((0, 800, 1500))
    machine.fill(5 * RETRY_EVERY)
    for _ in range(4):
        machine.row_us = 200.0
        machine.fill(20)
        machine.row_us = 10.0
        machine.fill(30)
        assert machine.fill(30).count(0) >= 29


def test_one_thread_has_the_rest_done_when_masks_turn_out_long():
    machine = Machine((0, 100, 200), row_us=3.0)
    machine.fill(2 * RETRY_EVERY)
    machine.row_us = 300.0
    assert machine.fill(1) == [0] and machine.done_us[-1] < 32 * 300.0 / 4


def test_one_thread_does_all_where_others_take_longer_to_wake_than_what_is_left():
    machine = Machine((0, 10**5, 10**5))
    machine.fill(2 * RETRY_EVERY)
    machine.row_us = 300.0
    machine.fill(1)
    assert machine.done_us[-1] == 32 * 300.0


def test_where_several_threads_stay_the_quickest_one_thread_is_tried_now_and_then():
    machine = Machine((0, 40, 60), row_us=100.0)
    begun = machine.fill(8 * RETRY_EVERY)[3 * FIRST_TRIES :]
    alone = [step for step, way in enumerate(begun) if way == 0]
    assert max(later - one for one, later in pairwise(alone)) <= RETURN_EVERY + 1
    assert sum(machine.done_us) < 1.25 * len(machine.done_us) * (60 + 32 * 100 / 12)


def test_threads_of_which_some_wake_late_are_not_taken_for_quick_ones():
    """Most wake within what one thread would need, the others take three times as long."""
    machine, rng = Machine((0, 900, 200)), random.Random(0)
    for _ in range(8 * RETRY_EVERY):
        machine.waking_us = 0, 900, 200 if rng.random() < 0.6 else 900
        machine.fill(1)
    assert sum(machine.done_us[100:]) < 1.15 * 320 * len(machine.done_us[100:])


def test_threads_that_lose_give_way_at_once():
    machine = Machine((0, 30, 40), row_us=100.0)
    machine.fill(4 * RETRY_EVERY)
    machine.row_us, machine.waking_us = 10.0, (0, 4000, 4000)
    assert machine.fill(40).count(0) >= 30


def test_one_way_is_no_choice():
    quickest = Quickest([1])
    assert {quickest.choose(ROWS) for _ in range(200)} == {0} and quickest.patience_s == float("inf")
