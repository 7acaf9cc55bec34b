"""What actors say of themselves becomes ranks, and what is not to be had is told: without Ray."""

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from hookline.core.contracts import RankPlace, RankStart, WantedRanks
from hookline.core.errors import ConfigError, RankError
from hookline.core.testing.checks import check_contract
from hookline.core.util.ray_cluster import free_resources
from hookline.plugins.executors.ray import executor as ray_executor
from hookline.plugins.executors.ray.actor import gpu_index
from hookline.plugins.executors.ray.executor import RayExecutor, RayRank, cause_of, in_rank_order


def place(node, index=0):
    return RankPlace(f"10.0.0.{node}", str(node), 7, f"cuda:{index}", {}, (9, 0))


def test_it_has_the_methods_of_its_contract():
    check_contract("executor", RayExecutor)


def test_ranks_follow_the_nodes_and_on_a_node_its_gpus():
    places = [place("b", 1), place("a", 2), place("b", 0), place("a", 0)]
    assert in_rank_order(places, 1) == [2, 0, 3, 1]


def test_the_ranks_of_a_bundle_stay_together():
    places = [place("a", 3), place("a", 0), place("a", 2), place("a", 1)]
    assert in_rank_order(places, 2) == [1, 0, 3, 2]


@pytest.mark.parametrize(("id_", "visible", "index"), [("5", "4,5", 1), ("1", None, 1), ("GPU-x", "GPU-y,GPU-x", 1)])
def test_the_gpu_that_ray_names_is_found_among_those_that_the_process_sees(id_, visible, index):
    assert gpu_index(id_, visible) == index


class FakeCluster:
    """What a executor asks of Ray. gpus: of each node. ids: node and GPU of each actor, in their order.

    free: GPUs of each node that are not taken, at each look; the last ones stay.
    """

    def __init__(self, gpus, ids, free=()):
        self.gpus, self.ids, self.bundles, self.options, self.killed, self.removed = gpus, ids, None, [], [], []
        self.free = list(free) or [gpus]
        self.util = self.exceptions = self
        self.scheduling_strategies, self.RayError = self, RuntimeError
        self.PlacementGroupSchedulingStrategy = lambda group, index: index
        self.get_node_ip_address = lambda: "10.0.0.1"

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
            told = place(node, index)
            actor = SimpleNamespace(number=number, describe=SimpleNamespace(remote=lambda uses_gpu: f"said {number}"))
            self.told = {**getattr(self, "told", {}), f"said {number}": told}
            return SimpleNamespace(remote=lambda: actor)

        return SimpleNamespace(options=options)

    def wait(self, refs, timeout):
        if refs == [(0, 1)]:  # rank 0 runs
            return [], refs
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

    monkeypatch.setattr(ray_executor, "connected_ray", lambda asker: cluster)
    monkeypatch.setattr(ray_executor, "free_resources", free_resources)
    return RayExecutor(None, WantedRanks(size, group, device, 1, 1.0))


def test_each_group_of_ranks_gets_a_bundle_that_no_two_nodes_can_share(monkeypatch):
    cluster = FakeCluster([2, 2], [("a", 1), ("a", 0), ("b", 0), ("b", 1)])
    executor = reserve(monkeypatch, cluster, 4, 2)
    assert cluster.bundles == [{"GPU": 2}, {"GPU": 2}]
    assert [options["scheduling_strategy"] for options in cluster.options] == [0, 0, 1, 1]
    needs = [(options["num_gpus"], options["num_cpus"], options["max_restarts"]) for options in cluster.options]
    assert needs == [(1, 0, 0)] * 4, "an actor that comes again is no rank of this engine"
    assert all("NOSET_CUDA_VISIBLE_DEVICES" in str(options["runtime_env"]) for options in cluster.options)
    assert [actor.number for actor in executor.actors] == [1, 0, 2, 3]
    assert [one.device for one in executor.places] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert executor.host == "10.0.0.1"
    executor.release()
    executor.release()
    assert sorted(cluster.killed[:4]) == [0, 1, 2, 3] and len(cluster.removed) == 1


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
    executor = reserve(monkeypatch, cluster, 1, 1)
    cluster.is_initialized = lambda: False
    executor.release()
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
    monkeypatch.setattr(ray_executor, "SETTLE_S", 0.0 if len(free) == 1 else 60.0)
    monkeypatch.setattr(ray_executor, "LOOK_S", 0.0)
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
        executor = reserve(monkeypatch, cluster, 2, 1, device)
        assert cluster.bundles == [{"CPU": 1}, {"CPU": 1}] and not executor.uses_gpus
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
    monkeypatch.setattr(ray_executor, "SETTLE_S", 0.0)
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
    monkeypatch.setattr(ray_executor, "RELEASE_S", 0.01)
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
    monkeypatch.setattr(ray_executor, "CAUSE_S", 0.01)
    rank = RayRank(silent, None, None, place("a"))
    assert rank.how_it_ended() == "closed its connection, perhaps as its node was lost"
    assert silent.was_asked.wait(30)


def test_an_actor_is_killed_though_the_head_node_is_gone(silent):
    RayRank(silent, None, None, place("a")).kill()
    assert silent.was_asked.wait(30)


def test_giving_back_does_not_wait_for_a_head_node_that_is_gone(silent, monkeypatch):
    monkeypatch.setattr(ray_executor, "RELEASE_S", 0.01)
    executor = object.__new__(RayExecutor)
    executor.ray, executor.actors, executor._group = silent, ["actor"], "group"
    executor.release()
    assert silent.was_asked.wait(30)


def test_each_actor_is_started_as_its_rank_and_why_one_ended_is_told_in_a_line(monkeypatch):
    monkeypatch.setattr(ray_executor, "CAUSE_S", 0.01)
    cluster = FakeCluster([2], [("a", 1), ("a", 0)])
    executor = reserve(monkeypatch, cluster, 2, 2)
    for actor in executor.actors:
        actor.run = SimpleNamespace(remote=lambda start, actor=actor: (start.rank, actor.number))
    starts = [RankStart(rank, "10.0.0.1", 7, "5" * 64, "module:function") for rank in range(2)]
    first, second = executor.start(starts)
    assert [first._running, second._running] == [(0, 1), (1, 0)], "rank 0 has the first GPU"
    assert first.wait(0.0) is False and second.wait(0.0) is True

    def lost(ref, timeout):
        raise ValueError("Traceback\n\nhookline.core.errors.RankError: it cannot reach the engine")

    cluster.get, cluster.GetTimeoutError, cluster.ActorUnavailableError = lost, TimeoutError, ConnectionError
    cluster.nodes = list
    assert second.how_it_ended() == "ended: it cannot reach the engine"
    told = "The actor died.\n\n  File x\nhookline.core.errors.RankError: it cannot reach the engine\n"
    assert cause_of(ValueError(told)) == "ended: it cannot reach the engine"
