"""What the monitor takes for stuck, and what for slow: judged by hand, tick by tick, without processes."""

import os
import signal
import socket
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from hookline.core.config.settings import EngineConfig
from hookline.core.distributed.heartbeat import BEAT_S, HEARTBEAT_WORDS, Heartbeat
from hookline.core.errors import RankError
from hookline.core.executor import monitor as monitor_module
from hookline.core.executor.monitor import COMPILE_S, Monitor, Timeouts
from hookline.core.executor.peer import Child

TICK_S = 0.5
COMPILES = 3
"""The word of a heartbeat that says so."""


class FakeChild:
    def __init__(self, rank):
        self.rank, self.is_stopped, self.is_killed, self.is_gone = rank, False, False, False

    def kill(self):
        self.is_killed = True

    def wait(self, timeout_s):
        self.is_gone = self.is_killed
        return self.is_gone

    def __str__(self):
        return "a fake"


class Group:
    """Ranks whose heartbeats a test moves, inside of a step."""

    def __init__(self, size=3, all_s=60.0):
        self.words = np.zeros(size * HEARTBEAT_WORDS, dtype=np.int64)
        self.heartbeats = [Heartbeat(self.words, rank) for rank in range(size)]
        self.children = [FakeChild(rank) for rank in range(1, size)]
        self.monitor = Monitor(self.children, self.heartbeats, Timeouts(1e9, 5.0, all_s))
        self.monitor._started = True

    def reach(self, *ranks):
        for rank in ranks:
            self.heartbeats[rank].reach_collective()

    def compile(self, rank, *, is_compiling):
        self.words[rank * HEARTBEAT_WORDS + COMPILES] = is_compiling

    def pass_time(self, seconds):
        """Seconds until the group ended, at most these."""
        for tick in range(int(seconds / TICK_S)):
            self.monitor._judge(TICK_S)
            if self.monitor.failure is not None:
                return (tick + 1) * TICK_S
        return None


@pytest.fixture
def group():
    group = Group()
    with group.monitor.in_step():
        group.reach(0, 1, 2)
        yield group


def test_whoever_is_waited_for_too_long_is_named_and_all_are_ended(group):
    group.pass_time(2.0)
    group.reach(0, 2)
    assert 5.0 < group.pass_time(60) <= 8.0
    assert "rank 1 of 3 (a fake) got no further in a step for" in group.monitor.failure
    assert "rank 0" not in group.monitor.failure and "rank 2" not in group.monitor.failure
    assert all(child.is_killed for child in group.children)


def test_a_late_rank_gets_as_long_as_the_others_took_and_the_limit_on_top(group):
    group.pass_time(20.0)
    group.reach(0)
    assert group.pass_time(3.0) is None
    group.reach(2)
    assert group.pass_time(24.0) is None, "slow like the others"
    group.reach(1)
    assert group.pass_time(0.5) is None
    group.reach(0, 2)
    assert 5.0 < group.pass_time(60) <= 7.0, "the long stretch is over"


def test_of_stages_with_unlike_counts_the_one_that_does_not_wait_is_named(group):
    group.reach(1, 1, 1)  # the middle stage is late, and yet ahead in what it counts
    with group.heartbeats[0].waiting(), group.heartbeats[2].waiting():
        assert group.pass_time(20) is not None
    assert group.monitor.failure.startswith("rank 1 of 3 (a fake) got no further")
    assert group.heartbeats[0].progress < group.heartbeats[1].progress, "the wait is over"


def test_ranks_none_of_which_is_ahead_get_the_long_limit(group):
    assert group.pass_time(59.0) is None
    assert group.pass_time(5.0) is not None
    assert "rank 0 of 3 (this process) and rank 1 of 3 (a fake) and rank 2" in group.monitor.failure


def test_compiling_does_not_count_but_not_for_ever(group):
    group.pass_time(1.0)
    group.reach(0, 2)
    group.compile(1, is_compiling=True)
    assert group.pass_time(8.0) is None
    group.compile(1, is_compiling=False)
    assert group.pass_time(4.0) is None
    group.reach(1)
    assert group.pass_time(1.0) is None
    group.compile(2, is_compiling=True)
    group.reach(0, 1)
    assert COMPILE_S < group.pass_time(2 * COMPILE_S) < COMPILE_S + 10


def test_outside_of_a_step_and_while_starting_nobody_has_to_get_further():
    group = Group()
    group.reach(0)
    assert group.pass_time(100) is None
    group.monitor._started = False
    with group.monitor.in_step():
        assert group.pass_time(100) is None


