"""What actors say of themselves becomes ranks, and only who knows the secret is let in: without Ray."""

import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from hookline.core.errors import ConfigError, RankError
from hookline.core.executor import ray_ranks, ray_reservation
from hookline.core.executor.ray_actor import ANSWERS, HELLO, MESSAGES, connect, gpu_index
from hookline.core.executor.ray_ranks import RayLinks, RayPeer, accept_all, greeting
from hookline.core.executor.ray_reservation import (
    RayReservation,
    Wanted,
    check_environment,
    in_rank_order,
    shares_host,
)
from hookline.core.plugin.environment import environment
from hookline.core.util.ray_cluster import free_resources

SECRET = "5" * 64


def place(node, index=0, device="cuda", **others):
    return {"node": node, "index": index, "device": device, "host": f"10.0.0.{node}", "pid": 7, **others}


def test_ranks_follow_the_nodes_and_on_a_node_its_gpus():
    places = [place("b", 1), place("a", 2), place("b", 0), place("a", 0)]
    assert in_rank_order(places, 1) == [2, 0, 3, 1]


def test_the_ranks_of_a_bundle_stay_together():
    places = [place("a", 3), place("a", 0), place("a", 2), place("a", 1)]
    assert in_rank_order(places, 2) == [1, 0, 3, 2]


@pytest.mark.parametrize(
    ("places", "shares"),
    [
        ([place("a", 2), place("a", 3)], True),
        ([place("a", 2), place("a", 4)], False),
        ([place("a", 0), place("b", 1)], False),
        ([place("a", device="cpu"), place("a", device="cpu")], True),
    ],
)
def test_gpus_read_each_other_s_memory_only_if_they_follow_each_other_on_one_node(places, shares):
    assert shares_host(places) == shares


@pytest.mark.parametrize(("id_", "visible", "index"), [("5", "4,5", 1), ("1", None, 1), ("GPU-x", "GPU-y,GPU-x", 1)])
def test_the_gpu_that_ray_names_is_found_among_those_that_the_process_sees(id_, visible, index):
    assert gpu_index(id_, visible) == index


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "1.0"}, r"torch is 1\.0 there and .* here; make it the same on every node"),
        ({"HOOKLINE_PLUGINS": "x"}, "HOOKLINE_PLUGINS is x there and "),
        ({"plugins": ["plugin y"]}, r"its plugins are without .* and with plugin y; install the same on every node"),
    ],
)
def test_a_rank_with_another_environment_is_named_with_its_node_and_what_differs(change, message):
    ours = environment()
    places = [place(1, environment=ours), place(2, environment={**ours, **change})]
    check_environment(places[:1])
    with pytest.raises(RankError, match=rf"rank 1 of 2 \(pid 7 on node 10\.0\.0\.2\) .*{message}") as found:
        check_environment(places)
    assert "\n" not in str(found.value)


class FakeCluster:
    """What a reservation asks of Ray. gpus: of each node. ids: node and GPU of each actor, in their order.

    free: GPUs of each node that are not taken, at each look; the last ones stay.
    """

    def __init__(self, gpus, ids, free=()):
        self.gpus, self.ids, self.bundles, self.options, self.killed, self.removed = gpus, ids, None, [], [], []
        self.free = list(free) or [gpus]
        self.environment = environment()
        self.util = self.exceptions = self
        self.scheduling_strategies, self.RayError = self, RuntimeError
        self.PlacementGroupSchedulingStrategy = lambda group, index: index

    def nodes(self):
        return [
            {
                "Alive": True,
                "NodeManagerAddress": f"10.0.0.{number}",
                "Resources": {"CPU": 8.0, **({"GPU": count} if count else {})},
            }
            for number, count in enumerate(self.gpus, 1)
        ]

    def is_initialized(self):
        return True

    def placement_group(self, bundles, strategy):
        assert strategy == "PACK"
        self.bundles = bundles
        return SimpleNamespace(wait=lambda seconds: sum(bundle.get("GPU", 0) for bundle in bundles) <= sum(self.gpus))

    def remote(self, actor_class):
        def options(**given):
            number = len(self.options)
            self.options.append(given)
            node, index = self.ids[number]
            told = place(node, index, environment=self.environment, compute_capability=(9, 0))
            actor = SimpleNamespace(number=number, describe=SimpleNamespace(remote=lambda uses_gpu: f"said {number}"))
            self.told = {**getattr(self, "told", {}), f"said {number}": told}
            return SimpleNamespace(remote=lambda: actor)

        return SimpleNamespace(options=options)

    def wait(self, refs, timeout):
        return refs[-1:], refs[:-1]

    def get(self, ref):
        return self.told[ref]

    def kill(self, actor, no_restart):
        self.killed.append(actor.number)

    def remove_placement_group(self, group):
        self.removed.append(group)


