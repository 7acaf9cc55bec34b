"""The process of one rank: the task that the engine's process sends it, and how it builds its worker from that."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from hookline.core.assembly.config_tree import config_tree
from hookline.core.assembly.resolve import ResolvedConfig
from hookline.core.contracts import RankStart
from hookline.core.distributed.heartbeat import Heartbeat
from hookline.core.executor.connections import ANSWERS, MESSAGES, connect_back
from hookline.core.executor.rank_loop import Meet, run_rank, serve_rank
from hookline.core.worker.worker import Worker

MAIN = f"{__name__}:main"
"""The main function of a rank's process."""
PLACED = f"{__name__}:run_placed"
"""The function by which a process that a plugin has placed and started becomes a rank."""


def task_of(resolved: ResolvedConfig) -> dict[str, Any]:
    """The task from which a rank builds its worker, as plain data."""
    return {"config": config_tree(resolved.config, resolved.kernels.name), "plugins": resolved.plugins}


def main() -> NoReturn:
    """Run one rank over inherited sockets, whose file descriptors are the arguments; never returns."""
    run_rank([int(one) for one in sys.argv[1:]], build)


def run_placed(start: RankStart) -> None:
    """Be one rank in the process that calls this, until the engine's process ends it. See RankStart."""
    engine = connect_back(start, MESSAGES)
    serve_rank(engine, connect_back(start, ANSWERS) if start.rank == 0 else None, build)


def build(task: Mapping[str, Any], heartbeat: Heartbeat, meet: Meet) -> tuple[Worker, Mapping[str, Any]]:
    """See `core.executor.rank_loop.Build`."""
    from hookline.core.assembly.resolve import place_here, resolve
    from hookline.core.assembly.worker import build_worker
    from hookline.core.config.settings import chosen_entries, validate
    from hookline.core.distributed.process_group import behind_secret, connect, join, listen
    from hookline.core.plugin.blame import Blaming
    from hookline.core.plugin.host import PluginHost
    from hookline.core.requests.pooling import pooler_entries
    from hookline.core.requests.step_extensions import InstalledExtensions
    from hookline.core.util.start_phases import StartPhases

    host, phases = PluginHost.load(), StartPhases(is_told=task["rank"] == 0)
    host.check_same(task["plugins"], f"rank {task['rank']}")
    config = validate(task["config"], host)
    with Blaming(chosen_entries(config, host), "while starting"):
        place = place_here(task["device"]) if "device" in task else None
        resolved = resolve(config, host, task["rank"], place)
        opens_store = task["rank"] == 0 and task["size"] > 1
        store = listen(task["host"]) if opens_store else None
        met = meet({"host": task["host"], "port": store.port} if store is not None else {})
        if task["size"] > 1:
            store = behind_secret(store or join(met["host"], met["port"]), task["secret"])
            ranks = connect(store, resolved.ranks, resolved.device, heartbeat, task["host"])
            resolved = replace(resolved, ranks=replace(ranks, shares_host=task.get("shares_host", True)))
        installed = InstalledExtensions.of(host.registry, resolved.facts, config.extension_options)
        worker = build_worker(resolved, installed, phases, poolers=pooler_entries(host.registry))
    if task["size"] == 1:
        heartbeat.follow(_Layers(worker))
    told = {"num_blocks": worker.num_blocks, "late_width": worker.runner.late_width}
    return worker, told | {"seconds": phases.seconds, "notes": phases.notes}


@dataclass
class _Layers:
    """Progress of a single rank, which has no collectives, as heartbeat.Marks: the layers that it launched."""

    worker: Worker

    def mark(self) -> None:
        """See Marks; not needed, since the worker counts its layers."""
        return

    def num_reached(self) -> int:
        """See Marks."""
        return self.worker.progress
