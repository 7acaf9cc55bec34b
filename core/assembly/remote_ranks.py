"""Starts ranks that are all in other processes, children or actors of Ray, and makes the executor over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hookline.core.assembly.rank_main import BUILD, MAIN, task_of
from hookline.core.assembly.resolve import Place, ResolvedConfig
from hookline.core.config.settings import Config
from hookline.core.executor.links import LocalLinks, RankLinks
from hookline.core.executor.monitor import Timeouts
from hookline.core.executor.ray_ranks import RayLinks
from hookline.core.executor.ray_reservation import RayReservation, Wanted
from hookline.core.executor.remote import RemoteExecutor
from hookline.core.util.start_phases import StartPhases


@contextmanager
def reserved(config: Config) -> Iterator[RayReservation | None]:
    """Actors of Ray for all ranks, if the configuration asks for it: given back if what follows fails.

    Raises: ConfigError or RankError if the cluster does not have them.
    """
    engine = config.engine
    if engine.executor != "ray":
        yield None
        return
    cpus = max(1, (engine.cpu_threads or 0) // config.num_ranks)
    reservation = RayReservation(Wanted(config.num_ranks, config.tp, config.device, cpus, engine.start_timeout_s))
    try:
        yield reservation
    except BaseException:
        reservation.release()
        raise


def place_of(reservation: RayReservation | None) -> Place | None:
    """Where rank 0 computes, as its reservation says; None where this process finds that out by itself."""
    if reservation is None:
        return None
    capability = reservation.places[0]["compute_capability"]
    return Place(torch.device(reservation.places[0]["device"]), capability and tuple(capability))


def start_all_ranks(
    resolved: ResolvedConfig,
    timeouts: Timeouts,
    phases: StartPhases | None = None,
    reservation: RayReservation | None = None,
) -> RemoteExecutor:
    """Start every rank, as one of the actors or as a child process, and wait until all are ready.

    Raises: RankError naming the rank that failed.
    """
    links: RankLinks
    if reservation is not None:
        links = RayLinks(reservation, BUILD, task_of(resolved), timeouts)
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
    return RemoteExecutor(links, told["num_blocks"], told["num_mask_words"])
