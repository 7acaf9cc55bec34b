"""The executor over several ranks: rank 0 is this process, the others are its children, and all compute every step.

Rank 0 sends each step to the others over their sockets and then computes it like them; the collectives inside keep
them together. Knows no requests, no configuration and no model: `core.assembly.engine` hands it rank 0's worker and
says what a child's process runs. A group that has lost a rank says so for ever; it does not heal.
"""

from __future__ import annotations

import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS, Heartbeat
from hookline.core.distributed.process_group import listen
from hookline.core.errors import HooklineError, Interrupted, LostStep, RankError, RequestFault
from hookline.core.executor.child import Child, end, kill
from hookline.core.executor.messages import frame_of
from hookline.core.executor.monitor import Monitor, Timeouts
from hookline.core.executor.shared_memory import SharedWords
from hookline.core.step.executor import SizedExecutor
from hookline.core.step.message import Step, pack, pack_masks
from hookline.core.step.timing import Clock
from hookline.core.util.arrays import IntArray, MaskArray, VectorArray, no_ints
from hookline.core.util.standard_files import open_missing

FULL_S = 0.01
"""Between two looks for a lost rank while a socket is full."""
AGREE_S = 5e-5
"""Between two looks whether the other ranks have done a step."""
CLOSE_S = 10.0
"""For processes to end by themselves."""


