"""Tensor-parallel ranks as threads of one process: collectives without processes, ports or torch.distributed.

For tests of models and layers. Every rank must call the same collectives in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hookline.core.distributed.ranks import LocalRanks

Result = TypeVar("Result")
TIMEOUT_S = 30.0


class Meeting:
    """Where the threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.parts: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        """Hand in this rank's part, and get all parts in order of rank."""
        self.parts[rank] = part.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


@dataclass(frozen=True)
class ThreadRanks(LocalRanks):
    """A rank in a group of threads; `group` is their Meeting."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Ranks."""
        return x.copy_(torch.stack(self.group.exchange(self.rank, x)).sum(0))

    def all_gather_last(self, x: Tensor) -> Tensor:
        """See Ranks."""
        return torch.cat(self.group.exchange(self.rank, x), -1)

    def smallest(self, value: int) -> int:
        """See Ranks."""
        return min(int(other) for other in self.group.exchange(self.rank, torch.tensor(value)))


def on_ranks(
    size: int, work: Callable[[LocalRanks], Result], ranks_class: type[ThreadRanks] = ThreadRanks
) -> list[Result]:
    """Run `work` on every rank at once; its results in order of rank. The first rank's error is raised, if any."""
    meeting = Meeting(size)

    def _work_on(rank: int) -> Result:
        try:
            return work(ranks_class(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(_work_on, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