def test_a_device_that_gets_further_counts_and_one_that_does_not_is_behind():
    class Marks:
        reached = 0

        def mark(self):
            pass

        def num_reached(self):
            return self.reached

    group = Group(2, all_s=5.0)
    marks = [Marks(), Marks()]
    for heartbeat, mark in zip(group.heartbeats, marks, strict=True):
        heartbeat.follow(mark)
    with group.monitor.in_step():
        for _ in range(6):
            for rank in (0, 1):
                marks[rank].reached += 1
                group.heartbeats[rank].beat()
            assert group.pass_time(4.0) is None, "the host has nothing to say, the device computes"
        marks[0].reached += 1
        assert group.pass_time(60) <= 10.0
        assert "rank 1 of 2" in group.monitor.failure and "rank 0" not in group.monitor.failure


def test_rank_0_is_broken_off_where_it_is_stuck_and_its_caller_logs_why(caplog):
    group, calls = Group(2), []
    group.monitor.interrupter.break_off = lambda: calls.append("rank 0")
    with group.monitor.in_step():
        group.reach(1)
        group.pass_time(60)
    assert len(calls) == 1 and "rank 0 of 2 (this process) got no further" in caplog.text


def test_rank_0_is_left_alone_while_it_waits_for_another():
    group, calls = Group(2), []
    group.monitor.interrupter.break_off = lambda: calls.append("rank 0")
    with group.monitor.in_step():
        group.reach(0)
        group.pass_time(60)
    assert group.monitor.failure is not None and calls == []


def test_rank_0_is_broken_off_before_its_device_is_freed_which_may_fail(caplog):
    group, calls = Group(2), []
    group.monitor.interrupter.break_off = lambda: calls.append("broken off")

    def release():
        calls.append("freed")
        raise RuntimeError("no such device")

    group.monitor.release = release
    with group.monitor.in_step():
        group.reach(1)
        group.pass_time(60)
    assert calls == ["broken off", "freed", "freed"] and "no such device" in caplog.text


def test_no_step_begins_once_the_group_has_ended(group):
    group.monitor.fail("rank 1 is gone")
    with pytest.raises(RankError, match="rank 1 is gone"), group.monitor.in_step():
        raise AssertionError
    assert not group.monitor._in_step


def test_rank_0_is_let_go_at_once_and_again_when_no_other_can_undo_it(group):
    """A killed rank's GPU goes on for a moment, and writes over what lets rank 0 go."""
    were_gone = []
    group.monitor.release = lambda: were_gone.append([child.is_gone for child in group.children])
    group.monitor.fail("some cause")
    assert were_gone == [[False, False], [True, True]]


@pytest.fixture
def ended(monkeypatch):
    """A group that has ended, whose thread's waits take no time but on its own clock; how often rank 0 was let go."""
    group, clock = Group(), [0.0]
    group.releases, group.calls = [], []

    def wait(seconds):
        clock[0] += seconds
        return False

    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    group.monitor._stopped = SimpleNamespace(wait=wait, is_set=lambda: False)
    group.monitor.timeouts = Timeouts(1e9, 5.0, 60.0)
    group.monitor.failure = "rank 1 is gone"
    group.monitor.release = lambda: group.releases.append(clock[0])
    group.monitor.interrupter.break_off = lambda: group.calls.append(("broken off", round(clock[0])))
    group.monitor.tell_if_stuck = lambda error: group.calls.append(("told", round(clock[0])))
    return group


def test_rank_0_is_let_go_until_it_is_out_of_its_step(ended, caplog):
    """A single time might not do, as where a signal of a lost rank comes late."""

    def release():
        ended.releases.append(1)
        ended.monitor._in_step = len(ended.releases) < 30

    ended.monitor.release, ended.monitor._in_step = release, True
    ended.monitor._see_rank_0_out()
    assert len(ended.releases) == 30 and not ended.calls and not caplog.text


def test_a_rank_0_that_never_leaves_its_step_is_told_of_and_given_up(ended, caplog):
    ended.monitor._in_step = True
    ended.monitor._see_rank_0_out()
    assert ended.calls == [("broken off", 5), ("told", 6)] and "rank 1 is gone" in caplog.text
    assert ended.releases[-1] == pytest.approx(5.5 + monitor_module.RELEASING_S, abs=0.5)
    assert len(ended.releases) == pytest.approx(655, abs=5)


def test_rank_0_is_let_go_while_it_starts_but_not_interrupted(ended, caplog):
    with ended.monitor.starting():
        ended.monitor._see_rank_0_out()
    assert len(ended.releases) > 600 and not ended.calls and not caplog.text
    ended.releases.clear()
    ended.monitor._see_rank_0_out()
    assert not ended.releases, "it is neither in a step nor does it start"


