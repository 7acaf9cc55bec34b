"""An executor over ranks that are all elsewhere: threads play them here, with workers that compute nothing."""

import logging
import queue
import signal
import socket
import threading
from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest

from hookline.core.distributed.heartbeat import HEARTBEAT_WORDS
from hookline.core.errors import RankError, RequestFault
from hookline.core.executor import monitor as monitors
from hookline.core.executor.links import RankLinks
from hookline.core.executor.messages import JsonLines, receive_frame, send_message
from hookline.core.executor.monitor import Timeouts
from hookline.core.executor.peer import Peer
from hookline.core.executor.rank_loop import log_to
from hookline.core.executor.remote import RemoteExecutor
from hookline.core.executor.step_server import StepServer
from hookline.core.step.executor import StepResult
from hookline.core.step.message import Step, is_agreed_on
from hookline.core.step.timing import DeviceTime
from hookline.core.util.arrays import ints

ROWS = 2


class FakeWorker:
    """Of one rank: a step's tokens are its decode rows plus 100, and come when `comes` says so."""

    def __init__(self):
        self.comes = threading.Event()
        self.comes.set()
        self.faults, self.launched, self.seen = deque(), queue.SimpleQueue(), queue.SimpleQueue()
        self.masks = np.zeros((ROWS, 2), np.int32)
        self.late_work = {"graph": 0}
        self.num_collected, self.is_timed = 0, False

    def launch(self, step):
        if self.faults and (fault := self.faults.popleft()) is not None:
            raise fault
        self.launched.put(step.decode_rows.tolist())
        return step.decode_rows + 100

    def has_arrived(self, handle):
        return self.comes.is_set()

    def collect(self, handle):
        self.num_collected += 1
        row = handle[0] - 100
        apart = {7: np.array([[0.5, float(handle[0])]], np.float32), 8: np.full((1, 2), 0.25, np.float32)}
        apart = {f"of {one}": values for one, values in apart.items() if one == row}
        return StepResult(handle, {"sums": np.array([row])} if row == 9 else {}, apart)

    def late_rows(self, num_rows):
        return self.masks[:num_rows]

    def release(self, handle, num_rows):
        self.seen.put(self.masks[:num_rows].tolist())
        handle += 1000

    def time_steps(self):
        class Clock:
            def read(self):
                return DeviceTime(0.5, 0.25, on_host=True)

        assert self.launched.empty()
        self.is_timed = True
        return Clock()


class Rank(Peer):
    """A rank that is a thread of ours."""

    def __init__(self, rank, heartbeat):
        pairs = [socket.socketpair() for _ in range(1 + (rank == 0))]
        super().__init__(rank, *(ours for ours, _ in pairs))
        self.theirs = [one for _, one in pairs]
        self.heartbeat, self.worker = heartbeat, FakeWorker()
        self.dies_at = None
        """The message at which it dies: before, or after it was computed."""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        engine = self.theirs[0]
        try:
            JsonLines(engine).wait()
            send_message(engine, {"ready": {}})
            server = StepServer(self.worker, engine, self.theirs[1] if self.rank == 0 else None)
            while len(message := server.next_message(lambda: receive_frame(engine))):
                self._die_if(("before", self.heartbeat.num_steps + 1))
                error = self._compute(server, message)
                self.heartbeat.end_step(failed=error is not None)
                self._die_if(("within", self.heartbeat.num_steps))
                server.answer(error)
        except (OSError, EOFError):
            pass
        finally:
            self._hang_up()

    def _hang_up(self):
        for one in self.theirs:
            one.close()

    def _die_if(self, moment):
        if self.dies_at == moment:
            raise EOFError

    def _compute(self, server, message):
        try:
            server.carry_out(message)
        except RequestFault as error:
            send_message(self.theirs[0], {"fault": str(error), "step": self.heartbeat.num_steps + 1})
            return error
        assert is_agreed_on(message) in (True, False)
        return None

    def how_it_ended(self):
        return "was killed by SIGKILL"

    def kill(self):
        for one in (self.connection, self.answers):
            if one is not None:
                one.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s):
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def __str__(self):
        return "a thread"


