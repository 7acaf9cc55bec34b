"""The Ray Serve application and its replicas, around a Ray that only notes what it is told: no cluster, no engine."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hookline.core.contracts import StepStats
from hookline.core.errors import ConfigError, EngineError
from hookline.core.frontend.async_llm import AsyncLLM
from hookline.core.plugin.environment import environment
from hookline.core.plugin.host import PluginHost
from hookline.core.serve.engine_client import EngineLoad
from hookline.core.serve.http import collecting, event_loop
from hookline.core.serve.ray.options import RayOptions, deployment_options
from hookline.core.serve.ray.replica import EngineReplica
from hookline.core.serve.settings import ServeConfig, validate_serve
from hookline.core.testing.engine_client import FakeEngineClient

NODE = "hookline.core.util.ray_cluster.node_here"


class FakeRay:
    """The packages ray and ray.serve. gpus: of the cluster that this process is connected with; None: with none."""

    def __init__(self, gpus: float | None) -> None:
        self.gpus, self.ingresses = gpus, 0
        self.serve = SimpleNamespace(
            deployment=lambda served: SimpleNamespace(served=served, options=self.options),
            ingress=self.ingress,
            get_replica_context=lambda: SimpleNamespace(replica_id=SimpleNamespace(unique_id="replica-7")),
        )

    def is_initialized(self) -> bool:
        return self.gpus is not None

    def cluster_resources(self) -> dict[str, float]:
        assert self.gpus is not None, "who asks without a cluster has Ray start one"
        return {"CPU": 8.0, **({"GPU": self.gpus} if self.gpus else {})}

    def ingress(self) -> Any:
        self.ingresses += 1
        return lambda served: served

    def options(self, **told: Any) -> Any:
        return SimpleNamespace(bind=lambda *given: (told, given))


def application(monkeypatch: pytest.MonkeyPatch, gpus: float | None, **arguments: Any) -> Any:
    """What Ray is told of an application: the deployment's options, and the arguments of each replica."""
    fake = FakeRay(gpus)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.serve", fake.serve)
    monkeypatch.delitem(sys.modules, "hookline.core.serve.ray.app", raising=False)
    module = importlib.import_module("hookline.core.serve.ray.app")
    monkeypatch.delitem(sys.modules, "hookline.core.serve.ray.app")
    bound = module.app(arguments)
    assert fake.ingresses == 1, "else Ray makes no ASGI application of it"
    return bound


def test_an_application_is_what_its_arguments_say_and_each_replica_gets_the_driver_s_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"engine": {"max_num_seqs": 8}, "ray": {"max_replicas": 3}}
    told, (tree, driver) = application(monkeypatch, None, **given)
    run = validate_serve(tree, PluginHost.load())
    assert run.config.engine.max_num_seqs == 8
    assert told == deployment_options(RayOptions(max_replicas=3), run.config, run.serve, 0.0)
    assert driver == environment()


@pytest.mark.parametrize(("gpus", "expected"), [(None, 0.0), (0.0, 0.0), (4.0, 2.0)])
def test_a_replica_takes_gpus_if_the_cluster_has_them(
    gpus: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, _ = application(monkeypatch, gpus, tp=2)
    assert told["ray_actor_options"]["num_gpus"] == expected


def test_what_an_application_cannot_be_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^serve\.max_requests=0 "):
        application(monkeypatch, None, serve={"max_requests": 0})


class FakeLLM:
    """An engine that only dies and is closed. made: what it was made from."""

    def __init__(self, *made: Any) -> None:
        self.made, self.death, self.is_closed = made, None, False
        self.observers: dict[str, Any] = {}

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EngineReplica:
    """One that asks for the key `secret`."""
    (tmp_path / "keys").write_text("secret\n")
    (tmp_path / "keys").chmod(0o600)
    monkeypatch.setattr(NODE, lambda: "10.0.0.2")
    monkeypatch.setattr(AsyncLLM, "from_config", FakeLLM)
    return EngineReplica({"serve": {"api_key_file": str(tmp_path / "keys")}}, environment())


def test_a_replica_of_another_environment_makes_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NODE, lambda: "10.0.0.2")
    monkeypatch.setattr(AsyncLLM, "from_config", None)
    with pytest.raises(ConfigError, match=r"^node 10\.0\.0\.2 has another environment than the driver: torch is "):
        EngineReplica({}, {**environment(), "torch": "1.0"})


def test_a_replica_says_what_is_wrong_with_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(NODE, lambda: "10.0.0.2")
    monkeypatch.setattr(AsyncLLM, "from_config", FakeLLM)
    monkeypatch.setattr(PluginHost, "log_problems", lambda host: told.append("a plugin is broken"))
    EngineReplica({}, environment())
    assert told == ["a plugin is broken"]


def test_a_replica_loads_its_plugins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, hosts, load = environment(), [], PluginHost.load
    monkeypatch.setattr(NODE, lambda: "10.0.0.2")
    monkeypatch.setattr(AsyncLLM, "from_config", FakeLLM)
    monkeypatch.setattr(PluginHost, "load", lambda: hosts.append(load()) or hosts[-1])
    EngineReplica({}, driver)
    assert len(hosts) == 1


def test_a_replica_is_unhealthy_once_its_engine_is_dead_and_ends_it_when_it_is_deleted(replica: EngineReplica) -> None:
    llm: Any = replica._llm
    replica.check_health()
    llm.death = "rank 1 of 2 was killed"
    with pytest.raises(EngineError, match=r"^rank 1 of 2 was killed$"):
        replica.check_health()
    replica.__del__()
    assert llm.is_closed
    object.__new__(EngineReplica).__del__()  # one whose engine did not start


def test_a_replica_is_the_whole_server_with_its_keys_its_name_and_its_rates(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setitem(sys.modules, "ray", FakeRay(None))
    monkeypatch.setattr(collecting.QuietCollector, "start", lambda collector: started.append(collector._num_open()))
    monkeypatch.setattr(event_loop.LoopWatch, "start", lambda watch: started.append("watch"))
    made: list[Any] = []
    fake = FakeEngineClient(now=EngineLoad(num_running=3))

    def client(llm: Any, settings: ServeConfig, throughput: Any) -> FakeEngineClient:
        made.append((llm, settings))
        monkeypatch.setattr(PluginHost, "load", None)  # its plugins are loaded already
        llm.made[1].manager.hook.on_step_end(stats=stats(num_prefill_tokens=30))
        assert throughput.rates()[0] > 0, "the engine's steps are counted"
        return fake

    monkeypatch.setattr("hookline.core.serve.in_process.InProcessClient", client)

    async def talk() -> None:
        app = await replica.__serve_build_asgi_app__()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            refused = await http.get("/v1/models")
            assert refused.status_code == 401 and "x-request-id" not in refused.headers
            load = await http.get("/load", headers={"Authorization": "Bearer secret"})
        assert (load.json()["num_running"], load.headers["x-hookline-replica"]) == (3, "replica-7")

    asyncio.run(talk())
    assert started == [0, "watch"] and made == [(replica._llm, replica._run.serve)]


def stats(**values: int) -> StepStats:
    """Of a step that did no more than this."""
    names = StepStats.__dataclass_fields__
    return StepStats(**{name: values.get(name, 0) for name in names})  # type: ignore[arg-type]
