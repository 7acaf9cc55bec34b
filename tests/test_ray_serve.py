"""The Ray Serve application on a small cluster of its own, the files that deploy it, and the drill that kills."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

pytest.importorskip("starlette", reason="needs the extra: pip install hookline[serve]")
pytest.importorskip("ray.serve", reason="needs the extra: pip install hookline[ray]")
import ray
from ray import serve
from ray.serve.schema import ServeDeploySchema

from hookline.core.errors import ConfigError
from hookline.core.serve.ray.options import CLOSE_S
from hookline.core.serve.ray.replica import EngineReplica
from hookline.serve.ray import app
from tests.doc_pages import ROOT
from tests.ray_folder import ray_folder
from tests.serving import wait_for
from tests.test_traces import TRACEPARENT, Receiver, attributes, check_span, receiving

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray leaves sockets and files open
CONFIG = yaml.safe_load((ROOT / "deploy/ray_serve.yaml").read_text())
SERVICE = yaml.safe_load((ROOT / "deploy/ray_service.yaml").read_text())
BODY = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}


def deployment_of(config: dict[str, Any]) -> Any:
    """The deployment that the only application of a Serve config builds."""
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "hookline.serve.ray:app"
    return app(application.args)._bound_deployment


def test_the_serve_config_builds_a_deployment_that_scales_and_drains() -> None:
    deployment = deployment_of(CONFIG)
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 256)
    assert (deployment.max_ongoing_requests, deployment.max_queued_requests) == (512, 4096)
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 60 + CLOSE_S
    assert [one["name"] for one in CONFIG["applications"][0]["deployments"]] == [deployment.name]


def test_a_replica_of_another_version_names_its_node_before_its_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.core.util.ray_cluster.node_here", lambda: "10.0.0.2")
    tree, driver = deployment_of(CONFIG).init_args
    with pytest.raises(ConfigError, match=r"^node 10\.0\.0\.2 has another environment than the driver: torch is "):
        EngineReplica(tree, {**driver, "torch": "1.0"})


def test_the_ray_service_asks_for_what_its_workers_have_and_gives_them_time_to_drain() -> None:
    spec = SERVICE["spec"]
    deployment = deployment_of(yaml.safe_load(spec["serveConfigV2"]))
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    assert deployment.ray_actor_options["num_gpus"] == int(resources["limits"]["nvidia.com/gpu"])
    assert deployment.ray_actor_options["num_cpus"] <= int(resources["requests"]["cpu"])
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (group["minReplicas"], group["maxReplicas"])
    assert pod["terminationGracePeriodSeconds"] > deployment._deployment_config.graceful_shutdown_timeout_s
    assert spec["rayClusterConfig"]["rayVersion"] == ray.__version__


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Gets the replicas' spans."""
    with receiving() as found:
        yield found


@pytest.fixture(scope="module")
def http(receiver: Receiver) -> Iterator[httpx.Client]:
    """A client of two replicas."""
    held = socket.socket()  # bound for as long as Ray Serve listens, so that nobody else gets the port meanwhile
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    given = {"engine.num_blocks": 256, "engine.max_model_len": 512, "device": "cpu", "ray.num_cpus": 0.1}
    given |= {"observers": ["otel"]}
    size = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 100 * 2**20}
    with ray_folder() as patch:
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")  # 5 do not suffice on a busy machine
        patch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "120")
        for name, value in receiver.environ.items():
            patch.setenv(name, value)
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **size)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(app({**given, "ray.min_replicas": 2}))
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield client
        finally:
            serve.shutdown()
            ray.shutdown()
            held.close()


def test_a_stream_ends_in_a_replica_and_says_what_a_whole_answer_says(http: httpx.Client) -> None:
    whole = http.post("/v1/completions", json=BODY)
    with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    events = [yaml.safe_load(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and len(events) > 1
    assert "".join(one["choices"][0]["text"] for one in events) == whole.json()["choices"][0]["text"] != ""
    assert [len(whole.headers.get_list(name)) for name in ("x-request-id", "x-hookline-replica")] == [1, 1]


def test_a_span_of_a_replica_is_a_child_of_its_clients(http: httpx.Client, receiver: Receiver) -> None:
    answer = http.post("/v1/completions", json=BODY, headers={"traceparent": TRACEPARENT})

    def _mine() -> list[tuple[Any, dict[str, str]]]:
        return [one for one in receiver.spans if attributes(one[0]).get("gen_ai.response.id") == answer.json()["id"]]

    assert wait_for(_mine)
    [(span, resource)] = _mine()
    check_span(span, resource, "text_completion")


def test_the_requests_of_a_session_go_to_one_replica_and_sessions_to_all(http: httpx.Client) -> None:
    def replica(session: str) -> str:
        response = http.post("/v1/completions", json=BODY, headers={"X-Session-Id": session})
        return str(response.headers["x-hookline-replica"])

    sessions = [f"session-{number}" for number in range(12)]
    chosen = [replica(one) for one in sessions]
    assert [replica(one) for one in sessions] == chosen
    assert len(set(chosen)) == 2


def test_operators_paths_and_errors_are_the_server_s(http: httpx.Client) -> None:
    assert [http.get(path).status_code for path in ("/health", "/ready", "/metrics", "/")] == [200] * 4
    refused = http.post("/v1/completions", json={**BODY, "max_tokens": 9999})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_drill_finds_no_fault() -> None:
    command = [sys.executable, "tools/drill_ray_serve.py", "--streams", "64", "--tokens", "200"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count('"part"') == 3