NAMED_S = 5.0
"""Within which callers are told of a dead or hung rank, by the defaults."""


def ticks_until_named(group, act):
    """Seconds by the monitor's own ticks until it names a rank, at most 20; act(seconds) comes before each look."""
    defaults, seconds = EngineConfig(), 0.0
    group.monitor.timeouts = Timeouts(defaults.rank_timeout_s, defaults.step_timeout_s, 60.0)
    while group.monitor.failure is None and seconds < 20:
        act(seconds)
        group.monitor._judge(monitor_module.TICK_S)
        seconds += monitor_module.TICK_S
    return seconds


def test_by_the_defaults_a_rank_that_falls_silent_is_named_within_five_seconds_with_time_to_spare():
    group = Group()
    group.heartbeats[1].beat()  # right before it is cut off
    told_s = ticks_until_named(group, lambda seconds: group.heartbeats[2].beat())
    assert group.monitor.failure.startswith("rank 1 of 3 (a fake) has given no sign of life for 4.5 s (engine.rank_tim")
    assert told_s <= NAMED_S - 0.2


def test_by_the_defaults_a_rank_that_hangs_in_a_step_is_named_within_five_seconds(group):
    def act(seconds):
        for heartbeat in group.heartbeats:
            heartbeat.beat()
        if seconds >= BEAT_S > seconds - monitor_module.TICK_S:  # by then all have told where they are
            group.reach(0, 2)

    assert ticks_until_named(group, act) < NAMED_S
    assert group.monitor.failure.startswith("rank 1 of 3 (a fake) got no further in a step for 4.")


def test_by_the_defaults_a_rank_whose_threads_are_held_up_for_four_seconds_goes_on(group):
    def act(seconds):
        group.heartbeats[2].beat()
        if seconds == 0.0 or seconds > 4.0 + BEAT_S:
            group.heartbeats[1].beat()
            group.reach(0, 1, 2)

    assert ticks_until_named(group, act) >= 20


def test_a_second_between_two_looks_counts_on_a_busy_machine_and_a_minute_does_not_on_one_that_slept(monkeypatch):
    group, counted = Group(size=1), []
    group.monitor.timeouts = Timeouts(4.5, 4.5, 60.0)

    def judge(passed_s):
        counted.append(passed_s)
        if len(counted) == 3:
            group.monitor.failure = "enough"

    group.monitor._judge = judge
    looks = SimpleNamespace(poll=lambda milliseconds: [])
    monkeypatch.setattr(monitor_module, "select", SimpleNamespace(poll=lambda: looks))
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=iter([0.0, 0.1, 1.1, 61.1]).__next__))
    group.monitor._judge_until_the_end()
    assert counted == pytest.approx([0.1, 1.0, 4.5 / 4])


@pytest.mark.parametrize(("is_stopped", "seconds"), [(True, (5.0, 7.0)), (False, (120.0, 122.0))])
def test_a_stopped_rank_is_named_at_once_while_starting_and_a_silent_one_has_time_to_import(is_stopped, seconds):
    group = Group()
    group.monitor._started, group.monitor.timeouts = False, Timeouts(5.0, 5.0, 60.0)
    group.children[0].is_stopped = is_stopped
    passed = 0.0
    while group.monitor.failure is None and passed < 200:
        group.heartbeats[2].beat()
        passed += group.pass_time(TICK_S) or TICK_S
    assert seconds[0] < passed <= seconds[1]
    assert "rank 1 of 3 (a fake) has given no sign of life" in group.monitor.failure
    assert ("stopped, as by SIGSTOP" in group.monitor.failure) == is_stopped


def test_whoever_waits_is_told_if_the_thread_that_watches_breaks_off(caplog):
    group, (ours, theirs) = Group(2), socket.socketpair()

    def receive():
        raise ValueError("no JSON")

    group.children[0].connection, group.children[0].line = ours, SimpleNamespace(receive=receive)
    theirs.send(b"x")
    group.monitor.start()
    with pytest.raises(RankError, match="the ranks cannot be watched any more: ValueError: no JSON"):
        group.monitor.wait_until_all("ready")
    group.monitor.stop()
    assert group.children[0].is_killed and "Traceback" in caplog.text
    ours.close()
    theirs.close()


def test_a_child_knows_whether_its_process_is_stopped():
    child = Child.__new__(Child)
    child.process = subprocess.Popen(["sleep", "60"])
    try:
        assert not child.is_stopped
        os.kill(child.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
        assert child.is_stopped
    finally:
        child.process.kill()
        child.process.wait()
    assert not child.is_stopped
