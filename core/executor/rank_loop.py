"""What the process of a further rank does once it stands: beats, computes each step that comes, reports and ends."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable
from typing import Any

from hookline.core.distributed.heartbeat import BEAT_S, Pulse
from hookline.core.errors import HooklineError, RankError, show_traceback
from hookline.core.executor.messages import send_message
from hookline.core.executor.ring import RingReader, Wait
from hookline.core.executor.shared_memory import SharedWords
from hookline.core.step.message import unpack

_WAKE_UPS = 4096


def _shared(task: dict[str, Any]) -> Any:
    return SharedWords.attach(task["memory_fd"], task["num_words"]).words


def _live(parent: socket.socket, pulse: Pulse) -> None:
    """Beat, and end this process at once when the parent has gone, whatever the main thread is stuck in."""
    hang_up = select.poll()
    hang_up.register(parent, 0)
    while not hang_up.poll(int(BEAT_S * 1000)):
        pulse.beat()
    os._exit(1)


def _compute(worker: Any, reader: RingReader, wait: Wait, pulse: Pulse) -> None:
    """Compute each step that comes; an empty message is the end."""
    import torch

    while len(message := reader.receive(wait)):
        with torch.inference_mode():
            worker.compute(unpack(message))
        pulse.advance()


def _waiter(parent: socket.socket) -> Callable[[], None]:
    """Sleeps until the parent has sent something, or ends the process if it is gone."""

    def wait() -> None:
        try:
            woken = parent.recv(_WAKE_UPS)
        except ConnectionError:
            woken = b""
        if not woken:
            os._exit(1)

    return wait


def _report(parent: socket.socket, error: BaseException) -> None:
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    if not isinstance(error, HooklineError):
        sys.excepthook(type(error), error, error.__traceback__)  # a bug of ours
    else:
        show_traceback(error)
    try:
        send_message(parent, {"error": cause, "is_echo": isinstance(error, RankError)})
    except OSError:
        pass  # the parent is gone, and nobody is left to tell
