"""The broadcast ring: every reader gets every message whole and in order, whatever their lengths and the timing."""

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS, Heartbeat
from hookline.core.executor.ring import RingReader, RingWriter, ring_words
from hookline.core.executor.shared_memory import SharedWords


class GivesUp(Exception):
    pass


def give_up():
    raise GivesUp


def yield_to_others():
    time.sleep(0.0001)


def ring(num_readers, capacity):
    words = np.zeros(ring_words(num_readers, capacity), dtype=np.int64)
    return RingWriter(words, num_readers), [RingReader(words, num_readers, index) for index in range(num_readers)]


def message(number, length):
    return np.arange(length, dtype=np.int64) * 7 + number


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    num_readers=st.integers(1, 4),
    capacity=st.integers(1, 16),
)
def test_every_reader_gets_every_message_even_one_longer_than_the_ring(lengths, num_readers, capacity):
    writer, readers = ring(num_readers, capacity)
    got = [[] for _ in readers]

    def read(index):
        got[index] = [readers[index].receive(yield_to_others).tolist() for _ in lengths]

    threads = [threading.Thread(target=read, args=(index,)) for index in range(num_readers)]
    for thread in threads:
        thread.start()
    for number, length in enumerate(lengths):
        writer.send(message(number, length), lambda: None, yield_to_others)
    for thread in threads:
        thread.join()
    assert got == [[message(number, length).tolist() for number, length in enumerate(lengths)]] * num_readers


def test_a_full_ring_makes_the_writer_wait_for_the_slowest_reader():
    writer, (quick, slow) = ring(2, 8)
    writer.send(message(0, 7), lambda: None, give_up)
    assert quick.receive(give_up).tolist() == message(0, 7).tolist()
    with pytest.raises(GivesUp):
        writer.send(message(1, 0), lambda: None, give_up)
    assert slow.receive(give_up).tolist() == message(0, 7).tolist()
    writer.send(message(2, 3), lambda: None, give_up)
    assert quick.receive(give_up).tolist() == slow.receive(give_up).tolist() == message(2, 3).tolist()


def test_readers_are_woken_for_each_piece_and_an_empty_ring_makes_them_wait():
    writer, (reader,) = ring(1, 4)
    woken = []
    taken = threading.Thread(target=lambda: reader.receive(yield_to_others))
    taken.start()
    writer.send(message(0, 10), lambda: woken.append(1), yield_to_others)
    taken.join()
    assert len(woken) >= 3  # eleven words through four
    with pytest.raises(GivesUp):
        reader.receive(give_up)


def test_shared_words_are_seen_through_another_attachment_and_have_no_name():
    before = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    memory = SharedWords.create(8)
    other = SharedWords(os.dup(memory.fd), 8)
    memory.words[3] = 42
    assert other.words.tolist() == [0, 0, 0, 42, 0, 0, 0, 0]
    assert (os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []) == before
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
