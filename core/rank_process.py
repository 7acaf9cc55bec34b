"""The process of one further rank: builds its plugin host and worker from plain data, then computes what it is sent.

Decides nothing and knows no requests. It ends when it is told to, when it fails, and when its parent is gone.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from core.errors import HooklineError, RankError, show_traceback
from core.pulse import BEAT_S, Pulse
from core.rank_messages import Line, send_message
from core.ring import RingReader, Wait
from core.shared_words import SharedWords
from core.step import unpack

_WAKE_UPS = 4096


def main(fd: int) -> NoReturn:
    """Run one rank over the inherited socket `fd`; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, and what it means is the parent's to say
    parent = socket.socket(fileno=fd)
    try:
        task = Line(parent).first()
    except ConnectionError:
        os._exit(1)
    pulse = Pulse(_shared(task), task["rank"])
    threading.Thread(target=_live, args=(parent, pulse), daemon=True).start()
    try:
        _serve(parent, task, pulse)
    except BaseException as error:
        _report(parent, error)
        os._exit(1)
    # No destructors: those of collectives wait for ranks that may have ended already.
    sys.stderr.flush()
    os._exit(0)


def _shared(task: dict[str, Any]) -> Any:
    return SharedWords.attach(task["memory_fd"], task["num_words"]).words


def _live(parent: socket.socket, pulse: Pulse) -> None:
    """Beat, and end this process at once when the parent has gone, whatever the main thread is stuck in."""
    hang_up = select.poll()
    hang_up.register(parent, 0)
    while not hang_up.poll(int(BEAT_S * 1000)):
        pulse.beat()
    os._exit(1)


def _serve(parent: socket.socket, task: dict[str, Any], pulse: Pulse) -> None:
    import torch

    from core.choose import choose
    from core.config import validate
    from core.plugin_blame import Blaming, chosen_entries
    from core.plugin_host import PluginHost
    from core.process_ranks import connect, join
    from core.processing import Processing
    from core.rank_worker import build_worker

    torch.set_num_threads(task["num_threads"])
    host = PluginHost.load()
    host.check_same(task["plugins"], f"rank {task['rank']}")
    config, wait = validate(task["config"], host), _waiter(parent)
    with Blaming(chosen_entries(config, host), "while starting"):
        choice = choose(config, host, task["rank"])
        send_message(parent, {"here": True})
        wait()  # until every rank is there
        ranks = connect(join(task["port"]), choice.ranks, choice.device, pulse)
        worker = build_worker(replace(choice, ranks=ranks), Processing.of(host.registry, choice.facts))
    reader = RingReader(_shared(task)[task["ring_start"] :], choice.ranks.size - 1, task["rank"] - 1)
    send_message(parent, {"ready": True})
    _compute(worker, reader, wait, pulse)
    if choice.device.type == "cuda":
        torch.cuda.synchronize(choice.device)


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
