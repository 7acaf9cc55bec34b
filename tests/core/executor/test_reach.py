"""Ranks on several nodes try each other's addresses before they meet: threads play them here, on one machine."""

import socket
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest

from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS
from hookline.core.errors import RankError
from hookline.core.executor import rank_loop, reach
from hookline.core.executor.links import RankLinks
from hookline.core.executor.monitor import Timeouts
from hookline.core.executor.peer import Peer
from hookline.core.executor.rank_loop import RankProcess
from hookline.core.executor.ray_ranks import RayLinks
from hookline.core.executor.reach import OPEN_PORTS, listening, unreached

HOST = "127.0.0.1"


@pytest.fixture
def closed():
    """An address that refuses connections."""
    with socket.create_server((HOST, 0)) as server:
        address = server.getsockname()
    return address


def test_who_listens_is_reached_without_taking_connections_and_who_does_not_is_told(closed):
    with listening(HOST, 3) as server:
        address = server.getsockname()
        assert unreached({0: address, 1: closed, 2: address, 5: address}) == {1: "[Errno 111] Connection refused"}
    assert unreached({}) == {}


def test_an_address_from_which_nothing_comes_back_is_given_up(monkeypatch):
    monkeypatch.setattr(reach, "TRY_S", 0.05)
    with listening(HOST, 0) as server, socket.create_connection(server.getsockname()):  # full: further ones get nothing
        assert unreached({1: server.getsockname()}) == {1: "timed out"}


class Rank(Peer):
    """A thread of ours that meets the others as a rank's process does."""

    def __init__(self, rank, task):
        ours, theirs = socket.socketpair()
        super().__init__(rank, ours)
        self.process = RankProcess(theirs, None, {"rank": rank, "num_words": 16 * HEARTBEAT_WORDS, **task})
        self.met = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        said = {"host": HOST, "port": 7} if self.rank == 0 else {}
        with suppress(SystemExit):
            self.met = self.process._meet(said)

    def how_it_ended(self):
        return "ended"

    def kill(self):
        self.connection.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s):
        return True

    def __str__(self):
        return f"pid 7 on node 10.0.0.{self.rank + 1}"


@pytest.fixture
def make(monkeypatch):
    """Links with so many ranks; all are ended."""
    made = []
    monkeypatch.setattr(rank_loop.os, "_exit", lambda code: sys.exit(code))  # which ends a thread

    def make(size, *, tries_others=True):
        links = object.__new__(RayLinks)
        RankLinks.__init__(links, size, Timeouts(4.5, 4.5, 60.0), np.zeros(size * HEARTBEAT_WORDS, np.int64))
        links._tries_others = tries_others
        task = {"host": HOST, "size": size, "tries_others": tries_others}
        links.children += [Rank(rank, task) for rank in range(size)]
        made.append(links)
        links.monitor.start()
        for child in links.children:
            child.thread.start()
        return links

    yield make
    for links in made:
        links.monitor.stop()
        for child in links.children:
            child.kill()
            child.thread.join(60)
            child.close()
            child.process.engine.close()


def test_ranks_that_reach_each_other_meet_where_rank_0_says(make):
    links = make(3)
    links.meet({})
    for child in links.children:
        child.thread.join(60)
        assert (child.met["host"], child.met["port"]) == (HOST, 7)


def test_a_rank_listens_until_all_have_tried(make, monkeypatch):
    """The last one begins when the others have long been done."""
    others_done, lock, num_tried = threading.Event(), threading.Lock(), [0]

    def one_late(addresses):
        if 0 in addresses and 1 in addresses:  # rank 2
            assert others_done.wait(60)
            return unreached(addresses)
        found = unreached(addresses)
        with lock:
            num_tried[0] += 1
            if num_tried[0] == 2:
                others_done.set()
        return found

    monkeypatch.setattr(rank_loop, "unreached", one_late)
    make(3).meet({})


def test_ranks_that_do_not_reach_each_other_are_one_line_with_both_nodes_and_the_fix(make, monkeypatch):
    def blocked(addresses):
        return {rank: "timed out" for rank in addresses if rank == 1}

    monkeypatch.setattr(rank_loop, "unreached", blocked)
    links = make(3)
    with pytest.raises(RankError) as found:
        links.meet({})
    who = r"^rank 0 of 3 \(pid 7 on node 10\.0\.0\.1\), while starting, cannot reach"
    whom = r"rank 1 \(pid 7 on node 10\.0\.0\.2\) at 127\.0\.0\.1:\d+ \(timed out\)"
    assert found.match(rf"{who} {whom}, though both reach the engine; {OPEN_PORTS}$")


def test_ranks_of_one_node_try_nothing(make, monkeypatch):
    monkeypatch.setattr(rank_loop, "unreached", None)
    monkeypatch.setattr(rank_loop, "listening", None)
    links = make(2, tries_others=False)
    links.meet({})
    for child in links.children:
        child.thread.join(60)
        assert child.met == {"host": HOST, "port": 7}
