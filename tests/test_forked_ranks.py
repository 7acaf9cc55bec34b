"""A fork that is a rank is a process of its own: it has the environment of the moment, and its end is noticed."""

from __future__ import annotations

import os
import select
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from hookline import LLM, SamplingParams
from hookline.core.errors import RankError
from tests import forked_ranks
from tests.forked_ranks import Fork


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_a_fork_that_is_killed_is_named_by_its_engine_and_the_next_one_starts() -> None:
    one = SamplingParams(max_tokens=1)
    with LLM(tp=2, device="cpu") as llm:
        child = llm.engine.executor.links.children[0]  # type: ignore[attr-defined]
        assert llm.generate("a", one) and child.process.poll() is None and child.process.pid != os.getpid()
        os.kill(child.process.pid, signal.SIGKILL)
        with pytest.raises(RankError, match=rf"\(pid {child.process.pid}\) was killed by SIGKILL"):
            llm.generate("a", one)
    with LLM(tp=2, device="cpu") as llm:
        assert llm.generate("a", one)
        child = llm.engine.executor.links.children[0]  # type: ignore[attr-defined]
    assert child.process.poll() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_a_fork_has_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.odd_drafters")
    with LLM(tp=2, device="cpu", drafter="random") as llm:  # a rank without the same plugins is refused
        assert llm.generate("a", SamplingParams(max_tokens=1))


def test_two_threads_that_wait_for_a_fork_are_both_told_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2)

    def selected(*given: Any) -> Any:
        """As if both threads saw the end before either read it."""
        found = select.select(*given)
        both.wait(10)
        return found

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ThreadPoolExecutor(2) as threads:
        theirs.send(b"1")
        fork = Fork(["a rank"], ours)
        monkeypatch.setattr(forked_ranks, "select", SimpleNamespace(select=selected))
        waiting = [threads.submit(fork.wait, 10) for _ in range(2)]
        theirs.send(b"3")
        theirs.shutdown(socket.SHUT_WR)
        assert [one.result(10) for one in waiting] == [3, 3]
