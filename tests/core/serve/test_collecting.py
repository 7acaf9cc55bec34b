"""When a front end searches for garbage."""

from __future__ import annotations

import gc

import pytest

from hookline.core.serve.collecting import GROWTH_BYTES, QUIET, QuietCollector


def test_a_busy_server_searches_only_when_its_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: searches.append(size))
    collector = QuietCollector(lambda: num_open, lambda: size)
    found = []
    for num_open, size in [
        (QUIET, 0),  # quiet
        (1000, GROWTH_BYTES - 1),
        (1000, GROWTH_BYTES),
        (1000, GROWTH_BYTES + 1),
        (1000, 2 * GROWTH_BYTES),
        (0, 2 * GROWTH_BYTES),
    ]:
        collector.look()
        found.append(len(searches))
    assert found == [1, 1, 2, 2, 3, 4]
