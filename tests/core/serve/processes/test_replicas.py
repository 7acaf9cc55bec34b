"""Several engines behind one client, around fakes; what each has of the machine; the metrics of all as one text."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hookline.core.errors import ConfigError, EngineError
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.engine_client import EngineLoad, ReplicaState
from hookline.core.serve.http.metrics import Families
from hookline.core.serve.processes.messages import LoadReport, Message, StepNews, Submit, packed
from hookline.core.serve.processes.remote_client import RemoteClient
from hookline.core.serve.processes.replica_client import ReplicaClient, merged
from hookline.core.serve.processes.shares import Share, core_parts, gpu_parts, shares_of
from hookline.core.serve.settings import ServeConfig, num_front_ends
from hookline.core.testing.engine_client import FakeEngineClient, tiny_model
from tests.core.serve.conftest import Ask

LONG = [7] * 200


class Fakes:
    """Clients of engines that only note what they are told."""

    def __init__(self, number: int = 2, **settings: Any) -> None:
        self.sent: list[list[Message]] = [[] for _ in range(number)]
        config, model = ServeConfig(**settings), tiny_model()
        self.clients = [RemoteClient(model, sent.append, config) for sent in self.sent]
        self.client = ReplicaClient(self.clients, config)

    def prompts(self) -> list[int]:
        """How many each was asked."""
        return [sum(isinstance(one, Submit) for one in sent) for sent in self.sent]

    def stream(self, prompt: Any = LONG, **options: Any) -> Any:
        return self.client.stream(prompt, SamplingParams(max_tokens=4), **options)


def run(talk: Any) -> None:
    asyncio.run(talk())


def test_the_same_beginning_goes_to_the_same_replica_and_a_salt_or_session_decides_otherwise() -> None:
    async def talk() -> None:
        fakes = Fakes()
        for _ in range(6):
            fakes.stream()
        assert sorted(fakes.prompts()) == [0, 6]
        salts = [str(number) for number in range(20)]
        for salt in salts:
            fakes.stream(cache_salt=salt)
        assert min(fakes.prompts()) > 0
        await fakes.client.aclose()
        fakes = Fakes()
        for number in range(5):
            fakes.stream([number] * 200, session="mine")
        assert sorted(fakes.prompts()) == [0, 5]
        await fakes.client.aclose()

    run(talk)


def test_a_dead_replica_ends_its_own_streams_alone_and_gets_no_new_ones() -> None:
    async def talk() -> None:
        fakes = Fakes()
        streams = [fakes.stream([number]) for number in range(4)]  # too short for a cache: they take turns
        assert fakes.prompts() == [2, 2]
        fakes.clients[0].break_off("it was killed")
        client = fakes.client
        assert client.death is None and client.is_ready
        assert [one.death for one in client.replicas] == ["it was killed", None]
        told = await asyncio.gather(*(asyncio.wait_for(anext(one), 0.05) for one in streams), return_exceptions=True)
        assert sorted(type(one).__name__ for one in told) == [
            "EngineError",
            "EngineError",
            "TimeoutError",
            "TimeoutError",
        ]
        for _ in range(3):
            fakes.stream()
        assert fakes.prompts() == [2, 5]
        fakes.clients[1].break_off("and the other")
        assert not client.is_ready and client.death == "it was killed"
        with pytest.raises(EngineError, match="it was killed"):
            fakes.stream()
        fakes.clients[0].revive()
        fakes.stream()
        assert fakes.prompts() == [3, 5] and client.death is None
        await client.aclose()

    run(talk)


def test_requests_of_other_front_ends_count_as_load_and_loads_are_summed() -> None:
    async def talk() -> None:
        fakes = Fakes()
        fakes.clients[0].receive([LoadReport((30, 10, 5, 10, 1.0, 2.0))])
        fakes.clients[1].receive([LoadReport((1, 0, 6, 10, 1.0, 2.5))])
        for number in range(10):
            fakes.stream([number])
        assert fakes.prompts() == [0, 10]
        assert fakes.client.load() == EngineLoad(31, 10, 11, 20, 2.0, 4.5)
        await fakes.client.aclose()

    run(talk)


def test_a_stream_is_fed_by_its_own_replica() -> None:
    async def talk() -> None:
        fakes = Fakes()
        stream = fakes.stream()
        where = fakes.prompts().index(1)
        step = StepNews(packed([stream.handles[0]]), packed([40]), {}, {}, [])
        fakes.clients[1 - where].receive([step])  # the handle means nothing there
        fakes.clients[where].receive([step])
        assert (await anext(stream)).token_ids == [40]
        await fakes.client.aclose()

    run(talk)


def test_metrics_bear_the_replica_and_those_of_a_dead_one_are_left_out() -> None:
    async def talk() -> None:
        fakes = Fakes()
        for replica, one in enumerate(fakes.clients):
            one.metrics = answering(f'# HELP a_total A.\n# TYPE a_total counter\na_total{{x="1"}} {replica}\n')
        fakes.clients[0].metrics = failing
        text = await fakes.client.metrics()
        assert 'hookline_replica_up{replica="0"} 0.0' in text and 'a_total{replica="1",x="1"} 1' in text
        fakes.clients[1].metrics = failing
        with pytest.raises(EngineError):
            await fakes.client.metrics()
        await fakes.client.aclose()

    run(talk)


def answering(text: str) -> Any:
    async def answer() -> str:
        return text

    return answer


async def failing() -> str:
    raise EngineError("it is dead")


def test_merged_metrics_can_be_parsed_and_say_each_family_once() -> None:
    one = '# HELP a_b Of all.\n# TYPE a_b histogram\na_b_bucket{le="1.0"} 1\na_b_sum 2\n'
    both = f"{one}# HELP c C.\n# TYPE c gauge\nc{{}} 3\n"
    found = generate_latest(Families(merged({0: both, 1: both, 2: one}))).decode()
    assert found.count("# HELP a_b ") == found.count("# TYPE c ") == 1
    families = {one.name: one.samples for one in text_string_to_metric_families(found)}
    assert [(one.name, one.labels["replica"]) for one in families["a_b"]] == [
        (name, replica) for replica in "012" for name in ("a_b_bucket", "a_b_sum")
    ]
    assert [one.labels for one in families["c"]] == [{"replica": "0"}, {"replica": "1"}]


def test_a_label_may_hold_characters_at_which_python_splits_lines() -> None:
    text = '# HELP a A.\n# TYPE a gauge\na{tag="x\u2028y\x0cz"} 1\n'
    (family,) = merged({0: text})
    assert family.samples[0].labels == {"tag": "x\u2028y\x0cz", "replica": "0"}


# ------------------------------------------------------------------------------------------------- what it is given


def test_gpus_are_given_in_their_order_as_many_as_a_replica_has_ranks() -> None:
    assert gpu_parts(2, 2, 4, None) == ["0,1", "2,3"]
    assert gpu_parts(3, 1, 4, "3,1,GPU-5,0") == ["3", "1", "GPU-5"]
    with pytest.raises(ConfigError, match=r"serve.replicas=3 with 2 GPUs each needs 6 GPUs and 4 are here"):
        gpu_parts(3, 2, 4, None)


def test_cores_are_shared_out_and_where_they_do_not_suffice_shared() -> None:
    assert core_parts(2, [0, 1, 4, 5, 6]) == [(0, 1), (4, 5)]
    assert core_parts(3, [0, 1]) == [None] * 3


def test_one_replica_has_all_and_several_cannot_share_one_named_gpu() -> None:
    config: Any = SimpleNamespace(device="cuda:1", tp=1)
    assert shares_of(config, 1) == [Share()]
    with pytest.raises(ConfigError, match="device=cuda:1 is one GPU"):
        shares_of(config, 2)


def test_replicas_need_a_front_end_and_have_one_on_a_small_machine() -> None:
    with pytest.raises(ConfigError, match=r"serve.processes=0 puts all into one process"):
        ServeConfig(replicas=2, processes=0)
    assert num_front_ends(ServeConfig(replicas=2), num_cores=2) == 1
    assert num_front_ends(ServeConfig(), num_cores=2) == 0


def test_health_is_200_with_each_replica_s_state_while_one_lives(ask: Ask) -> None:
    states = [ReplicaState("it was killed", EngineLoad()), ReplicaState(None, EngineLoad(num_running=3))]
    client = FakeEngineClient(replicas=states, now=EngineLoad(num_running=3))
    health = ask(client, "GET", "/health")
    assert (health.status_code, health.json()) == (200, {"replicas": ["dead", "ready"]})
    load = ask(client, "GET", "/load").json()
    assert load["num_running"] == 3
    assert [(one["death"], one["num_running"]) for one in load["replicas"]] == [("it was killed", 0), (None, 3)]


def test_a_session_is_taken_from_its_header(ask: Ask) -> None:
    client, body = FakeEngineClient(), {"prompt": "Hello", "max_tokens": 2}
    assert ask(client, "POST", "/v1/completions", json=body, headers={"X-Session-Id": "mine"}).status_code == 200
    assert client.asked[0].options["session"] == "mine"
