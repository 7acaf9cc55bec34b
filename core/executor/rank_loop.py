"""What the process of a further rank does: beats, has its worker built, computes each step that comes, and ends.

Decides nothing and knows no requests. It ends when it is told to, when it fails, and when its parent is gone.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from hookline.core.distributed.heartbeat import BEAT_S, Heartbeat
from hookline.core.errors import HooklineError, RankError, show_traceback
from hookline.core.executor.messages import JsonLines, receive_frame, send_message
from hookline.core.executor.shared_memory import SharedWords
from hookline.core.step.message import Step, unpack
from hookline.core.util.arrays import IntArray
from hookline.core.util.text import one_line


class RankWorker(Protocol):
    """What computes the steps of this rank."""

    def compute(self, step: Step) -> Any:
        """Start computing a step."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        ...


Build = Callable[[Mapping[str, Any], Heartbeat, Callable[[], None]], RankWorker]
"""build(task, heartbeat, meet) -> worker; `meet` waits for the other ranks, and comes before the first collective."""


def run_rank(fd: int, build: Build) -> NoReturn:
    """Be one rank over the inherited socket `fd`; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, and what it means is the parent's to say
    parent = socket.socket(fileno=fd)
    try:
        task = JsonLines(parent).first()
    except ConnectionError:
        os._exit(1)
    heartbeat = Heartbeat(_shared(task), task["rank"])
    threading.Thread(target=_live, args=(parent, heartbeat), daemon=True).start()
    try:
        _serve(parent, task, heartbeat, build)
    except BaseException as error:
        _report(parent, error)
        os._exit(1)
    # No destructors: those of collectives wait for ranks that may have ended already.
    sys.stderr.flush()
    os._exit(0)


def _shared(task: Mapping[str, Any]) -> Any:
    return SharedWords(task["memory_fd"], task["num_words"]).words


def _live(parent: socket.socket, heartbeat: Heartbeat) -> None:
    """Beat, and end this process at once when the parent has gone, whatever the main thread is stuck in."""
    hang_up = select.poll()
    hang_up.register(parent, 0)
    while not hang_up.poll(int(BEAT_S * 1000)):
        heartbeat.beat()
    os._exit(1)


def _serve(parent: socket.socket, task: Mapping[str, Any], heartbeat: Heartbeat, build: Build) -> None:
    import torch

    torch.set_num_threads(task["num_threads"])

    def meet() -> None:
        send_message(parent, {"here": True})
        _receive(parent)

    worker = build(task, heartbeat, meet)
    send_message(parent, {"ready": True})
    _compute(worker, parent, heartbeat)
    worker.synchronize()


def _compute(worker: RankWorker, parent: socket.socket, heartbeat: Heartbeat) -> None:
    """Compute each step that comes; an empty message is the end."""
    import torch

    while len(message := _receive(parent)):
        with torch.inference_mode():
            worker.compute(unpack(message))
        heartbeat.advance()


def _receive(parent: socket.socket) -> IntArray:
    """The next message; ends the process if the parent is gone."""
    try:
        return receive_frame(parent)
    except ConnectionError:
        os._exit(1)


def _report(parent: socket.socket, error: BaseException) -> None:
    if not isinstance(error, HooklineError):
        sys.excepthook(type(error), error, error.__traceback__)  # a bug of ours
    else:
        show_traceback(error)
    try:
        send_message(parent, {"error": one_line(error), "is_echo": isinstance(error, RankError)})
    except OSError:
        pass  # the parent is gone, and nobody is left to tell
