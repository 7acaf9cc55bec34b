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
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from hookline.core.distributed.heartbeat import BEAT_S, Heartbeat
from hookline.core.errors import HooklineError, RankError, RequestFault, show_traceback
from hookline.core.executor.messages import JsonLines, receive_frame, send_message
from hookline.core.executor.shared_memory import SharedWords
from hookline.core.step.message import Step, masks_in, unpack
from hookline.core.util.arrays import IntArray, MaskArray
from hookline.core.util.text import one_line


class RankWorker(Protocol):
    """What computes the steps of this rank."""

    def compute(self, step: Step) -> Any:
        """Start computing a step."""
        ...

    def mask_rows(self, num_rows: int) -> MaskArray:
        """Where the masks of the step computed last go."""
        ...

    def finish(self, num_rows: int) -> Any:
        """Draw from the step computed last, whose masks are there."""
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
    started = threading.Event()
    threading.Thread(target=_live, args=(parent, heartbeat, started), daemon=True).start()
    try:
        _serve(parent, task, heartbeat, build, started)
    except BaseException as error:
        _report(parent, error)
        os._exit(1)
    # No destructors: those of collectives wait for ranks that may have ended already.
    sys.stderr.flush()
    os._exit(0)


def _shared(task: Mapping[str, Any]) -> Any:
    return SharedWords(task["memory_fd"], task["num_words"]).words


def _live(parent: socket.socket, heartbeat: Heartbeat, started: threading.Event) -> None:
    """Beat, and end this process at once when the parent has gone, whatever the main thread is stuck in.

    While the process starts, the parent is told where the main thread is whenever that is another place.
    """
    hang_up, place = select.poll(), ""
    hang_up.register(parent, 0)
    while not hang_up.poll(int(BEAT_S * 1000)):
        heartbeat.beat()
        if not started.is_set() and (now := _place()) != place:
            place = now
            send_message(parent, {"place": place})
    os._exit(1)


def _place() -> str:
    """The innermost code of the main thread that is not Python's own, else the innermost."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if frame is None else [one for one, _ in traceback.walk_stack(frame)]
    others = [one for one in frames if not one.f_code.co_filename.startswith("<")]
    return (
        "" if not others else f"at {others[0].f_code.co_filename}:{others[0].f_lineno}, in {others[0].f_code.co_name}"
    )


def _serve(
    parent: socket.socket, task: Mapping[str, Any], heartbeat: Heartbeat, build: Build, started: threading.Event
) -> None:
    import torch

    torch.set_num_threads(task["num_threads"])

    def meet() -> None:
        send_message(parent, {"here": True})
        _receive(parent)

    worker = build(task, heartbeat, meet)
    started.set()
    send_message(parent, {"ready": True})
    _compute(worker, parent, heartbeat)
    worker.synchronize()


def _compute(worker: RankWorker, parent: socket.socket, heartbeat: Heartbeat) -> None:
    """Compute each step that comes, and draw by the masks that follow it; an empty message is the end."""
    import torch

    while len(message := _receive(parent)):
        fault: RequestFault | None = None
        try:
            with torch.inference_mode():
                _carry_out(worker, message)
        except RequestFault as error:  # the engine goes on if every rank found the same
            fault = error
            show_traceback(error)
            send_message(parent, {"fault": one_line(error), "step": heartbeat.num_steps + 1})
        heartbeat.end_step(failed=fault is not None)


def _carry_out(worker: RankWorker, message: IntArray) -> None:
    """Compute a step, or draw from the one before by the masks that have come."""
    masks_NW = masks_in(message)
    if masks_NW is None:
        worker.compute(unpack(message))
    else:
        worker.mask_rows(len(masks_NW))[:] = masks_NW
        worker.finish(len(masks_NW))


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
