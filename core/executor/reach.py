"""Whether the ranks of several hosts reach each other, tried before the first collective.

Where ports between hosts are closed, torch and NCCL wait for two minutes or more, and then name neither host. Each rank
listens on the address under which the others are to find it, and connects to all of theirs at once.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

OPEN_PORTS = "open the ports of net.ipv4.ip_local_port_range between the nodes"
"""What users can do if hosts do not reach each other: which ports it will be, the kernel chooses."""
TRY_S = 5.0
"""For a connection to be made: twice, what was lost on the way is sent again meanwhile."""

Address = tuple[str, int]
"""A host and a port."""


def listening(host: str, num_others: int) -> socket.socket:
    """A socket on a free port of this address. The kernel takes as many connections for it without being asked."""
    return socket.create_server((host, 0), backlog=num_others)


def unreached(addresses: Mapping[int, Address]) -> dict[int, str]:
    """Which of these ranks takes no connection at its address, and why: after TRY_S at the latest."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        found = dict(zip(addresses, pool.map(_why_unreached, addresses.values()), strict=True))
    return {rank: why for rank, why in found.items() if why is not None}


def _why_unreached(address: Address) -> str | None:
    try:
        socket.create_connection(address, timeout=TRY_S).close()
    except OSError as error:
        return str(error)
    return None
