"""Starts ranks that are all in other processes, children or where a plugin places them, and the executor over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hookline.core.assembly.rank_main import MAIN, PLACED, task_of
from hookline.core.assembly.resolve import Place, ResolvedConfig, refuse
from hookline.core.config.settings import Config, chosen_executor
from hookline.core.contracts import WantedRanks
from hookline.core.executor.links import LocalLinks, RankLinks
from hookline.core.executor.monitor import Timeouts
from hookline.core.executor.placed import PlacedLinks, Placement
from hookline.core.executor.remote import RemoteExecutor
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import unavailable
from hookline.core.util.start_phases import StartPhases


@contextmanager
def placed(config: Config, host: PluginHost) -> Iterator[Placement | None]:
    """Places for all ranks, if the configuration names an executor plugin; given back if the context ends by an error.

    Raises: ConfigError, PluginError or RankError if there are none.
    """
    engine, option = config.engine, chosen_executor(config.engine, host)
    if option is None or option.entry is None:
        yield None
        return
    refuse(option.entry, unavailable(option.entry.needs))
    num_threads = max(1, (engine.cpu_threads or 0) // config.num_ranks)
    wanted = WantedRanks(config.num_ranks, config.tp, config.device, num_threads, engine.start_timeout_s)
    executor = option.entry.load()(option.config, wanted)
    try:
        yield Placement(executor, option.entry, wanted)
    except BaseException:
        executor.release()
        raise


def place_of(placement: Placement | None) -> Place | None:
    """The place of rank 0 by its executor plugin; None if rank 0 is on this host, which this process knows itself."""
    if placement is None:
        return None
    place = placement.places[0]
    return Place(torch.device(place.device), place.compute_capability)


def start_all_ranks(
    resolved: ResolvedConfig,
    timeouts: Timeouts,
    phases: StartPhases | None = None,
    placement: Placement | None = None,
) -> RemoteExecutor:
    """Start every rank, where it was placed or as a child process, and wait until all are ready.

    Raises: RankError naming the rank that failed.
    """
    links: RankLinks
    if placement is not None:
        links = PlacedLinks(placement, PLACED, task_of(resolved), timeouts)
    else:
        links = LocalLinks(resolved.ranks.num_all, MAIN, task_of(resolved), timeouts, first=0)
    return executor_over(links, phases or StartPhases())


def executor_over(links: RankLinks, phases: StartPhases) -> RemoteExecutor:
    """Have started ranks meet, wait until they are ready, and put the executor over them."""
    try:
        with phases.part("processes of ranks"):
            links.meet({})
        with phases.part("further ranks"):
            told = links.monitor.wait_until_all("ready")[0]
    except BaseException:
        links.monitor.fail("the engine's process broke off the start")
        links.close()
        raise
    phases.add("further ranks", told["seconds"], told["notes"])
    return RemoteExecutor(links, told["num_blocks"], told["late_width"])
