"""Carries out the messages of the engine's process on one rank; rank 0 sends back each step's result, too.

One thread does both. While the tokens of a step are on their way from the device, it looks in turn whether they have
come and whether a message has, and acts on what comes first; so the next step is launched meanwhile.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from hookline.core.errors import LostStep
from hookline.core.executor.answers import fault, launched, result
from hookline.core.step.executor import RankWorker
from hookline.core.step.message import TIME_STEPS, late_rows_in, unpack
from hookline.core.step.timing import Clock
from hookline.core.util.arrays import IntArray


class StepServer:
    """The steps of one rank. engine: the socket of the messages; `next_message` only polls it.

    answers: the socket on which each message is answered; None on ranks other than 0, whose results are not collected.
    """

    def __init__(self, worker: RankWorker, engine: socket.socket, answers: socket.socket | None) -> None:
        self._worker, self._answers = worker, answers
        self._readable = select.poll()
        self._readable.register(engine, select.POLLIN)
        self._number = 0
        """The number of the message that was carried out last."""
        self._arriving: deque[tuple[int, Any]] = deque()
        """Steps whose tokens are on their way, by number, oldest first."""
        self._waiting: tuple[int, Any] | None = None
        """The step launched last, if its draws are late."""
        self._clock: Clock | None = None

    def next_message(self, receive: Callable[[], IntArray]) -> IntArray:
        """Wait for the next message, which `receive` reads; meanwhile, send the results of the steps before."""
        while self._arriving:
            number, handle = self._arriving[0]
            if self._worker.has_arrived(handle):
                self._arriving.popleft()
                self._send_result(number, handle)
            elif self._readable.poll(0):
                break
        return receive()

    def _send_result(self, number: int, handle: Any) -> None:
        assert self._answers is not None
        collected = self._worker.collect(handle)
        time = None if self._clock is None else self._clock.read()
        self._answers.sendall(result(number, collected, time))

    def carry_out(self, message: IntArray) -> None:
        """Do what a message asks for: launch a step, draw the last one's tokens by late rows, or time steps.

        Raises: what the worker raises; no result of the step is kept then.
        """
        self._number += 1
        rows_NW = late_rows_in(message)
        if message[0] == TIME_STEPS:
            if self._answers is not None:
                self._clock = self._worker.time_steps()
        elif rows_NW is None:
            self._waiting, step = None, unpack(message)
            begun = self._number, self._worker.launch(step)
            if len(step.late_draws):
                self._waiting = begun
            else:
                self._expect(begun)
        else:
            assert self._waiting is not None, "no step waits for late rows"
            waiting, self._waiting = self._waiting, None
            self._worker.late_rows(len(rows_NW))[:] = rows_NW
            self._worker.release(waiting[1], len(rows_NW))
            self._expect(waiting)

    def _expect(self, step: tuple[int, Any]) -> None:
        if self._answers is not None:
            self._arriving.append(step)

    def answer(self, error: LostStep | None) -> None:
        """Answer the last message: that it was taken, or what failed."""
        if self._answers is not None:
            self._answers.sendall(launched(self._number) if error is None else fault(self._number, error))
