"""TCP connections of ranks on other hosts: both sides of the greeting that identifies a connection.

Before the first collective, ranks of several hosts also try each other's addresses, because with closed ports torch and
NCCL wait for two minutes or more and then name neither host. Each rank listens on its own address and connects to all
others at once.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from hookline.core.contracts import RankStart
from hookline.core.errors import RankError

OPEN_PORTS = "open the ports of net.ipv4.ip_local_port_range between the nodes"
"""Hint in errors when hosts do not reach each other: the kernel chooses the ports from this range."""
HELLO = struct.Struct("64s2i")
"""First bytes of a connection: the engine's secret, the rank, and MESSAGES or ANSWERS."""
MESSAGES, ANSWERS = range(2)
HELLO_S = 5.0
"""Seconds in which a new connection must have sent its whole HELLO, however slowly."""
CONNECT_S = 30.0
LOST_MS = 20_000
"""Milliseconds without an acknowledgement of sent bytes after which the other host counts as gone."""
TRY_S = 5.0
"""Seconds for a connection between ranks to be made; TCP repeats a lost packet twice in this time."""
Key = tuple[int, int]
"""A rank, and which of its connections it is."""


def connect_back(start: RankStart, which: int) -> socket.socket:
    """Connect to the engine's process and send the HELLO of this rank.

    Raises: RankError if the engine's process cannot be reached.
    """
    try:
        made = socket.create_connection((start.host, start.port), timeout=CONNECT_S)
    except OSError as error:
        raise RankError(f"it cannot reach the engine at {start.host}:{start.port} ({error}); {OPEN_PORTS}") from error
    made.settimeout(None)
    make_prompt(made)
    made.sendall(HELLO.pack(start.secret.encode(), start.rank, which))
    return made


def make_prompt(connection: socket.socket) -> None:
    """Send without delay (TCP_NODELAY), and notice a host that is gone (keepalive)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", LOST_MS), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def accept_all(
    server: socket.socket, secret: str, awaited: set[Key], patience_s: float, check: Callable[[], None]
) -> dict[Key, socket.socket]:
    """Accept a connection for each key; connections without the secret are refused. check: called while waiting; raises
    if a rank was lost.

    Raises: RankError naming the ranks that did not connect in time.
    """
    found: dict[Key, socket.socket] = {}
    deadline = time.monotonic() + patience_s
    server.settimeout(0.2)
    try:
        while found.keys() != awaited:
            check()
            if time.monotonic() > deadline:
                missing = " and ".join(f"rank {rank}" for rank in sorted({key[0] for key in awaited - found.keys()}))
                raise RankError(f"{missing} did not connect within {patience_s:g} s (engine.start_timeout_s)")
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
    """Read a new connection's HELLO: its rank and kind; None if the secret is wrong."""
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


Address = tuple[str, int]
"""A host and a port."""


def listening(host: str, num_others: int) -> socket.socket:
    """A listening socket on a free port of this address, with a backlog for `num_others` connections."""
    return socket.create_server((host, 0), backlog=num_others)


def unreached(addresses: Mapping[int, Address]) -> dict[int, str]:
    """The ranks that cannot be connected to at their addresses, and why; takes at most TRY_S."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        found = dict(zip(addresses, pool.map(_why_unreached, addresses.values()), strict=True))
    return {rank: why for rank, why in found.items() if why is not None}


def _why_unreached(address: Address) -> str | None:
    try:
        socket.create_connection(address, timeout=TRY_S).close()
    except OSError as error:
        return str(error)
    return None