class MultiprocExecutor(SizedExecutor):
    """`core.step.executor.Executor` over the ranks of one engine."""

    def __init__(self, worker: SizedExecutor, links: RankLinks) -> None:
        self.worker, self.links, self._is_closed = worker, links, False

    @property
    def num_blocks(self) -> int:
        """See Executor."""
        return self.worker.num_blocks

    @property
    def late_work(self) -> Mapping[str, int]:
        """See EngineView.late_work."""
        return self.worker.late_work

    def launch(self, step: Step) -> _Handle:
        """See Executor.

        Raises: RankError if a rank is lost; RequestFault if the same failed on every rank.
        """
        own = self._together(partial(self.worker.launch, step), pack(step))
        return _Handle(own, self.links.heartbeat.num_steps if step.processors or len(step.pooled) else 0)

    def _together(self, ours: Callable[[], Any], message: IntArray) -> Any:
        """Send a message to the others and do our own part of what it asks for."""
        monitor = self.links.monitor
        with monitor.in_step(), self._telling_why(), uninterrupted(), monitor.interrupter.region():
            try:
                self.links.send(message)
                result = ours()
            except RankError:
                raise
            except RequestFault as error:
                self.links.heartbeat.end_step(failed=True)
                self.links.agree(self.links.heartbeat.num_steps, str(error))
                raise
            except BaseException as error:
                monitor.check()  # it may be no more than an echo of another rank's end
                # The others compute this step to its end, so from here on they are not where we are.
                monitor.fail(f"rank 0 (this process) broke off a step: {type(error).__name__}: {error}")
                if isinstance(error, LostStep):
                    error.ends_engine = True
                raise
            self.links.heartbeat.end_step()
        return result

    def mask_rows(self, num_rows: int) -> MaskArray:
        """See Executor."""
        return self.worker.mask_rows(num_rows)

    def release(self, handle: _Handle, num_rows: int) -> None:
        """See Executor; the masks travel to the other ranks as they stand in our buffer.

        Raises: RankError if a rank is lost; RequestFault if the same failed on every rank.
        """
        masks = self.mask_rows(num_rows)
        self._together(partial(self.worker.release, handle.own, num_rows), pack_masks(masks))
        if handle.to_agree_on:
            handle.to_agree_on = self.links.heartbeat.num_steps

    def collect(self, handle: _Handle) -> IntArray:
        """See Executor.

        Raises: RankError if a rank is lost.
        """
        with self.links.monitor.in_step(), self._telling_why():
            tokens = self.worker.collect(handle.own)
            if handle.to_agree_on:
                self.links.agree(handle.to_agree_on)
        self.links.monitor.check()
        return tokens

    def collect_vectors(self, handle: _Handle) -> Sequence[VectorArray]:
        """See Executor; they are the same on every rank."""
        return self.worker.collect_vectors(handle.own)

    def collect_states(self, handle: _Handle) -> Mapping[int, VectorArray]:
        """See Executor; they are the same on every rank."""
        return self.worker.collect_states(handle.own)

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """See Engine.tell_if_stuck."""
        self.links.monitor.tell_if_stuck = tell

    def time_steps(self) -> Clock:
        """See Executor; of rank 0's device, which waits for the others like any."""
        return self.worker.time_steps()

    @contextmanager
    def _telling_why(self) -> Iterator[None]:
        """In place of a collective that broke off, the rank that broke it; of our own code, why it was broken off."""
        try:
            yield
        except (RankError, Interrupted) as error:
            raise self.links.monitor.verdict(error) from error
        except RuntimeError as error:
            self.links.monitor.check()
            raise error

    def close(self) -> None:
        """See Executor."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.links.close()
        finally:
            self.worker.close()


@dataclass
class _Handle:
    """own: rank 0's. to_agree_on: the number of the
    step's last part, if plugins ran in it that may fail for single requests; else 0.
    """

    own: Any
    to_agree_on: int


class RankLinks:
    """What connects rank 0 with the others: processes, shared memory, the monitor.

    target: what a child runs, as "module:function". task: what each child is told,
    beside what it needs to join the group.
    """

    def __init__(self, size: int, target: str, task: Mapping[str, Any], timeouts: Timeouts) -> None:
        self.size = size
        self.num_words = HEARTBEAT_WORDS * size
        open_missing()
        self.memory = SharedWords.create(self.num_words)
        words = self.memory.words
        heartbeats = [Heartbeat(words, rank) for rank in range(size)]
        self.heartbeat = heartbeats[0]
        self.store: Any = listen()
        self.secret = secrets.token_hex(16)
        self.children: list[Child] = []
        self.monitor = Monitor(self.children, heartbeats, timeouts)
        try:
            for rank in range(1, size):
                self.children.append(Child(rank, self.memory.fd, target))
                self.children[-1].tell({**task, **self._membership(rank)})
        except BaseException:
            self.close()
            raise
        self.monitor.start()

    def _membership(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "size": self.size,
            "port": self.store.port,
            "secret": self.secret,
            "memory_fd": self.memory.fd,
            "num_words": self.num_words,
            "num_threads": max(1, torch.get_num_threads() // self.size),
        }

    def send(self, message: IntArray) -> None:
        """Send a message to every child; waits for those that are still busy with earlier ones.

        Raises: RankError if a rank is lost meanwhile.
        """
        frame = frame_of(message)
        rests = {child: child.send_some(frame) for child in self.children}
        while behind := {child: rest for child, rest in rests.items() if len(rest)}:
            self.monitor.check()
            select.select([], [child.connection for child in behind], [], FULL_S)
            rests = {child: child.send_some(rest) for child, rest in behind.items()}

    def agree(self, number: int, fault: str = "") -> None:
        """Wait until every rank has done this step, and make sure that all failed in it, with rank 0's fault, or none.

        Raises: RankError if some did and others did not: what they hold of the step's requests differs.
        """
        until = time.monotonic() + self.monitor.alone_s
        for heartbeat in self.monitor.heartbeats[1:]:
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
        """End the processes: by an empty message if they listen, else at once."""
        try:
            if self.monitor.failure is None:
                self.monitor.stop()
                self.send(no_ints())
        except BaseException:
            kill(self.children)
            raise
        finally:
            self.monitor.stop()
            end(self.children, CLOSE_S if self.monitor.failure is None else 0.0)
            self.memory.close()
            self.store = None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off until the end, since the ranks would lose step half-way; a second one comes through at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        if held:
            before(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])
