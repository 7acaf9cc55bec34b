"""The options of Hydra's config groups: which of them a command makes."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.core.config import hydra_options
from hookline.core.config.compose import compose
from hookline.core.plugin.host import PluginHost
from hookline.core.run.settings import RunKeys


def test_only_options_that_a_run_composes_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    before = hydra_options.option_node

    def count(option: str, config: type | None) -> Any:
        made.append(option)
        return before(option, config)

    monkeypatch.setattr(hydra_options, "option_node", count)
    host = PluginHost.load()
    [job] = compose(["scheduler=chunked", "scheduler.watermark=0.5"], host, RunKeys)
    assert "chunked" in made and job.tree["scheduler"] == {"name": "chunked", "watermark": 0.5}
    assert "prefill_first" not in made and len(made) < len(list(host.registry)) / 2
