"""The executor whose ranks are all in processes of their own, rank 0 too: it sends frames and reads rank 0's answers.

Every message goes to all ranks. Rank 0 answers each one at once, with "launched" or with a fault, and again with the
result once that is there, so that the next step can be launched meanwhile. The first answer is waited for only if the
engine could go on after a fault; any other fault ends the rank, and so the engine.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hookline.core.errors import HooklineError
from hookline.core.executor.answers import LAUNCHED, RESULT, read_fault, read_result
from hookline.core.executor.links import RankLinks, uninterrupted
from hookline.core.executor.messages import receive_frame
from hookline.core.step.executor import SizedExecutor, StepResult
from hookline.core.step.message import Step, pack, pack_late_rows, pack_time_steps
from hookline.core.step.timing import DeviceTime
from hookline.core.util.arrays import IntArray, WordArray

LOOK_S = 0.1
"""Seconds between two looks for a lost rank while rank 0 sends nothing."""


@dataclass
class _Handle:
    """A launched step. number: of its message, by which its result is recognised.

    to_agree_on: the number of the step's last message, if plugins ran in it that may fail for single requests; else 0.
    """

    number: int
    to_agree_on: int


class RemoteClock:
    """`core.step.timing.Clock` of rank 0's device: the times come with the results."""

    def __init__(self) -> None:
        self._times: deque[DeviceTime] = deque()

    def add(self, time: DeviceTime) -> None:
        """Add the time of the step that was collected last."""
        self._times.append(time)

    def read(self) -> DeviceTime | None:
        """See Clock."""
        return self._times.popleft() if self._times else None

    def clear(self) -> None:
        """See Clock."""
        self._times.clear()


class RemoteExecutor(SizedExecutor):
    """`core.step.executor.Executor` over ranks that are all in other processes.

    num_blocks: of the KV cache, as rank 0 sized it. late_width: 32-bit words of a late row.
    """

    watches_steps, is_here = True, False

    def __init__(self, links: RankLinks, num_blocks: int, late_width: int) -> None:
        self.links, self._num_blocks = links, num_blocks
        self._late_rows = np.empty((0, late_width), dtype=np.int32)
        self._num_sent, self._clock = 0, RemoteClock()
        self._results: dict[int, tuple[StepResult, DeviceTime | None]] = {}
        """Results of steps that were not collected yet, and their times if steps are timed, by number."""
        answers = links.children[0].answers
        assert answers is not None, "rank 0 has a socket for its answers"
        self._answers, self._readable = answers, select.poll()
        self._readable.register(answers, select.POLLIN)
        self._is_closed = False

    @property
    def progress(self) -> int:
        """See Executor."""
        return 0 if self._is_closed else self.links.heartbeat.progress

    @property
    def num_blocks(self) -> int:
        """See Executor."""
        return self._num_blocks

    @property
    def late_work(self) -> Mapping[str, int]:
        """See EngineView.late_work: of rank 0's process."""
        return self.links.monitor.late_work

    def launch(self, step: Step) -> _Handle:
        """See Executor.

        Raises: RankError if a rank is lost; RequestFault if the step failed on every rank for the same requests;
        LostStep if there is a single rank and it lost the step.
        """
        number = self._send(pack(step), may_fail_alone=step.is_agreed_on)
        return _Handle(number, number if step.is_agreed_on else 0)

    def late_rows(self, num_rows: int) -> WordArray:
        """See Executor."""
        if len(self._late_rows) < num_rows:
            self._late_rows = np.empty((num_rows, self._late_rows.shape[1]), dtype=np.int32)
        return self._late_rows[:num_rows]

    def release(self, handle: _Handle, num_rows: int) -> None:
        """See Executor.

        Raises: as `launch` does.
        """
        number = self._send(pack_late_rows(self.late_rows(num_rows)), may_fail_alone=handle.to_agree_on > 0)
        if handle.to_agree_on:
            handle.to_agree_on = number

    def _send(self, message: IntArray, *, may_fail_alone: bool) -> int:
        """Send a message to all ranks; returns its number.

        Waits until rank 0 has carried it out if the group survives a fault in it: with a single rank, or with
        `may_fail_alone`, a fault that all ranks agree on.
        Raises: that fault.
        """
        monitor = self.links.monitor
        with monitor.in_step():
            with uninterrupted():
                self.links.send(message)
                self._num_sent += 1
            number = self._num_sent
            if self.links.size > 1 and not may_fail_alone:
                return number
            while (answer := self._next_answer())[1] != number or answer[0] == RESULT:
                self._keep(answer)
            if answer[0] == LAUNCHED:
                return number
            error = read_fault(answer)
            self.links.agree(number, str(error))
        raise error

    def collect(self, handle: _Handle) -> StepResult:
        """See Executor.

        Raises: RankError if a rank is lost.
        """
        monitor = self.links.monitor
        with monitor.in_step():
            while handle.number not in self._results:
                self._keep(self._next_answer())
            if handle.to_agree_on:
                self.links.agree(handle.to_agree_on)
        monitor.check()
        result, time = self._results.pop(handle.number)
        for stale in [number for number in self._results if number < handle.number]:
            del self._results[stale]
        if time is not None:
            self._clock.add(time)
        return result

    def _next_answer(self) -> IntArray:
        """Wait for rank 0's next answer.

        Raises: RankError if a rank is lost meanwhile.
        """
        monitor = self.links.monitor
        while not self._readable.poll(1000 * LOOK_S):
            monitor.check()
        try:
            with uninterrupted():  # a frame is read whole
                return receive_frame(self._answers)
        except OSError as error:
            raise monitor.verdict(error) from None

    def _keep(self, answer: IntArray) -> None:
        """Keep a result for `collect`; drop other answers, which are to steps whose caller was interrupted."""
        if answer[0] == RESULT:
            self._results[int(answer[1])] = read_result(answer)

    def time_steps(self) -> RemoteClock:
        """See Executor; the times are of rank 0's device, and include its waits for other ranks."""
        self._send(pack_time_steps(), may_fail_alone=False)
        return self._clock

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """See Engine.tell_if_stuck."""
        self.links.monitor.tell_if_stuck = tell

    def close(self) -> None:
        """See Executor."""
        if not self._is_closed:
            self._is_closed = True
            self.links.close()
