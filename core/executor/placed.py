"""Ranks that an executor plugin has started, over TCP connections that they open to the engine's process.

The executor is asked for the ranks' nodes, to end a process, and how it ended; steps, answers and heartbeats go over
the connections, in the same form as with child processes. The task with the configuration is passed on unread.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.core.contracts import RankExecutor, RankPlace, RankStart, StartedRank, WantedRanks
from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS
from hookline.core.errors import PluginError, RankError, one_short_line
from hookline.core.executor.answers import words_of
from hookline.core.executor.connections import ANSWERS, MESSAGES, OPEN_PORTS, Key, accept_all
from hookline.core.executor.links import RankLinks
from hookline.core.executor.monitor import Timeouts
from hookline.core.executor.peer import Peer
from hookline.core.plugin.blame import breach
from hookline.core.plugin.environment import difference, environment
from hookline.core.plugin.registry import Entry


@dataclass(frozen=True)
class Placement:
    """Room that an executor has found for all ranks of an engine. entry: the executor's, which errors name.

    Raises: PluginError if there is not one place for each rank; RankError that names the first rank whose environment
    is not that of this process, its node, and what differs.
    """

    executor: RankExecutor
    entry: Entry
    wanted: WantedRanks

    @property
    def places(self) -> Sequence[RankPlace]:
        """Where each rank will run."""
        return self.executor.places

    def __post_init__(self) -> None:
        places, size = getattr(self.executor, "places", None), self.wanted.num_ranks
        fault = None
        if not isinstance(places, list | tuple) or not all(isinstance(place, RankPlace) for place in places):
            fault = "its places are no list of RankPlace"
        elif len(places) != size:
            fault = f"it has {len(places)} places for {size} ranks"
        elif not isinstance(getattr(self.executor, "host", None), str):
            fault = "its host is no text"
        if fault is not None:
            raise PluginError(breach(self.entry, "__init__", fault))
        ours = environment()
        for rank, place in enumerate(self.places):
            if (told := difference(place.environment, ours)) is not None:
                raise RankError(f"rank {rank} of {size} ({place}) has another environment than the engine: {told}")

    def start(self, port: int, secret: str, target: str) -> Sequence[StartedRank]:
        """Have every rank started, which then connects to this port.

        Raises: PluginError if there is not one process for each rank.
        """
        ranks = range(self.wanted.num_ranks)
        starts = [RankStart(rank, self.executor.host, port, secret, target) for rank in ranks]
        started = self.executor.start(starts)
        if not isinstance(started, list | tuple) or len(started) != len(ranks):
            told = f"{len(started)} of them" if isinstance(started, list | tuple) else type(started).__name__
            fault = f"it must return a process for each of {len(ranks)} ranks and returned {told}"
            raise PluginError(breach(self.entry, "start", fault))
        return started


class PlacedPeer(Peer):
    """A rank that an executor has started. An executor's errors are caught here, so that other ranks are still told."""

    def __init__(self, rank: int, sockets: Sequence[socket.socket], started: StartedRank, place: RankPlace) -> None:
        super().__init__(rank, *sockets)
        self.started, self.place = started, place

    def how_it_ended(self) -> str:
        """See Peer."""
        return how_it_ended(self.started)

    def kill(self) -> None:
        """See Peer: its connections are closed, at which it ends by itself, and the executor is told to end it."""
        for connection in (self.connection, self.answers):
            with suppress(OSError):
                if connection is not None:
                    connection.shutdown(socket.SHUT_RDWR)
        with suppress(Exception):
            self.started.kill()

    def wait(self, timeout_s: float) -> bool:
        """See Peer."""
        try:
            return self.started.wait(timeout_s)
        except Exception:  # the executor cannot say any more, so the process counts as ended
            return True

    def __str__(self) -> str:
        return str(self.place)


