"""How many drafts a step has, by what steps took and by how many drafts were right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import exp

import pytest

from hookline.core.speculation.depth import PROBE_PERIOD, PROBE_STEPS, DraftDepth

SECONDS: dict[str, Callable[[int, int], float]] = {
    "drafts cost little": lambda rows, depth: 5 + 0.3 * depth,
    "drafts cost as much as steps": lambda rows, depth: 5 * (1 + depth),
    "the host waits": lambda rows, depth: 5 + 3 * (depth > 0) + 0.2 * depth,
    "a step beyond 64 tokens is slow": lambda rows, depth: 5 if rows * (1 + depth) <= 64 else 9,
}


def tokens(chance: float, depth: int) -> float:
    """Tokens of a request in a step, if each draft behind a right one is right by this chance."""
    return sum(chance**place for place in range(depth + 1))


def run(depths: DraftDepth, rows: int, chance: float, seconds: Callable[[int, int], float], steps: range) -> list[int]:
    """The depths of these steps; every 50th takes ten times as long as it should."""
    found = list[int]()
    for step in steps:
        depth = depths.choose(rows, 4, step)
        found.append(depth)
        kept = [place for place in range(depth + 1) for _ in range(round(100 * chance**place * (1 - chance)))]
        kept += [depth] * (100 - len(kept)) if depth else []
        depths.count(100, depth, [min(one, depth) for one in kept] if depth else [])
        depths.note(rows, depth, step, seconds(rows, depth) * (10 if step % 50 == 49 else 1))
    return found


@pytest.mark.parametrize("chance", [0.05, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 16, 60])
@pytest.mark.parametrize("case", SECONDS)
def test_the_depth_is_that_which_gives_the_most_tokens_a_second(case: str, rows: int, chance: float) -> None:
    seconds, depths = SECONDS[case], DraftDepth(4)
    found = run(depths, rows, chance, seconds, range(2 * PROBE_PERIOD))[PROBE_PERIOD + PROBE_STEPS :]
    rates = [tokens(chance, depth) / seconds(rows, depth) for depth in range(5)]
    assert sum(rates[depth] for depth in found) / len(found) > 0.98 * max(rates)


def test_a_slow_beginning_chooses_no_depth_for_later() -> None:
    depths, numbers = DraftDepth(4), count()

    def _seconds(rows: int, depth: int) -> float:
        return (0.67 + 0.06 * depth) * (1 + 4 * exp(-next(numbers) / 8))

    assert set(run(depths, 1, 0.9, _seconds, range(1, 120))[60:]) == {4}


def test_drafts_that_become_right_are_found_by_probes() -> None:
    depths = DraftDepth(4)
    bad = run(depths, 8, 0.02, SECONDS["the host waits"], range(PROBE_PERIOD))
    assert set(bad[40:]) == {0}
    good = run(depths, 8, 0.95, SECONDS["the host waits"], range(PROBE_PERIOD, 40 * PROBE_PERIOD))
    assert set(good[-50:]) == {4}


def test_each_number_of_requests_is_weighed_for_itself() -> None:
    depths, seconds = DraftDepth(4), SECONDS["a step beyond 64 tokens is slow"]
    assert run(depths, 12, 0.7, seconds, range(60))[-1] == 4
    assert run(depths, 60, 0.7, seconds, range(60, 120))[-1] in (0, 4)
    assert run(depths, 12, 0.7, seconds, range(120, 150))[0] == 4


def test_no_room_is_no_draft() -> None:
    assert DraftDepth(4).choose(200, 0, 0) == 0


def test_a_clock_that_stands_still_does_not_end_a_step() -> None:
    assert min(run(DraftDepth(4), 8, 0.9, lambda rows, depth: 0.0, range(60))) > 0
