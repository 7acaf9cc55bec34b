"""A process of the server and its supervisor, each as the other sees it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from hookline.core.executor.messages import send_message
from hookline.core.serve.processes.parent import Parent


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def parent_with(supervisor: int) -> Parent:
    """What a child that has just started makes of its task."""
    ours, theirs = socket.socketpair()
    with ours:
        send_message(ours, {"supervisor": supervisor})
        return Parent(theirs.detach())


def test_a_supervisor_that_died_while_its_child_started_is_gone() -> None:
    dead = parent_with(os.getpid())  # anybody but the process that is our parent now
    alive = parent_with(os.getppid())
    assert dead.is_gone and not alive.is_gone
    for one in (dead, alive):
        one.connection.close()