def reserve(monkeypatch, cluster, size, group, device="auto"):
    def free_resources(ray):
        now = cluster.free.pop(0) if len(cluster.free) > 1 else cluster.free[0]
        return [{"CPU": 8.0, **({"GPU": count} if count else {})} for count in now]

    monkeypatch.setattr(ray_reservation, "connected_ray", lambda asker: cluster)
    monkeypatch.setattr(ray_reservation, "free_resources", free_resources)
    return RayReservation(Wanted(size, group, device, 1, 1.0))


def test_each_group_of_ranks_gets_a_bundle_that_no_two_nodes_can_share(monkeypatch):
    cluster = FakeCluster([2, 2], [("a", 1), ("a", 0), ("b", 0), ("b", 1)])
    reservation = reserve(monkeypatch, cluster, 4, 2)
    assert cluster.bundles == [{"GPU": 2}, {"GPU": 2}]
    assert [options["scheduling_strategy"] for options in cluster.options] == [0, 0, 1, 1]
    needs = [(options["num_gpus"], options["num_cpus"], options["max_restarts"]) for options in cluster.options]
    assert needs == [(1, 0, 0)] * 4, "an actor that comes again is no rank of this engine"
    assert all("NOSET_CUDA_VISIBLE_DEVICES" in str(options["runtime_env"]) for options in cluster.options)
    assert [actor.number for actor in reservation.actors] == [1, 0, 2, 3]
    assert [one["index"] for one in reservation.places] == [0, 1, 0, 1]
    reservation.release()
    reservation.release()
    assert sorted(cluster.killed[:4]) == [0, 1, 2, 3] and len(cluster.removed) == 1


def test_actors_of_another_environment_are_given_back(monkeypatch):
    cluster = FakeCluster([1], [("a", 0)])
    cluster.environment = {**environment(), "torch": "1.0"}
    with pytest.raises(RankError, match=r"rank 0 of 1 .* has another environment than the engine: torch is 1\.0"):
        reserve(monkeypatch, cluster, 1, 1)
    assert cluster.killed == [0] and len(cluster.removed) == 1


def test_actors_that_do_not_start_in_time_are_named_and_given_back(monkeypatch):
    cluster, patience_s = FakeCluster([1, 1, 1], [("a", 0), ("b", 0), ("c", 0)]), []

    def wait(refs, timeout):
        patience_s.append(timeout)
        return ([], refs) if len(refs) == 2 else (refs[1:2], [refs[0], *refs[2:]])

    cluster.wait = wait
    with pytest.raises(
        RankError, match=r"^rank 0 and rank 2 of 3 did not start within 1 s \(engine.start_timeout_s\)$"
    ):
        reserve(monkeypatch, cluster, 3, 1)
    assert all(0 < one <= 1.0 for one in patience_s) and len(patience_s) == 2
    assert cluster.killed == [0, 1, 2] and len(cluster.removed) == 1


def test_an_actor_that_ends_before_it_says_where_it_is_is_named_with_the_cause(monkeypatch):
    cluster = FakeCluster([1, 1], [("a", 0), ("b", 0)])

    def lost(ref):
        raise RuntimeError("The actor died.\n\nits node was lost")

    cluster.get = lost
    with pytest.raises(RankError, match=r"^rank 1 of 2 ended: its node was lost while starting$"):
        reserve(monkeypatch, cluster, 2, 1)
    assert cluster.killed == [0, 1] and len(cluster.removed) == 1


def test_nothing_is_asked_of_a_ray_that_has_been_shut_down(monkeypatch):
    cluster = FakeCluster([1], [("a", 0)])
    reservation = reserve(monkeypatch, cluster, 1, 1)
    cluster.is_initialized = lambda: False
    reservation.release()
    assert cluster.killed == cluster.removed == []


def test_ranks_that_no_node_can_hold_together_get_a_bundle_each(monkeypatch):
    cluster = FakeCluster([1, 1], [("a", 0), ("b", 0)])
    reserve(monkeypatch, cluster, 2, 2)
    assert cluster.bundles == [{"GPU": 1}, {"GPU": 1}]


