"""One rank as an actor of Ray: says where it is, connects back to the engine's process, and is a rank from then on.

Ray is imported only inside of an actor, so that the engine's process and tests can import this module without it.
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
from typing import Any

from hookline.core.errors import RankError
from hookline.core.executor.rank_loop import serve_rank
from hookline.core.executor.reach import OPEN_PORTS
from hookline.core.plugin.environment import environment

HELLO = struct.Struct("64s2i")
"""What a connection begins with: the engine's secret, the rank, and which of its two connections it is."""
MESSAGES, ANSWERS = range(2)
CONNECT_S = 30.0
LOST_MS = 20_000
"""Without an acknowledgement of what was sent, after which a connection counts as closed: the other host is gone."""


class RankActor:
    """See `core.executor.ray_reservation`, which makes one for each rank."""

    def describe(self, uses_gpu: bool) -> dict[str, Any]:
        """Where this actor is, on which device, and what of its environment must be as everywhere."""
        import ray

        context = ray.get_runtime_context()
        told = {"host": ray.util.get_node_ip_address(), "node": context.get_node_id(), "pid": os.getpid()}
        told |= {"device": "cpu", "index": 0, "compute_capability": None, "environment": environment()}
        if uses_gpu:
            import torch

            index = gpu_index(context.get_accelerator_ids()["GPU"][0], os.environ.get("CUDA_VISIBLE_DEVICES"))
            told |= {"device": f"cuda:{index}", "index": index}
            told["compute_capability"] = torch.cuda.get_device_capability(index)
        return told

    def run(self, rank: int, host: str, port: int, secret: str, target: str) -> None:
        """Be a rank until the engine's process ends it. target: a `rank_loop.Build`, as "module:function"."""
        engine = connect(host, port, secret, rank, MESSAGES)
        answers = connect(host, port, secret, rank, ANSWERS) if rank == 0 else None
        module, _, function = target.partition(":")
        serve_rank(engine, answers, getattr(importlib.import_module(module), function))


def gpu_index(id_: str, visible: str | None) -> int:
    """Which of the process's GPUs Ray means by its id, if Ray leaves CUDA_VISIBLE_DEVICES alone."""
    names = visible.split(",") if visible else []
    return names.index(id_) if id_ in names else int(id_)


def connect(host: str, port: int, secret: str, rank: int, which: int) -> socket.socket:
    """A connection with the engine's process, which knows by it who is there.

    Raises: RankError if there is no way to it.
    """
    try:
        made = socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        raise RankError(f"it cannot reach the engine at {host}:{port} ({error}); {OPEN_PORTS}") from error
    made.settimeout(None)
    make_prompt(made)
    made.sendall(HELLO.pack(secret.encode(), rank, which))
    return made


def make_prompt(connection: socket.socket) -> None:
    """Have what is sent leave at once, and a host that is gone be noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", LOST_MS), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
