"""Ranks that an executor places: what it says is checked, and a rank that it lost is named."""

import socket
from types import SimpleNamespace

import pytest

from hookline.core.contracts import RankExecutor, RankPlace, StartedRank, WantedRanks
from hookline.core.errors import PluginError, RankError
from hookline.core.executor.placed import PlacedLinks, PlacedPeer, Placement, shares_host
from hookline.core.plugin.environment import environment
from hookline.core.plugin.registry import EXECUTOR, Entry, Origin

ENTRY = Entry(EXECUTOR, "mine", "my_module:Mine", Origin("mine", "my_module", "hookline-mine", "1.0"))
WHO = r"executor 'mine' of plugin 'mine' \(hookline-mine 1\.0\)"


@pytest.fixture(scope="module")
def ours():
    return environment()


def place(node, device="cpu", environment=None):
    return RankPlace(f"10.0.0.{node}", str(node), 7, device, environment or {})


class Ended(StartedRank):
    """Ended before it had connected."""

    def __init__(self, how):
        self.how = how

    def wait(self, timeout_s):
        return True

    def how_it_ended(self):
        if self.how is None:
            raise KeyError("no such job")
        return self.how

    def kill(self):
        raise RuntimeError("no such job")


class Mine(RankExecutor):
    """started: what `start` returns."""

    def __init__(self, places, started=(), host="127.0.0.1"):
        self.host, self.places, self.started, self.num_released = host, places, started, 0

    def start(self, starts):
        return self.started

    def release(self):
        self.num_released += 1


def placement(executor, size=2):
    return Placement(executor, ENTRY, WantedRanks(size, size, "cpu", 1, 1.0))


@pytest.mark.parametrize(
    ("places", "shares"),
    [
        ([place("a", "cuda:2"), place("a", "cuda:3")], True),
        ([place("a", "cuda:2"), place("a", "cuda:4")], False),
        ([place("a", "cuda:0"), place("b", "cuda:1")], False),
        ([place("a"), place("a")], True),
        ([place("a"), place("b")], False),
    ],
)
def test_gpus_read_each_other_s_memory_only_if_they_follow_each_other_on_one_node(places, shares):
    assert shares_host(places) == shares


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "1.0"}, r"torch is 1\.0 there and .* here; make it the same on every node"),
        ({"HOOKLINE_PLUGINS": "x"}, "HOOKLINE_PLUGINS is x there and "),
        ({"plugins": ["plugin y"]}, r"its plugins are without .* and with plugin y; install the same on every node"),
    ],
)
def test_a_rank_with_another_environment_is_named_with_its_node_and_what_differs(change, message, ours):
    placement(Mine([place(1, environment=ours)]), 1)
    with pytest.raises(RankError, match=rf"rank 1 of 2 \(pid 7 on node 10\.0\.0\.2\) .*{message}") as found:
        placement(Mine([place(1, environment=ours), place(2, environment={**ours, **change})]))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("executor", "fault"),
    [
        (Mine([place(1)]), "it has 1 places for 2 ranks"),
        (Mine([place(1), "node 2"]), "its places are no list of RankPlace"),
        (Mine(None), "its places are no list of RankPlace"),
        (Mine([place(1), place(2)], host=None), "its host is no text"),
        (SimpleNamespace(), "its places are no list of RankPlace"),
    ],
)
def test_places_that_are_none_are_told_of_their_executor(executor, fault):
    with pytest.raises(PluginError, match=f"^{WHO} breaks its contract in __init__: {fault}$"):
        placement(executor)


@pytest.mark.parametrize(("started", "told"), [(None, "NoneType"), ([Ended("ended")], "1 of them")])
def test_ranks_that_are_not_started_are_told_of_their_executor_and_all_is_given_back(started, told, ours, timeouts):
    executor = Mine([place(1, environment=ours), place(2, environment=ours)], started)
    fault = f"it must return a process for each of 2 ranks and returned {told}"
    with pytest.raises(PluginError, match=f"^{WHO} breaks its contract in start: {fault}$"):
        PlacedLinks(placement(executor), "module:function", {}, timeouts)
    assert executor.num_released == 1


@pytest.fixture
def timeouts():
    return SimpleNamespace(rank_s=4.5, step_s=4.5, all_s=60.0, start_s=60.0)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("was killed by its scheduler", "was killed by its scheduler"),
        (None, "closed its connection, and how_it_ended of its executor raised KeyError: 'no such job'"),
    ],
)
def test_a_rank_that_ends_before_it_has_connected_is_named_with_the_cause(how, told, ours, timeouts):
    executor = Mine([place(1, environment=ours)], [Ended(how)])
    with pytest.raises(RankError) as found:
        PlacedLinks(placement(executor, 1), "module:function", {}, timeouts)
    assert str(found.value) == f"rank 0 of 1 (pid 7 on node 10.0.0.1), while starting, {told}"
    assert executor.num_released == 1


def test_a_rank_is_cut_off_though_its_executor_cannot_kill_it():
    ours, theirs = socket.socketpair()
    peer = PlacedPeer(1, [ours], Ended(None), place(1))
    peer.kill()
    assert theirs.recv(1) == b"", "at which the rank ends by itself"
    assert peer.wait(0.0) and str(peer) == "pid 7 on node 10.0.0.1"
    peer.close()
    theirs.close()
