"""deploy/: each file is sound, names paths and keys that exist, and the dashboard asks for metrics that there are."""

import itertools
import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytest.importorskip("starlette", reason="needs the extra: pip install hookline[serve]")
pytest.importorskip("prometheus_client", reason="needs the extra: pip install hookline[prometheus]")
from prometheus_client.parser import text_string_to_metric_families

from hookline.core.config.compose import compose
from hookline.core.plugin.check_plugin import new_manager
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.observers import Observers
from hookline.core.serve.http.gate import Life
from hookline.core.serve.http.metrics import HttpMetrics
from hookline.core.serve.http.operations import operations
from hookline.core.serve.processes.replica_client import UP
from hookline.core.serve.settings import ServeKeys, validate_serve
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.warm.settings import WarmKeys
from hookline.plugins.observers import PrometheusConfig
from hookline.plugins.observers.prometheus import Prometheus
from tests.doc_pages import ROOT, commands
from tests.serving import server, wait_for

DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana/hookline.json"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
MANIFESTS = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
[CONTAINER] = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["containers"]
ENTRY = json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)[1])
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        return None if name.partition(".")[0] in {absent} else super().find_spec(name, *arguments)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
"""A sitecustomize.py with which some packages cannot be imported, in a server's child processes too."""


def served(arguments):
    """The server's configuration that the arguments of a container make."""
    assert ENTRY[:2] == ["hookline", "serve"]
    host = PluginHost.load()
    (job,) = compose([*ENTRY[2:], *arguments], host, ServeKeys, "serve")
    return validate_serve(job.tree, host)


def test_each_file_can_be_read():
    for path in DEPLOY.rglob("*.yaml"):
        assert all(yaml.safe_load_all(path.read_text())), path
    suffixes = {path.suffix for path in DEPLOY.rglob("*") if path.is_file()}
    assert suffixes == {"", ".json", ".txt", ".yaml"}  # the first is the Dockerfile's


@pytest.mark.parametrize("arguments", [CONTAINER["args"], COMPOSE["services"]["hookline"]["command"]])
def test_containers_are_given_keys_that_exist_and_the_port_that_is_asked(arguments):
    run = served(arguments)
    assert (run.serve.host, run.serve.port) == ("0.0.0.0", 8000)
    assert CONTAINER["ports"][0]["containerPort"] == 8000 and "EXPOSE 8000" in DOCKERFILE
    assert [one.name for one in run.config.observers] == ["prometheus"]  # what the dashboard shows