class Group:
    def __init__(self, size):
        words = np.zeros(HEARTBEAT_WORDS * size, np.int64)
        self.links = RankLinks(size, Timeouts(1e9, 5.0, 60.0), words)
        heartbeats = self.links.monitor.heartbeats
        self.ranks = [Rank(rank, heartbeat) for rank, heartbeat in enumerate(heartbeats)]
        self.worker = self.ranks[0].worker
        self.links.children += self.ranks
        for rank in self.ranks:
            rank.tell({})
        self.links.monitor.start()
        self.links.monitor.wait_until_all("ready")
        self.executor = RemoteExecutor(self.links, 17, 2)


@pytest.fixture(params=[1, 2])
def group(request):
    yield from _group(request.param)


@pytest.fixture
def pair():
    yield from _group(2)


def _group(size):
    made = Group(size)
    yield made
    made.executor.close()
    assert all(not rank.thread.is_alive() for rank in made.ranks)


@contextmanager
def heard_by(monitor):
    """What ranks say inside is taken by the thread that watches them, however late it runs."""
    taken, really = threading.Event(), monitor._hear

    def hear(child):
        goes_on = really(child)
        taken.set()
        return goes_on

    monitor._hear = hear
    yield
    assert taken.wait(60)


def step(*rows, **sections):
    return Step(decode_rows=ints(rows), **sections)


def test_steps_come_back_in_their_order_and_the_next_is_launched_before_the_last_has_come(group):
    group.worker.comes.clear()
    first = group.executor.launch(step(1, 2))
    second = group.executor.launch(step(3))
    assert [group.worker.launched.get(timeout=10) for _ in range(2)] == [[1, 2], [3]]
    group.worker.comes.set()
    assert group.executor.collect(first).tokens.tolist() == [101, 102]
    assert group.executor.collect(second).tokens.tolist() == [103]
    assert group.executor.num_blocks == 17


def test_masks_reach_the_ranks_and_the_tokens_that_waited_for_them_come(group):
    handle = group.executor.launch(step(1, 2, late_draws=ints([0, 1])))
    group.executor.late_rows(ROWS)[:] = [[1, -2], [3, 4]]
    group.executor.release(handle, ROWS)
    assert group.executor.collect(handle).tokens.tolist() == [1101, 1102]
    assert all(rank.worker.seen.get(timeout=10) == [[1, -2], [3, 4]] for rank in group.ranks)


def test_only_rank_0_collects_results_and_times_its_steps(group):
    group.executor.time_steps()
    group.executor.collect(group.executor.launch(step(1)))
    group.executor.collect(group.executor.launch(step(2)))
    group.executor.close()
    asked = [(rank.worker.num_collected, rank.worker.is_timed) for rank in group.ranks]
    assert asked == [(2, True), *[(0, False)] * (len(group.ranks) - 1)]
    assert all(rank.worker.launched.qsize() == 2 for rank in group.ranks)


def test_a_step_that_never_gets_its_masks_is_dropped_by_the_next(group):
    group.executor.launch(step(1, late_draws=ints([0])))
    handle = group.executor.launch(step(5))
    assert group.executor.collect(handle).tokens.tolist() == [105]


def test_vectors_states_and_extras_come_with_the_tokens(group):
    pooled, tapped, extended = (group.executor.collect(group.executor.launch(step(row))) for row in (7, 8, 9))
    assert {name: one.tolist() for name, one in pooled.apart.items()} == {"of 7": [[0.5, 107.0]]} and not pooled.extras
    assert {name: one.tolist() for name, one in tapped.apart.items()} == {"of 8": [[0.25, 0.25]]}
    assert {name: one.tolist() for name, one in extended.extras.items()} == {"sums": [9]} and not extended.apart