@pytest.mark.parametrize(
    ("size", "gpus", "free", "bundles"),
    [
        pytest.param(2, [2, 1, 1], [[0, 1, 1]], [{"GPU": 1}] * 2, id="two_nodes_have_room_now"),
        pytest.param(2, [2, 1, 1], [[2, 1, 1]], [{"GPU": 2}], id="one_node_has_room_now"),
        pytest.param(2, [2, 1, 1], [[1, 0, 0]], [{"GPU": 2}], id="nothing_has_room_now"),
        pytest.param(2, [2, 1, 1], [[0, 1, 1], [1, 1, 1], [2, 1, 1]], [{"GPU": 2}], id="a_node_was_just_given_back"),
        pytest.param(4, [3, 1, 2], [[3, 1, 2]], [{"GPU": 2}] * 2, id="each_group_has_a_node"),
        pytest.param(4, [3, 1], [[3, 1]], [{"GPU": 1}] * 4, id="only_one_group_has_a_node"),
        pytest.param(4, [2], [[2]], [{"GPU": 2}] * 2, id="another_such_node_may_come"),
        pytest.param(4, [1, 1], [[1, 1]], [{"GPU": 1}] * 4, id="more_small_nodes_may_come"),
        pytest.param(6, [3, 1, 1], [[3, 1, 1]], [{"GPU": 2}] * 3, id="more_such_nodes_may_come"),
    ],
)
def test_ranks_are_put_where_there_is_room_now(size, gpus, free, bundles, monkeypatch, caplog):
    monkeypatch.setattr(ray_reservation, "SETTLE_S", 0.0 if len(free) == 1 else 60.0)
    monkeypatch.setattr(ray_reservation, "LOOK_S", 0.0)
    cluster = FakeCluster(gpus, [(node, 0) for node in "abcdef"], free)
    with suppress(RankError):  # if this cluster never has that much
        reserve(monkeypatch, cluster, size, 2)
    assert cluster.bundles == bundles
    told = "no node has 2 free GPUs for tp=2 now, so that its ranks go on several nodes"
    assert (told in caplog.text) == (free == [[0, 1, 1]])
    assert ("engine.executor=ray waits for" in caplog.text) == (sum(gpus) < size)


def test_what_is_free_is_what_nodes_have_where_ray_does_not_tell(monkeypatch):
    nodes = [{"NodeID": name, "Alive": name != "c", "Resources": {"CPU": 2.0}} for name in "abc"]
    ray = SimpleNamespace(nodes=lambda: nodes)
    pytest.importorskip("ray", reason="needs the extra ray")
    state = "ray._private.state.available_resources_per_node"
    monkeypatch.setattr(state, lambda: {"b": {"CPU": 1.0}, "c": {"CPU": 9.0}})
    assert free_resources(ray) == [{}, {"CPU": 1.0}]
    monkeypatch.delattr(state)
    assert free_resources(ray) == [{"CPU": 2.0}, {"CPU": 2.0}]


def test_a_cluster_without_gpus_gives_cpus_and_one_with_them_if_it_is_told_to(monkeypatch):
    for gpus, device in (([0, 0], "auto"), ([1, 1], "cpu")):
        cluster = FakeCluster(gpus, [("a", 0), ("b", 0)])
        reservation = reserve(monkeypatch, cluster, 2, 1, device)
        assert cluster.bundles == [{"CPU": 1}, {"CPU": 1}] and not reservation.uses_gpus
        assert [options["num_cpus"] for options in cluster.options] == [1, 1]


@pytest.mark.parametrize(
    ("gpus", "device", "message"),
    [
        ([1], "cuda:1", r"^device=cuda:1 names a GPU of one host; with engine\.executor=ray give device=cuda$"),
        ([0], "cuda", r"^device=cuda: no node of this Ray cluster has a GPU; use device=cpu$"),
    ],
)
def test_a_device_that_the_cluster_cannot_give_is_refused(gpus, device, message, monkeypatch):
    with pytest.raises(ConfigError, match=message):
        reserve(monkeypatch, FakeCluster(gpus, [("a", 0)]), 1, 1, device)
    assert reserve(monkeypatch, FakeCluster([1], [("a", 0)]), 1, 1, "cuda").uses_gpus


