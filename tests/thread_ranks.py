"""Ranks as threads of one process, with real sums: tensor parallelism for tests, without processes or sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from core.parallel import Ranks

Result = TypeVar("Result")


class Meeting:
    """Where the threads of `ThreadRanks` meet to add tensors up."""

    def __init__(self, size: int) -> None:
        self.parts: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadRanks(Ranks):
    """A rank on a thread of this process; `group` is the Meeting."""

    def all_reduce(self, x: Tensor) -> Tensor:
        meeting: Meeting = self.group
        meeting.parts[self.rank] = x.clone()
        meeting.barrier.wait()
        total = sum(meeting.parts[rank] for rank in range(self.size))
        meeting.barrier.wait()
        return x.copy_(total)


def on_every_rank(size: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """What `work` returns on each of `size` ranks that run at once, in rank order."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, [ThreadRanks(rank, size, meeting) for rank in range(size)]))
