"""The main loop of a rank's process: it sends heartbeats, builds its worker, and computes each step that it receives.

It ends when it is told to, when it fails, and when the engine's process is gone. A rank 0 in such a process sends
results, too: see `core.executor.step_server`.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from hookline.core.distributed.heartbeat import BEAT_S, Heartbeat
from hookline.core.errors import HooklineError, LostStep, RankError, RequestFault, show_traceback
from hookline.core.executor.answers import read_words
from hookline.core.executor.connections import listening, unreached
from hookline.core.executor.messages import JsonLines, receive_frame, send_message
from hookline.core.executor.step_server import StepServer
from hookline.core.step.executor import RankWorker
from hookline.core.step.message import LATE_ROWS, is_agreed_on
from hookline.core.util.arrays import IntArray
from hookline.core.util.shared_memory import SharedWords
from hookline.core.util.text import one_line

_HANG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
"""The event that the other end is closed; on TCP connections, POLLHUP does not come before all data was read."""


Meet = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Build = Callable[[Mapping[str, Any], Heartbeat, Meet], tuple[RankWorker, Mapping[str, Any]]]
"""build(task, heartbeat, meet) -> (worker, facts of it for the engine's process). meet(said) is to be called before the
first collective: it waits for the other ranks and returns the address of their store, which `said` has if rank 0 opened
the store itself."""


class RankProcess:
    """A rank's side of its connection with the engine's process. answers: the second connection, of rank 0."""

    def __init__(self, engine: socket.socket, answers: socket.socket | None, task: Mapping[str, Any]) -> None:
        self.engine, self.answers, self.task = engine, answers, task
        self.shares_memory = "memory_fd" in task
        num_words = task["num_words"]
        words = SharedWords(task["memory_fd"], num_words).words if self.shares_memory else np.zeros(num_words, np.int64)
        self.heartbeat = Heartbeat(words, task["rank"])
        self.started, self.ended = threading.Event(), threading.Event()
        self._sending = threading.Lock()
        self._is_agreed_on = False
        """Whether plugins run in the current step that may fail for single requests."""
        self.late_work: Callable[[], Mapping[str, int]] = lambda: {}
        """See EngineView.late_work; of rank 0's worker, once there is one."""

    def say(self, message: dict[str, Any]) -> None:
        """Send a message to the engine's process; from any thread."""
        with self._sending:
            send_message(self.engine, message)

    def publish(self) -> None:
        """Send the heartbeat to the engine's process, unless it reads that in shared memory."""
        if not self.shares_memory:
            self.say({"words": self.heartbeat.words})

    def run(self, build: Build) -> None:
        """Build the worker and compute until the engine's process ends it. Raises: whatever fails."""
        threading.Thread(target=self._live, daemon=True).start()
        if self.answers is not None:
            log_to(self.say, self.task["log_level"])
        import torch

        torch.set_num_threads(self.task["num_threads"])
        worker, told = build(self.task, self.heartbeat, self._meet)
        self.started.set()
        self.late_work = lambda: worker.late_work
        self.say({"ready": told})
        server = StepServer(worker, self.engine, self.answers)
        while len(message := server.next_message(self._receive)):  # an empty one says that the group ends
            server.answer(self._carry_out(server, message))
        worker.synchronize()
        self.ended.set()

    def _meet(self, said: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.task.get("tries_others"):
            self.say({"here": dict(said)})
            return read_words(self._receive())
        with listening(self.task["host"], self.task["size"]) as server:
            self.say({"here": {**said, "address": server.getsockname()}})
            told = read_words(self._receive())
            addresses = {rank: (host, port) for rank, (host, port) in enumerate(told["addresses"])}
            del addresses[self.task["rank"]]
            self.say({"tried": list(unreached(addresses).items())})
            self._receive()  # comes once all have tried: until then, others are on their way to us
        return told

    def _live(self) -> None:
        """Write heartbeats, and end this process when the engine's is gone, even if the main thread is stuck.

        While this process starts, the engine's process is told in which code the main thread is, at each change.
        """
        hang_up, place, late = select.poll(), "", self.late_work()
        hang_up.register(self.engine, _HANG_UP)
        try:
            while not hang_up.poll(int(BEAT_S * 1000)) and not self.ended.is_set():
                self.heartbeat.beat()
                self.publish()
                if not self.started.is_set() and (now := _place()) != place:
                    place = now
                    self.say({"place": place})
                if self.answers is not None and (work := dict(self.late_work())) != late:
                    late = work
                    self.say({"late_work": late})
        except OSError:
            pass  # the engine's process is gone
        if not self.ended.is_set():
            os._exit(1)

    def _carry_out(self, server: StepServer, message: IntArray) -> LostStep | None:
        """Carry out a message; returns the error of a failed step if this rank can go on."""
        import torch

        fault: LostStep | None = None
        try:
            with torch.inference_mode():
                server.carry_out(message)
        except RequestFault as error:  # the engine goes on if every rank found the same
            fault = error
            show_traceback(error)
            self.say({"fault": one_line(error), "step": self.heartbeat.num_steps + 1})
        except LostStep as error:
            if error.ends_engine or self.task["size"] > 1:  # the others compute the step to its end
                raise
            fault = error
            show_traceback(error)
        self.heartbeat.end_step(failed=isinstance(fault, RequestFault))
        if message[0] != LATE_ROWS:
            self._is_agreed_on = is_agreed_on(message)
        if self._is_agreed_on:
            self.publish()
        return fault

    def _receive(self) -> IntArray:
        """Wait for the next message; ends this process if the engine's is gone."""
        try:
            return receive_frame(self.engine)
        except OSError:
            os._exit(1)

    def report(self, error: BaseException) -> None:
        """Tell the engine's process why this process ends."""
        if not isinstance(error, HooklineError):
            sys.excepthook(type(error), error, error.__traceback__)  # a bug of ours
        else:
            show_traceback(error)
        try:
            self.say({"error": one_line(error), "is_echo": isinstance(error, RankError)})
        except OSError:
            pass  # the engine's process is gone, too


class _Told(logging.Handler):
    """Sends log records as messages."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record, unless the engine's process is gone."""
        with suppress(OSError):
            self._say({"log": record.levelno, "text": record.getMessage()})


def log_to(say: Callable[[dict[str, Any]], None], level: int) -> None:
    """Send log records of this level and above to the engine's process, which logs them, instead of logging here."""
    logger = logging.getLogger("hookline")
    logger.setLevel(level)
    logger.propagate = False
    logger.handlers[:] = [_Told(say)]


def run_rank(fds: list[int], build: Build) -> NoReturn:
    """Be one rank over inherited sockets: for messages, and on rank 0 another for its answers. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; the parent handles it
    engine, *answers = (socket.socket(fileno=fd) for fd in fds)
    is_sound = serve_rank(engine, answers[0] if answers else None, build)
    # No destructors: collectives' destructors wait for ranks that may have ended already.
    sys.stderr.flush()
    os._exit(0 if is_sound else 1)


def serve_rank(engine: socket.socket, answers: socket.socket | None, build: Build) -> bool:
    """Be one rank over these sockets until the engine's process ends it; returns whether it ended without an error."""
    try:
        rank = RankProcess(engine, answers, JsonLines(engine).wait()[0])
    except ConnectionError:
        return False
    try:
        rank.run(build)
    except BaseException as error:
        rank.report(error)
        return False
    return True


def _place() -> str:
    """Where the main thread is: file, line and function of its innermost frame that is not Python's import system."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if frame is None else [one for one, _ in traceback.walk_stack(frame)]
    others = [one for one in frames if not one.f_code.co_filename.startswith("<")]
    return (
        "" if not others else f"at {others[0].f_code.co_filename}:{others[0].f_lineno}, in {others[0].f_code.co_name}"
    )