def test_a_cluster_that_never_has_enough_is_named_with_the_numbers_and_given_back(monkeypatch, caplog):
    cluster = FakeCluster([1, 1], [])
    with pytest.raises(RankError, match=r"4 ranks need 4 free GPUs, and this Ray cluster, which has 2, did not have"):
        reserve(monkeypatch, cluster, 4, 2)
    assert "waits for 4 GPUs; this Ray cluster has 2 now" in caplog.text and len(cluster.removed) == 1


@pytest.mark.parametrize(
    ("gpus", "free", "told"),
    [
        ([2, 4, 0], [1, 3, 0], "; free now: 3 of 4 on 10.0.0.2, 1 of 2 on 10.0.0.1; 2 have to be on one node"),
        ([2] * 20, [0] * 19 + [1], ", 0 of 2 on 10.0.0.15, and 4 more nodes; 2 have to be on one node"),
        ([1], [1], "; free now: 1 of 1 on 10.0.0.1"),
    ],
    ids=["some", "many", "no_pieces"],
)
def test_what_is_not_free_in_time_is_told_with_what_each_node_has(monkeypatch, gpus, free, told):
    cluster = FakeCluster(gpus, [], [free])
    cluster.placement_group = lambda bundles, strategy: SimpleNamespace(wait=lambda seconds: False)
    monkeypatch.setattr(ray_reservation, "SETTLE_S", 0.0)
    with pytest.raises(RankError) as found:
        reserve(monkeypatch, cluster, 2, 2)
    assert str(found.value).endswith(told) and "2 free GPUs" in str(found.value)


def test_free_cpus_are_told_for_ranks_on_cpus(monkeypatch):
    cluster = FakeCluster([0, 0], [])
    cluster.placement_group = lambda bundles, strategy: SimpleNamespace(wait=lambda seconds: False)
    with pytest.raises(
        RankError, match=r"20 free CPUs, and .*; free now: 8 of 8 on 10\.0\.0\.1, 8 of 8 on 10\.0\.0\.2$"
    ):
        reserve(monkeypatch, cluster, 20, 1)


def test_a_head_node_that_is_gone_keeps_no_error_of_a_start_waiting(monkeypatch):
    cluster, is_over = FakeCluster([1], []), threading.Event()
    asked = []

    def wait(seconds):
        cluster.nodes = lambda: [asked.append(1), is_over.wait()]
        return False

    cluster.placement_group = lambda bundles, strategy: SimpleNamespace(wait=wait)
    monkeypatch.setattr(ray_reservation, "RELEASE_S", 0.01)
    with pytest.raises(RankError, match=r"did not have them within 1 s \(engine.start_timeout_s\)$"):
        reserve(monkeypatch, cluster, 1, 1)
    assert asked
    is_over.set()


class SilentHead:
    """A Ray whose head node is gone: what asks it waits until the test is over; the rest is known without it."""

    def __init__(self):
        self.was_asked, self.is_over = threading.Event(), threading.Event()
        self.exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, ActorUnavailableError=ConnectionError)

    def nodes(self):
        self.was_asked.set()
        self.is_over.wait()
        return []

    def kill(self, actor, no_restart):
        self.nodes()

    def get(self, ref, timeout):
        raise TimeoutError

    def is_initialized(self):
        return True


@pytest.fixture
def silent():
    head = SilentHead()
    yield head
    head.is_over.set()


def test_why_an_actor_is_gone_is_told_though_the_head_node_is_gone_too(silent, monkeypatch):
    monkeypatch.setattr(ray_ranks, "CAUSE_S", 0.01)
    peer = RayPeer(1, socket.socketpair(), None, None, place("a"), silent)
    assert peer.how_it_ended() == "closed its connection, perhaps as its node was lost"
    assert silent.was_asked.wait(30)
    peer.close()


def test_an_actor_is_cut_off_though_the_head_node_is_gone(silent):
    ours, theirs = socket.socketpair()
    peer = RayPeer(1, [ours], None, None, place("a"), silent)
    peer.kill()
    assert theirs.recv(1) == b"", "at which the rank ends by itself"
    assert silent.was_asked.wait(30)
    peer.close()
    theirs.close()


