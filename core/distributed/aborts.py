"""Ends a rank's waits once other ranks are gone: waits for words in memory that ranks share, and nccl's collectives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, Thread
from typing import Any

import torch

from hookline.core.errors import RankError

logger = logging.getLogger("hookline")
NUM_QUEUES = 32
"""The most queues that a process's streams on a GPU can share; 8 unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise."""
RELEASE_PRIORITY = -3
"""Priority of the streams on which waits are ended. torch has a pool of NUM_QUEUES streams for each priority, and no
other work has this one; streams made one after the other were seen to take the queues in turn."""
STARTING_S = 1.0
"""Seconds that an abort waits for a collective that is just being started."""
IN_TURN_S = 0.1
"""Seconds that the abort of a group waits for the abort of the group before."""


@contextmanager
def losing_others(what: str = "a collective") -> Iterator[None]:
    """A context that turns the error of a collective, or of a link, whose other rank is gone into RankError."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{what} broke off: {str(error).partition(chr(10))[0]}") from error


class Releases:
    """Calls that end a rank's waits for words in memory that ranks share; from any thread, and more than once."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self._has_told = False

    def add(self, call: Callable[[], None], *, by_host: bool = False) -> None:
        """Add a call. by_host: it does not use the CUDA driver. Such calls are made first: the others may block."""
        self._calls.insert(0 if by_host else len(self._calls), call)

    def __call__(self) -> None:
        """Make all calls, even if one fails, which is logged once."""
        for call in self._calls:
            try:
                call()
            except Exception as error:  # must hide no cause
                if not self._has_told:
                    logger.error("while a rank was let go: %s", error)
                self._has_told = True

    def clear(self) -> None:
        """Remove all calls, since the memory is about to be freed."""
        self._calls.clear()


def on_every_queue(write: Callable[[], None], warm_up: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A call that launches `write` even while the GPU's streams wait. warm_up: launches a write that changes nothing.

    Streams share a few queues of a GPU, and a wait at the front of a queue holds up all its streams. A stream of its
    own might lie in such a queue, so the write is launched on a stream of every queue. A stream that has not done the
    write before is left out, as its queue would fill up.
    """
    streams: list[Any] = [
        torch.cuda.Stream(device, priority=RELEASE_PRIORITY)  # type: ignore[no-untyped-call]
        for _ in range(NUM_QUEUES)
    ]
    for stream in streams:  # while other streams wait, the driver might be unable to set up a first write
        with torch.cuda.stream(stream):
            warm_up()

    def _written() -> None:
        with torch.cuda.device(device):  # else leaving a stream sets up the thread's own device, which may be another
            for stream in streams:
                with torch.cuda.stream(stream):
                    if stream.query():
                        write()

    return _written


class Aborts:
    """nccl's aborts of a rank's groups, in a thread each, which begin IN_TURN_S apart at most.

    nccl ends the waits of a group's kernels at once, but then waits for the work of its streams, which may be queued
    behind that of another group, and for the last CUDA graph that holds one of its collectives, which the thread that
    asks for the abort may have to end.
    """

    def __init__(self) -> None:
        self._starting, self._beginning = Lock(), Lock()
        self._threads: dict[int, Thread] = {}

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of a collective.

        Raises: RankError once an abort has begun, since nccl would have us wait for its end.
        """
        with self._starting:
            if self._threads:
                raise RankError("the ranks' group was aborted")
            yield

    def begin(self, groups: Sequence[Any]) -> None:
        """Have these groups aborted unless they are already; returns soon, whatever they wait for.

        One after the other, but none waits for another for long.
        """
        with self._beginning:
            new = {
                id(group): Thread(target=self._abort, args=[group], name="hookline-abort", daemon=True)
                for group in groups
                if id(group) not in self._threads
            }
            self._threads |= new
            for thread in new.values():
                thread.start()
                thread.join(IN_TURN_S)

    def join(self, patience_s: float) -> bool:
        """Wait for at most this long; returns whether all have ended."""
        deadline = time.monotonic() + patience_s
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads.values())

    def _abort(self, group: Any) -> None:
        if self._starting.acquire(timeout=STARTING_S):  # else the abort has to end that start, too
            self._starting.release()
        try:
            group.abort()
        except Exception as error:  # must hide no cause
            logger.error("while nccl was aborted: %s", error)
