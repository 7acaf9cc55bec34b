"""The contract of an executor: where the ranks of an engine run, if not as child processes of the engine's own.

Core keeps the work of the ranks: their task, the message of each step, results, heartbeats, and the error that names a
lost rank. All of it travels over TCP connections that each rank opens to the engine's process. An executor finds room
for the ranks, says where each of them is, starts it there, and ends it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class WantedRanks:
    """How many ranks an engine needs room for, on which devices, and for how long it waits."""

    num_ranks: int
    """Number of ranks, tp * pp; they are numbered from 0."""
    group_size: int
    """Ranks of a tensor-parallel group (tp). Their numbers follow each other; they are best placed on one host."""
    device: str
    """auto, cpu, cuda or cuda:N, as the configuration has it."""
    num_cpu_threads: int
    """CPU threads that each rank computes with, if it computes on a CPU; at least 1."""
    patience_s: float
    """Seconds that the start may wait for room: engine.start_timeout_s."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is to run."""

    host: str
    """The address under which the other ranks reach it."""
    node: str
    """A name of the host: equal for two ranks exactly if they run on the same host, whatever their addresses are."""
    pid: int
    """The id of its process."""
    device: str
    """cpu, or cuda:N as the rank's process counts its GPUs. Ranks of a host that follow each other on the GPUs N, N + 1
    and so on, all of which their processes see, read each other's memory."""
    environment: Mapping[str, Any]
    """`hookline.core.launching.environment()` of its process, which must be that of the engine's process."""
    compute_capability: tuple[int, int] | None = None
    """The compute capability of its GPU, e.g. (9, 0); None without one."""

    def __str__(self) -> str:
        """The rank's process, as errors name it."""
        return f"pid {self.pid} on node {self.host}"


@dataclass(frozen=True)
class RankStart:
    """Turns a process into a rank. Can be pickled. Whoever has the secret can be a rank: keep it off command lines."""

    rank: int
    host: str
    """The address of the engine's process, which the rank connects to."""
    port: int
    """The TCP port of that process."""
    secret: str
    target: str
    """The function of core that is called, "package.module:function"."""

    def run(self) -> None:
        """Be the rank until the engine's process ends it; to be called once, in the main thread.

        If the engine's process is gone, the process ends at once. When this returns, the process should end by
        `os._exit`: the destructors of collectives may wait for ranks that have ended already.
        Raises: RankError if the engine's process cannot be reached.
        """
        module, _, function = self.target.partition(":")
        getattr(importlib.import_module(module), function)(self)


class StartedRank(Protocol):
    """A process that was started as a rank. Its methods are called by several threads."""

    def how_it_ended(self) -> str:
        """How the process ended, in words for an error: "was killed by SIGKILL". Called once its connection is closed.

        Waits for the process for a few seconds at most.
        """
        ...

    def kill(self) -> None:
        """End the process, even if it is stopped, without waiting for it; its connections are closed already."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most timeout_s seconds; returns whether the process is gone, or no rank any more."""
        ...


class RankExecutor(Protocol):
    """Where the ranks of an engine run. For classes to extend.

    Constructed once for each engine, before its checkpoint is read, so that errors come early; config is an instance of
    the registered dataclass, or None.
    """

    host: str
    """The address under which ranks reach this process. Set by the constructor."""

    places: Sequence[RankPlace]
    """Where each rank will run; its index is the rank. Set by the constructor."""

    def __init__(self, config: Any, wanted: WantedRanks) -> None:
        """Find room for all ranks, and wait until the place of each rank is known.

        Raises: ConfigError for a demand that can never be met; RankError if there is no room in time. Then everything
                that was reserved is given back.
        """
        ...

    def start(self, starts: Sequence[RankStart]) -> Sequence[StartedRank]:
        """Make the process of each rank call its RankStart's `run`; returns the processes by rank, without waiting."""
        ...

    def release(self) -> None:
        """Give everything back, including ranks that still run or were never started; a second call does nothing.

        Called when the engine is closed and when its start fails.
        """
        ...