def test_giving_back_does_not_wait_for_a_head_node_that_is_gone(silent, monkeypatch):
    monkeypatch.setattr(ray_reservation, "RELEASE_S", 0.01)
    reservation = object.__new__(RayReservation)
    reservation.ray, reservation.actors, reservation._group = silent, ["actor"], "group"
    reservation.release()
    assert silent.was_asked.wait(30)


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_every_connection_of_a_rank_is_told_apart(server):
    host, port = server.getsockname()
    keys = {(0, MESSAGES), (0, ANSWERS), (1, MESSAGES)}
    made = [connect(host, port, SECRET, *key) for key in sorted(keys, reverse=True)]
    found = accept_all(server, SECRET, keys, 10.0, lambda: None)
    for key, ours in zip(sorted(keys, reverse=True), made, strict=True):
        ours.sendall(b"%d %d" % key)
        assert found[key].recv(10) == b"%d %d" % key
    for one in (*made, *found.values()):
        one.close()


def test_who_does_not_know_the_secret_is_turned_away_and_holds_up_nobody(server, monkeypatch):
    monkeypatch.setattr(ray_ranks, "HELLO_S", 0.1)
    host, port = server.getsockname()
    strangers = [socket.create_connection((host, port)) for _ in range(3)]
    strangers[0].sendall(HELLO.pack(b"6" * 64, 0, MESSAGES))
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    ours = connect(host, port, SECRET, 0, MESSAGES)
    found = accept_all(server, SECRET, {(0, MESSAGES)}, 10.0, lambda: None)
    found[0, MESSAGES].sendall(b"hello")
    assert ours.recv(5) == b"hello"
    for one in (*strangers, ours, *found.values()):
        one.close()


def test_an_engine_that_a_rank_cannot_reach_is_told_with_its_address_and_the_fix(server):
    host, port = server.getsockname()
    server.close()
    with pytest.raises(RankError) as found:
        connect(host, port, SECRET, 1, MESSAGES)
    text = f"it cannot reach the engine at {host}:{port} ([Errno 111] Connection refused); open the ports of "
    assert str(found.value) == text + "net.ipv4.ip_local_port_range between the nodes"
    told = f"The actor died.\n\n  File x\nhookline.core.errors.RankError: {found.value}\n"
    assert ray_reservation.cause_of(ValueError(told)) == f"ended: {found.value}"


def test_a_rank_that_ends_before_it_has_connected_is_named_with_the_cause(monkeypatch):
    monkeypatch.setattr(ray_ranks, "CAUSE_S", 0.01)

    def lost(ref, timeout):
        raise ValueError("Traceback\n\nhookline.core.errors.RankError: it cannot reach the engine")

    ray = SimpleNamespace(
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        wait=lambda running, timeout: (running[1:], running[:1]),
        get=lost,
        exceptions=SimpleNamespace(GetTimeoutError=TimeoutError, ActorUnavailableError=ConnectionError),
        nodes=list,
    )
    actor = SimpleNamespace(run=SimpleNamespace(remote=lambda rank, *others: f"rank {rank}"))
    links = object.__new__(RayLinks)
    links.reservation = SimpleNamespace(ray=ray, actors=[actor, actor], places=[place(1), place(2)])
    with pytest.raises(RankError) as found:
        links._connected("module:function", 60.0)
    assert str(found.value) == (
        "rank 1 of 2 (pid 7 on node 10.0.0.2), while starting, ended: it cannot reach the engine"
    )


def test_a_stranger_who_spells_slowly_has_no_more_time_than_others(monkeypatch):
    """Each of its bytes comes before anybody would stop waiting for the next one."""
    now = [0.0]
    monkeypatch.setattr(ray_ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Stranger:
        def settimeout(self, seconds):
            assert seconds is not None and 0 < seconds <= ray_ranks.HELLO_S

        def recv(self, size):
            now[0] += 0.9 * ray_ranks.HELLO_S
            return b"x"

    assert greeting(Stranger(), SECRET) is None
    assert now[0] <= 2 * ray_ranks.HELLO_S


def test_ranks_that_do_not_come_are_named(server):
    with pytest.raises(RankError, match=r"rank 0 and rank 2 did not connect within 0 s \(engine.start_timeout_s\)"):
        accept_all(server, SECRET, {(0, MESSAGES), (0, ANSWERS), (2, MESSAGES)}, 0.0, lambda: None)


def test_an_actor_that_is_lost_meanwhile_ends_the_wait(server):
    def check():
        raise RankError("rank 1 of 2 is gone")

    with pytest.raises(RankError, match="rank 1 of 2 is gone"):
        accept_all(server, SECRET, {(0, MESSAGES)}, 10.0, check)
