"""Ranks as actors on two nodes of a Ray cluster: the tokens of one rank, and a name for whatever is lost.

Both nodes are on this machine and have one CPU each, so that no node can hold two ranks.
"""

import os
import signal
import time

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from hookline import LLM, SamplingParams
from hookline.core.errors import ConfigError, RankError
from hookline.plugins.executors.ray import executor as ray_executor
from tests.ray_folder import cluster_of, ray_folder
from tests.test_parity import mixed_load

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are not ours to mend
ENGINE = dict(executor="ray", block_size=8, num_blocks=40, max_num_seqs=16, max_num_batched_tokens=64)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def cluster():
    """Its address is where a process of Ray looks first, as it is in a job."""
    import ray

    size = dict(num_cpus=1, object_store_memory=100 * 2**20)
    with ray_folder() as patch:
        cluster = cluster_of(dict(size, include_dashboard=False), size)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def pair(cluster):
    with LLM(device="cpu", tp=2, engine={**ENGINE, "overlap": True, "max_model_len": 256}) as llm:
        yield llm


def places(llm):
    return [peer.place for peer in llm.engine.executor.links.children]


def groups_left():
    import ray

    return [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]


def test_two_ranks_on_two_nodes_give_the_tokens_of_one(pair):
    assert len({place.node for place in places(pair)}) == 2
    assert os.getpid() not in [place.pid for place in places(pair)]
    outputs = pair.generate(*mixed_load())
    assert sum(output.num_preemptions for output in outputs) > 0
    with LLM(device="cpu", engine={**ENGINE, "executor": "local", "max_model_len": 256}) as llm:
        assert [output.token_ids for output in outputs] == [one.token_ids for one in llm.generate(*mixed_load())]


def test_what_a_device_is_called_on_one_host_is_refused(pair):
    with pytest.raises(ConfigError, match=r"device=cuda:1 names a GPU of one host; with engine\.executor=ray"):
        LLM(device="cuda:1", engine=ENGINE)
    with pytest.raises(ConfigError, match="device=cuda: no node of this Ray cluster has a GPU; use device=cpu"):
        LLM(device="cuda", engine=ENGINE)


def test_more_ranks_than_the_cluster_holds_are_refused_with_the_numbers(pair):
    with pytest.raises(
        RankError,
        match=r"1 ranks need 1 free CPUs, and this Ray cluster, which has 2, did not have .*; free now: 0 of 1 on",
    ):
        LLM(device="cpu", engine={**ENGINE, "start_timeout_s": 0.2})
    assert len(groups_left()) == 1, "the pair's own"


def test_a_killed_actor_is_named_and_after_it_another_environment_is(pair, monkeypatch):
    monkeypatch.setattr(ray_executor, "CAUSE_S", 60.0)  # Ray may be slow to notice here
    pid = places(pair)[1].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match=rf"rank 1 of 2 \(pid {pid} on node [\d.]+\) ended: .* process has died"):
        for _ in range(50):
            pair.generate(PROMPTS, GREEDY)
    pair.close()
    assert groups_left() == []
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.faulty_rank")
    with pytest.raises(RankError, match=r"rank 0 of 1 .* has another environment than the engine: HOOKLINE_PLUGINS is"):
        LLM(device="cpu", engine=ENGINE)
    assert groups_left() == []


def test_a_stopped_actor_is_named_within_five_seconds_and_is_not_left(cluster):
    with LLM(device="cpu", engine={**ENGINE, "rank_timeout_s": 2.0}) as llm:
        [place] = places(llm)
        [actor] = llm.engine.executor.links.placement.executor.actors
        llm.generate(PROMPTS, GREEDY)
        os.kill(place.pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        named = rf"rank 0 of 1 \(pid {place.pid} on node [\d.]+\) has given no sign of life for 2 s"
        with pytest.raises(RankError, match=named):
            llm.generate(PROMPTS, GREEDY)
        assert time.monotonic() - stopped_s < 5.0
    import ray

    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.describe.remote(False), timeout=60)
    assert groups_left() == []


@pytest.mark.nightly
def test_two_engines_serve_in_one_cluster_and_a_closed_one_is_gone(cluster):
    with LLM(device="cpu", engine=ENGINE) as one:
        with LLM(device="cpu", engine=ENGINE) as other:
            expected = [output.token_ids for output in one.generate(PROMPTS, GREEDY)]
            assert [output.token_ids for output in other.generate(PROMPTS, GREEDY)] == expected
            os.kill(places(other)[0].pid, signal.SIGKILL)
            with pytest.raises(RankError, match="rank 0 of 1"):
                other.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in one.generate(PROMPTS, GREEDY)] == expected
    assert groups_left() == []


@pytest.mark.nightly
def test_two_stages_on_two_nodes_give_the_tokens_of_one(cluster):
    with LLM(device="cpu", pp=2, engine={**ENGINE, "overlap": True, "max_model_len": 256}) as llm:
        assert len({place.node for place in places(llm)}) == 2
        outputs = llm.generate(*mixed_load())
    with LLM(device="cpu", engine={**ENGINE, "executor": "local", "max_model_len": 256}) as llm:
        assert [output.token_ids for output in outputs] == [one.token_ids for one in llm.generate(*mixed_load())]
