"""What a rank 0 in a process of its own does besides computing: it sends the engine's process each step's result.

One thread does both. While the tokens of a step are on their way from the device, it looks in turn whether they have
come and whether a message has, and acts on what comes first; so the next step is launched meanwhile.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hookline.core.errors import LostStep
from hookline.core.executor.answers import fault, launched, result
from hookline.core.step.executor import StepResult
from hookline.core.step.message import TIME_STEPS, Step, masks_in, unpack
from hookline.core.step.timing import Clock
from hookline.core.util.arrays import IntArray, MaskArray


class Rank0Worker(Protocol):
    """What computes the steps of rank 0; see Executor."""

    @property
    def late_work(self) -> Mapping[str, int]:
        """See EngineView.late_work."""
        ...

    def launch(self, step: Step) -> Any:
        """Start computing a step."""
        ...

    def mask_rows(self, num_rows: int) -> MaskArray:
        """The buffer to write the masks of the step launched last into."""
        ...

    def release(self, handle: Any, num_rows: int) -> None:
        """Draw the tokens of the step launched last, whose masks are in `mask_rows`."""
        ...

    def has_arrived(self, handle: Any) -> bool:
        """Whether the tokens of a step have come, so that `collect` does not wait."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for the result of a step."""
        ...

    def time_steps(self) -> Clock:
        """Time steps from now on."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        ...


class Answering:
    """Carries out messages and answers each. engine: the socket of the messages; `next_message` only polls it."""

    def __init__(self, worker: Rank0Worker, engine: socket.socket, answers: socket.socket) -> None:
        self._worker, self._answers = worker, answers
        self._readable = select.poll()
        self._readable.register(engine, select.POLLIN)
        self._number = 0
        """The number of the message that was carried out last."""
        self._arriving: deque[tuple[int, Any]] = deque()
        """Steps whose tokens are on their way, by number, oldest first."""
        self._waiting: tuple[int, Any] | None = None
        """The step launched last, if its draws wait for masks."""
        self._clock: Clock | None = None

    def next_message(self, receive: Callable[[], IntArray]) -> IntArray:
        """Wait for the next message, which `receive` reads; meanwhile, send the results of the steps before."""
        while self._arriving:
            number, handle = self._arriving[0]
            if self._worker.has_arrived(handle):
                self._arriving.popleft()
                collected = self._worker.collect(handle)
                time = None if self._clock is None else self._clock.read()
                self._answers.sendall(result(number, collected, time))
            elif self._readable.poll(0):
                break
        return receive()

    def carry_out(self, message: IntArray) -> None:
        """Do what a message asks for: launch a step, draw the last one's tokens by its masks, or begin to time steps.

        Raises: what the worker raises; no result of the step is kept then.
        """
        self._number += 1
        masks_NW = masks_in(message)
        if message[0] == TIME_STEPS:
            self._clock = self._worker.time_steps()
        elif masks_NW is None:
            self._waiting, step = None, unpack(message)
            begun = self._number, self._worker.launch(step)
            if len(step.masked_draws):
                self._waiting = begun
            else:
                self._arriving.append(begun)
        else:
            assert self._waiting is not None, "no step waits for masks"
            waiting, self._waiting = self._waiting, None
            self._worker.mask_rows(len(masks_NW))[:] = masks_NW
            self._worker.release(waiting[1], len(masks_NW))
            self._arriving.append(waiting)

    def answer(self, error: LostStep | None) -> None:
        """Answer the last message: that it was taken, or what failed."""
        self._answers.sendall(launched(self._number) if error is None else fault(self._number, error))
