"""Who connects is known by the secret, and ranks of several nodes try each other's addresses; threads play them."""

import socket
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from hookline.core.contracts import RankStart
from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS
from hookline.core.errors import RankError
from hookline.core.executor import connections, rank_loop
from hookline.core.executor.connections import (
    ANSWERS,
    HELLO,
    MESSAGES,
    OPEN_PORTS,
    accept_all,
    connect_back,
    greeting,
    listening,
    unreached,
)
from hookline.core.executor.links import RankLinks
from hookline.core.executor.monitor import Timeouts
from hookline.core.executor.peer import Peer
from hookline.core.executor.placed import PlacedLinks
from hookline.core.executor.rank_loop import RankProcess

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
    monkeypatch.setattr(connections, "TRY_S", 0.05)
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
        links = object.__new__(PlacedLinks)
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


SECRET = "5" * 64


def start(host, port, rank):
    return RankStart(rank, host, port, SECRET, "module:function")


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_every_connection_of_a_rank_is_told_apart(server):
    host, port = server.getsockname()
    keys = {(0, MESSAGES), (0, ANSWERS), (1, MESSAGES)}
    made = [connect_back(start(host, port, rank), which) for rank, which in sorted(keys, reverse=True)]
    found = accept_all(server, SECRET, keys, 10.0, lambda: None)
    for key, ours in zip(sorted(keys, reverse=True), made, strict=True):
        ours.sendall(b"%d %d" % key)
        assert found[key].recv(10) == b"%d %d" % key
    for one in (*made, *found.values()):
        one.close()


def test_who_does_not_know_the_secret_is_turned_away_and_holds_up_nobody(server, monkeypatch):
    monkeypatch.setattr(connections, "HELLO_S", 0.1)
    host, port = server.getsockname()
    strangers = [socket.create_connection((host, port)) for _ in range(3)]
    strangers[0].sendall(HELLO.pack(b"6" * 64, 0, MESSAGES))
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    ours = connect_back(start(host, port, 0), MESSAGES)
    found = accept_all(server, SECRET, {(0, MESSAGES)}, 10.0, lambda: None)
    found[0, MESSAGES].sendall(b"hello")
    assert ours.recv(5) == b"hello"
    for one in (*strangers, ours, *found.values()):
        one.close()


def test_an_engine_that_a_rank_cannot_reach_is_told_with_its_address_and_the_fix(server):
    host, port = server.getsockname()
    server.close()
    with pytest.raises(RankError) as found:
        connect_back(start(host, port, 1), MESSAGES)
    text = f"it cannot reach the engine at {host}:{port} ([Errno 111] Connection refused); open the ports of "
    assert str(found.value) == text + "net.ipv4.ip_local_port_range between the nodes"


def test_a_stranger_who_spells_slowly_has_no_more_time_than_others(monkeypatch):
    """Each of its bytes comes before anybody would stop waiting for the next one."""
    now = [0.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Stranger:
        def settimeout(self, seconds):
            assert seconds is not None and 0 < seconds <= connections.HELLO_S

        def recv(self, size):
            now[0] += 0.9 * connections.HELLO_S
            return b"x"

    assert greeting(Stranger(), SECRET) is None
    assert now[0] <= 2 * connections.HELLO_S


def test_ranks_that_do_not_come_are_named(server):
    with pytest.raises(RankError, match=r"rank 0 and rank 2 did not connect within 0 s \(engine.start_timeout_s\)"):
        accept_all(server, SECRET, {(0, MESSAGES), (0, ANSWERS), (2, MESSAGES)}, 0.0, lambda: None)


def test_an_actor_that_is_lost_meanwhile_ends_the_wait(server):
    def check():
        raise RankError("rank 1 of 2 is gone")

    with pytest.raises(RankError, match="rank 1 of 2 is gone"):
        accept_all(server, SECRET, {(0, MESSAGES)}, 10.0, check)