def how_it_ended(started: StartedRank) -> str:
    """How a rank's process ended, as its executor says."""
    try:
        return started.how_it_ended()
    except Exception as error:
        return f"closed its connection, and how_it_ended of its executor raised {one_short_line(error)}"


class PlacedLinks(RankLinks):
    """Ranks in other places, with heartbeats as messages. Takes the placement over, and gives it back at the end.

    target: the function that a rank calls with its RankStart, as "module:function". task: sent to each rank.
    """

    def __init__(self, placement: Placement, target: str, task: Mapping[str, Any], timeouts: Timeouts) -> None:
        wanted, places = placement.wanted, placement.places
        size = wanted.num_ranks
        super().__init__(size, timeouts, np.zeros(HEARTBEAT_WORDS * size, dtype=np.int64))
        self.placement = placement
        self._tries_others = len({place.node for place in places}) > 1
        try:
            self.children += self._connected(target, timeouts.start_s)
            for rank, (peer, place) in enumerate(zip(self.children, places, strict=True)):
                first = rank - rank % wanted.group_size
                told = {"host": place.host, "device": place.device, "num_threads": wanted.num_cpu_threads}
                told["shares_host"] = shares_host(places[first : first + wanted.group_size])
                told["tries_others"] = self._tries_others
                peer.tell({**task, **told, **self.membership(rank)})
        except BaseException:
            self.close()
            raise
        self.monitor.start()

    def _connected(self, target: str, patience_s: float) -> list[PlacedPeer]:
        """Bind a port, start the ranks, and return them once all have connected."""
        places, secret = self.placement.places, secrets.token_hex(32)
        size = len(places)
        awaited = {(rank, MESSAGES) for rank in range(size)} | {(0, ANSWERS)}
        with socket.create_server((self.placement.executor.host, 0), backlog=2 * size) as server:
            started = self.placement.start(server.getsockname()[1], secret, target)

            def _check() -> None:
                for rank, one in enumerate(started):
                    if one.wait(0.0):
                        who = f"rank {rank} of {size} ({places[rank]})"
                        raise RankError(f"{who}, while starting, {how_it_ended(one)}")

            found = accept_all(server, secret, awaited, patience_s, _check)
        return [
            PlacedPeer(rank, [found[key] for key in _keys(rank)], started[rank], places[rank]) for rank in range(size)
        ]

    def meet(self, place: Mapping[str, Any]) -> None:
        """See RankLinks. Ranks on several nodes try each other's addresses first.

        Raises: RankError also if a rank does not reach another, with both nodes and the ports to open.
        """
        if not self._tries_others:
            super().meet(place)
            return
        here = self.monitor.wait_until_all("here")
        self.send(words_of({**here[0], "addresses": [here[rank]["address"] for rank in range(self.size)]}))
        tried = self.monitor.wait_until_all("tried")
        failed = [(rank, other, why) for rank in range(self.size) for other, why in tried[rank]]
        if failed:
            rank, other, why = failed[0]
            host, port = here[other]["address"]
            who = f"rank {rank} of {self.size} ({self.children[rank]}), while starting,"
            whom = f"rank {other} ({self.children[other]}) at {host}:{port} ({why})"
            raise RankError(f"{who} cannot reach {whom}, though both reach the engine; {OPEN_PORTS}")
        self.send(words_of({}))

    def close(self) -> None:
        """See RankLinks."""
        try:
            super().close()
        finally:
            self.placement.executor.release()


def _keys(rank: int) -> list[Key]:
    return [(rank, MESSAGES), *([(rank, ANSWERS)] if rank == 0 else [])]


def shares_host(places: Sequence[RankPlace]) -> bool:
    """Whether these ranks are on one node, on GPUs that follow each other."""
    first, *_ = indices = [int(place.device.partition(":")[2] or 0) for place in places]
    steps = [0 if place.device == "cpu" else number for number, place in enumerate(places)]
    return len({place.node for place in places}) == 1 and indices == [first + step for step in steps]
