"""Ranks as actors of Ray, over TCP connections that they open to us.

Ray is asked only how a process ended, and to end it; steps, answers and signs of life go over the connections, in the
same form as with child processes. The configuration passes through as a task that is not looked at.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS
from hookline.core.errors import RankError
from hookline.core.executor.answers import words_of
from hookline.core.executor.links import RankLinks
from hookline.core.executor.monitor import Timeouts
from hookline.core.executor.peer import Peer
from hookline.core.executor.ray_actor import ANSWERS, HELLO, MESSAGES, make_prompt
from hookline.core.executor.ray_reservation import START_KEY, RayReservation, cause_of, shares_host
from hookline.core.executor.reach import OPEN_PORTS
from hookline.core.util.ray_cluster import within

HELLO_S = 5.0
"""For a connection to say who it is, however it spells that."""
CAUSE_S = 1.5
"""For Ray to say why an actor is gone."""


class RayPeer(Peer):
    """A rank that is an actor. running: the call of it that is the rank."""

    def __init__(self, rank: int, sockets: Sequence[socket.socket], actor: Any, running: Any, place: Any, ray: Any):
        super().__init__(rank, *sockets)
        self._actor, self._running, self._place, self._ray = actor, running, place, ray

    def how_it_ended(self) -> str:
        """See Peer."""
        return how_it_ended(self._ray, self._running, self._place)

    def kill(self) -> None:
        """See Peer: its connections are closed, at which it ends by itself, and Ray is told to end it.

        In a thread of its own: a head node that is gone is waited for, and callers must be told meanwhile.
        """
        for connection in (self.connection, self.answers):
            with suppress(OSError):
                if connection is not None:
                    connection.shutdown(socket.SHUT_RDWR)
        with suppress(Exception):
            within(0.0, partial(self._ray.kill, self._actor, no_restart=True))

    def wait(self, timeout_s: float) -> bool:
        """See Peer."""
        try:
            return bool(self._ray.wait([self._running], timeout=timeout_s)[0])
        except Exception:  # of a cluster that is no more
            return True

    def __str__(self) -> str:
        return f"pid {self._place['pid']} on node {self._place['host']}"


def how_it_ended(ray: Any, running: Any, place: Mapping[str, Any]) -> str:
    """Cause of death of an actor. running: the call of it that is the rank. place: where it is."""
    with suppress(Exception):
        nodes = within(CAUSE_S, ray.nodes)
        if any(node["NodeID"] == place["node"] and not node["Alive"] for node in nodes):
            return "was lost with its node"
    try:
        ray.get(running, timeout=CAUSE_S)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
        return "closed its connection, perhaps as its node was lost"
    except Exception as error:
        return cause_of(error)
    return "ended"


class RayLinks(RankLinks):
    """Ranks that are actors, with heartbeats as messages. Takes the reservation over, and gives it back at the end.

    target: what an actor runs, as "module:function". task: what each is told.
    """

    def __init__(self, reservation: RayReservation, target: str, task: Mapping[str, Any], timeouts: Timeouts) -> None:
        wanted = reservation.wanted
        super().__init__(wanted.size, timeouts, np.zeros(HEARTBEAT_WORDS * wanted.size, dtype=np.int64))
        self.reservation = reservation
        self._tries_others = len({place["node"] for place in reservation.places}) > 1
        try:
            self.children += self._connected(target, timeouts.start_s)
            for rank, (peer, place) in enumerate(zip(self.children, reservation.places, strict=True)):
                first = rank - rank % wanted.group
                told = {"host": place["host"], "device": place["device"], "num_threads": wanted.cpus}
                told["shares_host"] = shares_host(reservation.places[first : first + wanted.group])
                told["tries_others"] = self._tries_others
                peer.tell({**task, **told, **self.membership(rank)})
        except BaseException:
            self.close()
            raise
        self.monitor.start()

    def _connected(self, target: str, patience_s: float) -> list[RayPeer]:
        """The ranks, once all have connected. Their address is that of Ray's node, on a port that is bound before."""
        ray, actors, places = self.reservation.ray, self.reservation.actors, self.reservation.places
        secret, size = secrets.token_hex(32), len(actors)
        awaited = {(rank, MESSAGES) for rank in range(size)} | {(0, ANSWERS)}
        with socket.create_server((ray.util.get_node_ip_address(), 0), backlog=2 * size) as server:
            host, port = server.getsockname()[:2]
            running = [actor.run.remote(rank, host, port, secret, target) for rank, actor in enumerate(actors)]

            def _check() -> None:
                ended = ray.wait(running, timeout=0)[0]
                if ended:
                    rank = running.index(ended[0])
                    who = f"rank {rank} of {size} (pid {places[rank]['pid']} on node {places[rank]['host']})"
                    raise RankError(f"{who}, while starting, {how_it_ended(ray, ended[0], places[rank])}")

            found = accept_all(server, secret, awaited, patience_s, _check)
        return [
            RayPeer(
                rank,
                [found[rank, MESSAGES], *([found[rank, ANSWERS]] if rank == 0 else [])],
                actors[rank],
                running[rank],
                places[rank],
                ray,
            )
            for rank in range(size)
        ]

    def meet(self, place: Mapping[str, Any]) -> None:
        """See RankLinks. Ranks on several nodes try each other's addresses first.

        Raises: RankError also if one does not reach another, with both nodes and what to open.
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
            self.reservation.release()


Key = tuple[int, int]
"""A rank, and which of its connections it is."""


def accept_all(
    server: socket.socket, secret: str, awaited: set[Key], patience_s: float, check: Callable[[], None]
) -> dict[Key, socket.socket]:
    """A connection for each key; who does not know the secret is turned away. check: raises if there is no hope.

    Raises: RankError naming the ranks that did not come in time.
    """
    found: dict[Key, socket.socket] = {}
    deadline = time.monotonic() + patience_s
    server.settimeout(0.2)
    try:
        while found.keys() != awaited:
            check()
            if time.monotonic() > deadline:
                missing = " and ".join(f"rank {rank}" for rank in sorted({key[0] for key in awaited - found.keys()}))
                raise RankError(f"{missing} did not connect within {patience_s:g} s {START_KEY}")
            with suppress(TimeoutError):
                connection, _ = server.accept()
                key = greeting(connection, secret)
                if key in awaited - found.keys():
                    make_prompt(connection)
                    found[key] = connection
                else:
                    connection.close()
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return found


def greeting(connection: socket.socket, secret: str) -> Key | None:
    """Who a new connection says it is; None if it does not know the secret."""
    received, until = b"", time.monotonic() + HELLO_S
    try:
        while len(received) < HELLO.size:
            connection.settimeout(max(0.001, until - time.monotonic()))
            piece = connection.recv(HELLO.size - len(received))
            if not piece or time.monotonic() > until:
                return None
            received += piece
    except OSError:
        return None
    connection.settimeout(None)
    said, rank, which = HELLO.unpack(received)
    return (rank, which) if hmac.compare_digest(said, secret.encode()) else None