def test_probes_ask_for_paths_that_exist():
    paths = {route.path for route in operations(None, Life(), HttpMetrics(), None)}
    probes = {name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert set(probes.values()) <= paths
    assert probes == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert "/health" in DOCKERFILE


def test_nobody_is_killed_while_requests_drain():
    grace = MANIFESTS["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    pause = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = served(CONTAINER["args"]).serve.drain_s
    assert grace > pause + drain_s
    assert int(COMPOSE["services"]["hookline"]["stop_grace_period"].removesuffix("s")) > drain_s


def test_the_image_installs_extras_in_pinned_versions_and_what_it_copies_is_not_ignored():
    installed = 'pip install --no-cache-dir -c /src/deploy/constraints.txt "/src[serve,otel]"'
    assert installed in DOCKERFILE and "USER 1000" in DOCKERFILE
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (.*) /\S+$", DOCKERFILE, re.M) for word in line.split()}
    assert copied == kept


def test_the_image_starts_from_the_kernels_that_its_build_can_compile():
    exported = re.search(r"hookline warm export=(\S+) \$WARM", DOCKERFILE)[1]
    assert served([]).config.engine.kernel_cache == exported
    assert f"mkdir /hub {exported} && chown hookline /hub {exported}" in DOCKERFILE
    for text in (DOCKERFILE, (ROOT / "docs/deploying.md").read_text()):
        given = re.search(r'--build-arg WARM="([^"]*)"', text)[1].split()
        (job,) = compose([f"export={exported}", *given], PluginHost.load(), WarmKeys, "warm")
        assert (job.tree["card"], job.tree["export"]) == ("h200", exported)


@pytest.mark.parametrize("extra", ["serve", "otel"])
def test_the_image_pins_all_that_it_installs(extra):
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    on_the_image = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "extra": extra}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        required = Requirement(text)
        assert required.marker is None or required.marker.evaluate(on_the_image)
        assert required.specifier.contains(pinned[canonicalize_name(required.name)]), text


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "deploy/Dockerfile"),
        ("kubernetes-validate", "--strict", "--quiet", "deploy/kubernetes.yaml"),
        ("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml"),
    ],
    ids=lambda command: command[0],
)
def test_the_linters_of_their_formats_find_nothing(command):
    linter = shutil.which(command[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip(f"no {command[0]} on this machine")
    ended = subprocess.run([linter, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_kustomization_names_the_manifests():
    base = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    assert base["kind"] == "Kustomization" and base["resources"] == ["kubernetes.yaml"]


def brought_by(extra):
    """The distributions that an installation with this extra brings, Hookline's own requirements among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, brought = [*project["dependencies"], *project["optional-dependencies"][extra]], {"hookline"}
    while waiting:
        required = Requirement(waiting.pop())
        name = canonicalize_name(required.name)
        applies = required.marker is None or any(required.marker.evaluate({"extra": one}) for one in ("", extra))
        if applies and name not in brought:
            brought.add(name)
            waiting += [one for one in requires(name) or () if "extra ==" not in one]
    return brought


@pytest.mark.slow
def test_what_the_image_installs_answers_with_a_schema_and_with_a_forced_call(tmp_path):
    brought = brought_by("serve")  # without otel, which only adds to it
    absent = {
        module
        for module, distributions in packages_distributions().items()
        if not brought & set(map(canonicalize_name, distributions))
    }
    assert "pytest" in absent and "starlette" not in absent
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(absent=sorted(absent)))
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "switch", "parameters": schema}}
    asked = {"messages": [{"role": "user", "content": "on?"}], "max_tokens": 200, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "state", "schema": schema}}
    with server("device=cpu", PYTHONPATH=f"{tmp_path}:{ROOT}") as running:
        url = f"{running.url}/v1/chat/completions"
        answer = httpx.post(url, json={**asked, "response_format": form}, timeout=60).json()
        assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"on"}, answer
        forced = {"type": "function", "function": {"name": "switch"}}
        answer = httpx.post(url, json={**asked, "tools": [tool], "tool_choice": forced}, timeout=60).json()
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"on"}, call


def queries():
    """The queries of the dashboard's panels, as Grafana would send them, and the expressions of the alerts."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            found.append(target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*"))
    return found, [
        rule["expr"]
        for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_a_server_exports():
    prometheus = Prometheus(PrometheusConfig(model_name="tiny"))
    fake_engine(PlainScheduler(), observers=Observers(new_manager(), {"prometheus": prometheus}))
    text = "\n".join(itertools.chain(*queries()))
    families = [*text_string_to_metric_families(prometheus.text()), *HttpMetrics().families()]
    exported = {sample.name for family in families for sample in family.samples}
    exported |= {f"{family.name}_{end}" for family in families for end in ("total", "bucket")}  # without a sample yet
    asked = set(re.findall(r"(?:hookline|process)_\w+", text))
    assert asked - exported <= {UP, "hookline_late_compilations_total"} and len(asked) >= 20  # of replicas; of a GPU


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian's package)")
def test_a_prometheus_that_scrapes_a_server_answers_every_query_of_the_dashboard(tmp_path):
    checked = subprocess.run(
        ["promtool", "check", "rules", DEPLOY / "alerts.yaml"], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with server("device=cpu", "serve.processes=2") as running:
        config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s"}
        config["rule_files"] = [str(DEPLOY / "alerts.yaml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [running.url.removeprefix("http://")]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            asked = {"prompt": "import os", "max_tokens": 4}

            def value(query):
                url = f"http://127.0.0.1:{port}/api/v1/query"
                answer = httpx.get(url, params={"query": query}, timeout=10).json()
                assert answer["status"] == "success", (query, answer)
                return [float(one["value"][1]) for one in answer["data"]["result"]]

            def answered(query):
                def is_answered():  # rates need two scrapes with something in between
                    httpx.post(f"{running.url}/v1/completions", json=asked, timeout=60).raise_for_status()
                    return [one for one in value(query) if not math.isnan(one)]

                return wait_for(is_answered)

            # Until its storage is open, Prometheus answers queries with a text and status 503.
            wait_for(lambda: httpx.get(f"http://127.0.0.1:{port}/-/ready", timeout=10).is_success)
            panels, alerts = queries()
            assert all(answered(query) for query in panels)
            assert all(value(query) is not None for query in alerts)
            total = 'sum(hookline_http_requests_total{path="/v1/completions", status="200"})'
            wait_for(lambda: value(total)[0] >= 5)  # counted over all front ends
            assert value("count(ALERTS{alertstate='firing'})") == []
        finally:
            process.terminate()
            process.wait(20)


def test_the_dashboards_panels_have_room_and_a_unit():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert all(panel["fieldConfig"]["defaults"]["unit"] and panel["targets"][0]["expr"] for panel in panels)


def test_the_page_names_files_that_are_there():
    page = (ROOT / "docs/deploying.md").read_text()
    names = set(re.findall(r"deploy/[\w./-]+\w", page + "\n".join(commands(ROOT / "docs/deploying.md"))))
    assert {
        "deploy/Dockerfile",
        "deploy/compose.yaml",
        "deploy/kubernetes.yaml",
        "deploy/grafana/hookline.json",
    } <= names
    assert all((ROOT / name).exists() for name in names)
    mounted = [volume.split(":")[0] for one in COMPOSE["services"].values() for volume in one["volumes"]]
    assert all((DEPLOY / name).exists() for name in mounted if name.startswith("./"))
    assert all(shlex.split(line)[0] in ("docker", "kubectl") for line in commands(ROOT / "docs/deploying.md"))
