"""Connects an engine's process with the processes of its ranks: messages to all of them, and the monitor.

`core.assembly` decides what a process runs and its task. Once a rank is lost, every later call raises RankError: a
group does not heal.
"""

from __future__ import annotations

import logging
import math
import secrets
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS, Heartbeat
from hookline.core.distributed.process_group import LOOPBACK, listen
from hookline.core.executor.answers import words_of
from hookline.core.executor.messages import frame_of
from hookline.core.executor.monitor import Monitor, Timeouts
from hookline.core.executor.peer import Child, Peer, end, kill
from hookline.core.util.arrays import IntArray, no_ints
from hookline.core.util.shared_memory import SharedWords
from hookline.core.util.standard_files import open_missing

FULL_S = 0.01
"""Seconds between two checks for a lost rank while a socket is full."""
AGREE_S = 5e-5
"""Seconds between two checks whether the other ranks have done a step."""
CLOSE_S = 10.0
"""Seconds that processes have to end by themselves."""


class RankLinks:
    """The processes of an engine's ranks, their heartbeats and the monitor.

    children: all ranks, or all but rank 0, which is this process then. words: the array that holds the heartbeats.
    """

    def __init__(self, size: int, timeouts: Timeouts, words: IntArray) -> None:
        self.size = size
        heartbeats = [Heartbeat(words, rank) for rank in range(size)]
        self.heartbeat = heartbeats[0]
        self.secret = secrets.token_hex(16)
        self.children: list[Peer] = []
        self.monitor = Monitor(self.children, heartbeats, timeouts)

    def membership(self, rank: int) -> dict[str, Any]:
        """A rank's place in the group: sent to its process besides its task."""
        told = {"rank": rank, "size": self.size, "secret": self.secret, "num_words": HEARTBEAT_WORDS * self.size}
        return {**told, "log_level": logging.getLogger("hookline").getEffectiveLevel()}

    def meet(self, place: Mapping[str, Any]) -> None:
        """Wait until the processes have begun, and send them the host and port of the store where their ranks meet.

        place: empty if rank 0 opens the store and reports its address.
        Raises: RankError if a rank is lost meanwhile.
        """
        said = self.monitor.wait_until_all("here")
        self.send(words_of(place or said.get(0, {})))

    def send(self, message: IntArray) -> None:
        """Send a message to every child; waits for children whose sockets are full of earlier ones.

        Raises: RankError if a rank is lost meanwhile.
        """
        self._send_until(message, math.inf)

    def _send_until(self, message: IntArray, until_s: float) -> None:
        """`send`, but no longer than until this time of time.monotonic."""
        frame = frame_of(message)
        rests = {child: child.send_some(frame) for child in self.children}
        while (behind := {child: rest for child, rest in rests.items() if len(rest)}) and time.monotonic() < until_s:
            self.monitor.check()
            select.select([], [child.connection for child in behind], [], FULL_S)
            rests = {child: child.send_some(rest) for child, rest in behind.items()}

    def agree(self, number: int, fault: str = "") -> None:
        """Wait until every rank has done this step, and make sure that it failed on all ranks or on none.

        fault: how it failed on rank 0; empty if it did not.
        Raises: RankError if it failed on some ranks only, whose caches then differ for the step's requests.
        """
        until = time.monotonic() + self.monitor.alone_s
        for heartbeat in self.monitor.heartbeats:
            while heartbeat.num_steps < number:
                self.monitor.check()
                if fault and time.monotonic() > until:  # they wait for us, in a collective that we did not get to
                    self.monitor.fail_alone([0], fault)
                time.sleep(AGREE_S)
        failed = [rank for rank, heartbeat in enumerate(self.monitor.heartbeats) if heartbeat.last_failed == number]
        if failed and len(failed) < self.size:
            self.monitor.fail_alone(failed, fault)
            self.monitor.check()

    def close(self) -> None:
        """End the processes: by an empty message if the group is sound, else by killing them.

        A process that does not read the message, or does not end, is killed after CLOSE_S.
        """
        until_s = time.monotonic() + CLOSE_S
        try:
            if self.monitor.failure is None:
                self.monitor.stop()
                self._send_until(no_ints(), until_s)
        except BaseException:
            kill(self.children)
            raise
        finally:
            self.monitor.stop()
            end(self.children, until_s - time.monotonic() if self.monitor.failure is None else 0.0)


class LocalLinks(RankLinks):
    """Ranks that are child processes, with heartbeats in shared memory.

    target: a child's main function, as "module:function". task: sent to each child. first: the first rank that is a
    child; if that is 1, this process is rank 0, and `store` is where the ranks meet.
    """

    def __init__(self, size: int, target: str, task: Mapping[str, Any], timeouts: Timeouts, *, first: int = 1) -> None:
        open_missing()
        self.memory = SharedWords.create(HEARTBEAT_WORDS * size)
        super().__init__(size, timeouts, self.memory.words)
        self.store: Any = listen() if first else None
        given = {**task, "host": LOOPBACK, "memory_fd": self.memory.fd}
        given["num_threads"] = max(1, torch.get_num_threads() // size)
        try:
            for rank in range(first, size):
                self.children.append(Child(rank, self.memory.fd, target, answers=rank == 0))
                self.children[-1].tell({**given, **self.membership(rank)})
        except BaseException:
            self.close()
            raise
        self.monitor.start()

    def close(self) -> None:
        """See RankLinks."""
        try:
            super().close()
        finally:
            self.memory.close()
            self.store = None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the context ends, so that ranks stay at the same step; a second Ctrl-C acts at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, Any]] = []

    def _hold(number: int, frame: Any) -> None:
        if held:
            before(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, _hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])