def test_times_of_the_device_come_once_they_were_asked_for(group):
    clock = group.executor.time_steps()
    assert clock.read() is None
    group.executor.collect(group.executor.launch(step(1)))
    assert clock.read() == DeviceTime(0.5, 0.25, on_host=True) and clock.read() is None


def test_a_fault_on_every_rank_ends_its_requests_alone_and_the_next_step_is_computed(group):
    def fault():
        return RequestFault("processor 'x' fails", rows=[1], extensions=2)

    for rank in group.ranks:
        rank.worker.faults.append(fault())
    with pytest.raises(RequestFault, match="processor 'x' fails") as found:
        group.executor.launch(step(1, extensions=2))
    assert found.value.rows == {1} and found.value.extensions == 2
    handle = group.executor.launch(step(2, extensions=2))
    assert group.executor.collect(handle).tokens.tolist() == [102]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_fault_of_one_rank_alone_ends_the_engine_and_names_it(pair, alone):
    fault = RequestFault("processor 'x' fails", rows=[1], extensions=2)
    pair.ranks[alone].worker.faults.append(fault)
    with pytest.raises(RankError, match=rf"rank {alone} of 2 \(a thread\) alone failed in a step: .*processor 'x'"):
        pair.executor.collect(pair.executor.launch(step(1, extensions=2)))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", [("before", 2), ("within", 2)])
def test_a_rank_that_dies_around_a_step_is_named_to_who_waits_for_it(pair, rank, moment, monkeypatch):
    monkeypatch.setattr(monitors, "GRACE_S", 0.0)
    pair.ranks[rank].dies_at = moment
    pair.executor.collect(pair.executor.launch(step(1)))
    with pytest.raises(RankError, match=rf"rank {rank} of 2 \(a thread\) was killed by SIGKILL"):
        while True:  # rank 0 computes on while it has not heard of it
            pair.executor.collect(pair.executor.launch(step(2)))


def test_a_rank_that_dies_while_nothing_is_asked_is_named_at_the_next_step(pair):
    pair.ranks[1].theirs[0].shutdown(socket.SHUT_RDWR)
    pair.links.monitor._thread.join()
    with pytest.raises(RankError, match=r"rank 1 of 2 \(a thread\) was killed"):
        pair.executor.launch(step(1))


def test_answers_to_a_step_whose_caller_was_interrupted_confuse_nobody(group):
    group.worker.comes.clear()
    handle = group.executor.launch(step(1))
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            group.executor.collect(handle)
    finally:
        signal.signal(signal.SIGALRM, before)
    group.worker.comes.set()
    assert group.executor.collect(group.executor.launch(step(2))).tokens.tolist() == [102]
    assert group.executor._results == {}


def test_what_rank_0_logs_is_logged_here(pair, caplog, monkeypatch):
    logger, told = logging.getLogger("hookline"), []
    level, propagate = logger.level, logger.propagate
    monkeypatch.setattr(logger, "handlers", [])
    try:
        log_to(told.append, logging.INFO)
        logger.info("captured %d graphs", 3)
        logger.debug("not this")
    finally:
        monkeypatch.undo()
        logger.setLevel(level)
        logger.propagate = propagate
    assert told == [{"log": logging.INFO, "text": "captured 3 graphs"}]
    caplog.set_level(logging.INFO, "hookline")
    with heard_by(pair.links.monitor):
        send_message(pair.ranks[0].theirs[0], told[0])
    assert "captured 3 graphs" in caplog.messages


def test_what_rank_0_says_of_late_work_is_the_executor_s(group):
    with heard_by(group.links.monitor):
        send_message(group.ranks[0].theirs[0], {"late_work": {"graph": 3}})
    assert group.executor.late_work == {"graph": 3}


def test_each_engine_has_a_secret_of_its_own_that_nobody_guesses():
    made = [RankLinks(1, Timeouts(1, 1, 1), ints([0] * HEARTBEAT_WORDS)) for _ in range(3)]
    found = {links.membership(0)["secret"] for links in made}
    assert len(found) == 3 and all(len(set(secret)) > 4 and len(secret) == 32 for secret in found)
