"""The process of one further rank: what rank 0 tells it, and how it builds its plugin host and worker from that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from hookline.core.assembly.config_tree import config_tree
from hookline.core.assembly.resolve import ResolvedConfig
from hookline.core.distributed.heartbeat import Heartbeat
from hookline.core.executor.rank_loop import run_rank
from hookline.core.worker.worker import Worker

MAIN = f"{__name__}:main"
"""What a further rank's process runs."""


def task_of(resolved: ResolvedConfig) -> dict[str, Any]:
    """What a further rank builds its worker from, as plain data."""
    return {"config": config_tree(resolved.config, resolved.kernels.name), "plugins": resolved.plugins}


def main() -> NoReturn:
    """Run one rank over the inherited socket whose number is the only argument; never returns."""
    run_rank(int(sys.argv[1]), _build)


def _build(task: Mapping[str, Any], heartbeat: Heartbeat, meet: Callable[[], None]) -> Worker:
    from hookline.core.assembly.resolve import resolve
    from hookline.core.assembly.worker import build_worker
    from hookline.core.config.settings import chosen_entries, validate
    from hookline.core.distributed.process_group import behind_secret, connect, join
    from hookline.core.plugin.blame import Blaming
    from hookline.core.plugin.host import PluginHost
    from hookline.core.requests.logits_processing import Processing

    host = PluginHost.load()
    host.check_same(task["plugins"], f"rank {task['rank']}")
    config = validate(task["config"], host)
    with Blaming(chosen_entries(config, host), "while starting"):
        resolved = resolve(config, host, task["rank"])
        meet()
        ranks = connect(behind_secret(join(task["port"]), task["secret"]), resolved.ranks, resolved.device, heartbeat)
        return build_worker(replace(resolved, ranks=ranks), Processing.of(host.registry, resolved.facts))
