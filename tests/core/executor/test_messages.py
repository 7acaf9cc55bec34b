"""Steps as frames over a socket: every child gets every message whole and in order, whatever their lengths."""

import os
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS, Heartbeat
from hookline.core.errors import RankError
from hookline.core.executor.links import RankLinks
from hookline.core.executor.messages import JsonLines, receive_frame
from hookline.core.executor.peer import Child
from hookline.core.util.shared_memory import SharedWords
from tests.fuzzing import examples


class Lost:
    """A monitor that finds a rank lost at its third look."""

    def __init__(self, num_looks=3):
        self.num_looks = num_looks

    def check(self):
        self.num_looks -= 1
        if not self.num_looks:
            raise RankError("rank 1 is lost")


@contextmanager
def links(num_children, monitor=None):
    """Links whose children are the other ends of sockets, in this process."""
    made = RankLinks.__new__(RankLinks)
    made.monitor = monitor or SimpleNamespace(check=lambda: None)
    made.children, ends = [], []
    for _ in range(num_children):
        child = Child.__new__(Child)
        child.connection, end = socket.socketpair()
        made.children.append(child)
        ends.append(end)
    try:
        yield made, ends
    finally:
        for one in (*ends, *(child.connection for child in made.children)):
            one.close()


def message(number, length):
    return np.arange(length, dtype=np.int64) * 7 + number


@settings(max_examples=examples(20), deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 40, 5000, 100_000]), min_size=1, max_size=6), num_children=st.integers(1, 4)
)
def test_every_child_gets_every_message_even_one_longer_than_a_socket_holds(lengths, num_children):
    with links(num_children) as (rank_links, ends):
        got = [[] for _ in ends]

        def read(index):
            got[index] = [receive_frame(ends[index]).tolist() for _ in lengths]

        threads = [threading.Thread(target=read, args=(index,)) for index in range(num_children)]
        for thread in threads:
            thread.start()
        for number, length in enumerate(lengths):
            rank_links.send(message(number, length))
        for thread in threads:
            thread.join()
        assert got == [[message(number, length).tolist() for number, length in enumerate(lengths)]] * num_children


def test_a_child_that_does_not_read_holds_up_nobody_once_a_rank_is_found_lost():
    with links(2, Lost()) as (rank_links, _), pytest.raises(RankError, match="rank 1 is lost"):
        rank_links.send(message(0, 1_000_000))


def test_a_child_that_does_not_read_is_killed_in_close(monkeypatch):
    monkeypatch.setattr("hookline.core.executor.links.CLOSE_S", 0.2)
    monitor = SimpleNamespace(check=lambda: None, failure=None, stop=lambda: None)
    with links(2, monitor) as (rank_links, (_, reads)):
        stuck, sound = rank_links.children
        while not len(stuck.send_some(memoryview(bytes(1 << 16)))):
            pass
        killed = []
        for child in rank_links.children:
            child.kill = lambda child=child: killed.append(child)
            child.wait = lambda patience_s, child=child: child is sound or child in killed
            child.close = lambda: None
        rank_links.close()
        assert killed == [stuck] and receive_frame(reads).tolist() == []


def test_a_child_that_is_gone_is_passed_over():
    with links(2) as (rank_links, (gone, here)):
        gone.close()
        rank_links.send(message(3, 5))
        assert receive_frame(here).tolist() == message(3, 5).tolist()


def test_a_closed_end_is_an_error_for_who_waits():
    with links(1) as (rank_links, (end,)):
        rank_links.children[0].connection.close()
        with pytest.raises(ConnectionError):
            receive_frame(end)


def test_shared_words_are_seen_through_another_attachment_and_have_no_name():
    memory = SharedWords.create(8)
    other = SharedWords(os.dup(memory.fd), 8)
    memory.words[3] = 42
    assert other.words.tolist() == [0, 0, 0, 42, 0, 0, 0, 0]
    if os.path.isdir("/proc/self/fd"):
        assert os.readlink(f"/proc/self/fd/{memory.fd}").endswith(" (deleted)")
    memory.close()
    memory.close()
    other.close()
    assert memory.words[3] == 42


def test_each_rank_has_signs_of_life_of_its_own():
    words = np.zeros(HEARTBEAT_WORDS * 2, dtype=np.int64)
    one, other = Heartbeat(words, 0), Heartbeat(words, 1)
    one.beat()
    other.advance()
    other.advance()
    assert (one.beats, one.progress, other.beats, other.progress) == (1, 0, 0, 2)


@pytest.mark.parametrize("error", [ConnectionResetError(), TimeoutError(110, "timed out"), OSError(113, "no route")])
def test_a_host_that_is_gone_ends_a_connection_as_a_process_that_ends_does(error):
    def recv(num_bytes):
        raise error

    lines = JsonLines(SimpleNamespace(recv=recv))
    assert lines.receive() is None
    with pytest.raises(ConnectionError):
        lines.wait()
