"""What info says of a step extension: the fields of requests, and those of the engine's own settings."""

from __future__ import annotations

import pytest

from hookline.core.info.command import inventory, only
from hookline.core.info.layout import show_one
from hookline.core.plugin.host import PluginHost


def test_fields_of_requests_and_settings_of_the_engine_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.probing_extension")
    text = show_one(only(inventory(PluginHost.load()), "probe"))
    assert "sampling.extra_args.probe.strength: float = 0.0" in text
    assert "for all requests of an engine: extensions.probe.FIELD=VALUE" in text
    assert "extensions.probe.read: list[int] = [0, 2]" in text and "extra_args.probe.read" not in text
