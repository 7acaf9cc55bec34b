"""When a front end searches for garbage."""

from __future__ import annotations

import gc

import pytest

from hookline.core.serve.http.collecting import GROWTH_BYTES, QUIET, QuietCollector


def test_a_busy_server_searches_only_when_its_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: searches.append(now["size"]))
    now = {"open": QUIET, "size": 0}
    collector = QuietCollector(lambda: now["open"], lambda: now["size"])
    for now["open"], now["size"] in [
        (QUIET, 0),
        (1000, GROWTH_BYTES - 1),
        (1000, GROWTH_BYTES),
        (1000, GROWTH_BYTES + 1),
        (1000, 2 * GROWTH_BYTES),
        (0, 2 * GROWTH_BYTES + 1),
    ]:
        collector.look()
    assert searches == [0, GROWTH_BYTES, 2 * GROWTH_BYTES, 2 * GROWTH_BYTES + 1]
