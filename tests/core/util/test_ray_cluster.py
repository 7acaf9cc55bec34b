"""A Ray cluster is connected with, or one line says why not: by a Ray that is made up."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from hookline.core.batch.ray_parts import warn_if_none_fits
from hookline.core.errors import ConfigError
from hookline.core.sweep.hydra_settings import let_join_ray
from hookline.core.util import ray_cluster
from hookline.core.util.ray_cluster import connected_ray, within

TRACEBACK = 'Traceback (most recent call last):\n  File "node.py", line 996, in _init_gcs_client\n'
TOKEN = (
    "it wants a token, and here is none, or another one; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
    "~/.ray/auth_token to the head node's"
)


class AuthenticationError(Exception):
    """Ray's, by its name."""


def raised_from(cause):
    """What Ray raises if it cannot connect, which says why in its cause alone."""
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    error.__cause__ = cause
    return error


class FakeRay(ModuleType):
    """As much of the package as connecting needs. found: the address that Ray finds. fault: of ray.init."""

    def __init__(self, found=None, fault=None, is_initialized=False):
        super().__init__("ray")
        self.found, self.fault, self.told = found, fault, []
        self.is_initialized = lambda: is_initialized

    def init(self, **options):
        self.told.append(options["address"])
        if self.fault is not None:
            raise self.fault

    def find(self, address):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def installed(monkeypatch):
    def install(ray, given=None):
        services = SimpleNamespace(canonicalize_bootstrap_address=ray.find)
        others = {"ray.util": ray, "ray.util.placement_group": ray, "ray._private": ray}
        for name, module in {"ray": ray, **others, "ray._private.services": services}.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if given is not None:
            monkeypatch.setenv("RAY_ADDRESS", given)
        return ray

    monkeypatch.setattr(ray_cluster.socket, "create_connection", refuse)
    return install


def refuse(address, timeout):
    raise ConnectionRefusedError(111, "Connection refused")


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'engine\.executor=ray needs the package ray: pip install "hookline\[ray\]"'):
        connected_ray("engine.executor=ray")


def test_a_cluster_that_this_process_is_in_is_taken(installed):
    ray = installed(FakeRay(is_initialized=True), "nonsense")
    assert connected_ray("x") is ray and ray.told == []


def test_a_head_node_that_is_gone_is_told_at_once_and_with_its_address(installed):
    ray = installed(FakeRay("10.0.0.1:6379"), "auto")
    with pytest.raises(ConfigError) as found:
        connected_ray("batch.executor=ray")
    assert ray.told == [] and str(found.value) == (
        "batch.executor=ray finds no Ray cluster by RAY_ADDRESS=auto: no head node answers at 10.0.0.1:6379 "
        "([Errno 111] Connection refused); start one there, or unset RAY_ADDRESS"
    )


def test_a_cluster_that_ran_here_and_was_killed_is_not_waited_for_and_that_is_told(installed, caplog):
    ray = installed(FakeRay("10.0.0.1:6379"))
    assert connected_ray("engine.executor=ray") is ray and ray.told == ["local"]
    assert caplog.messages == [
        "engine.executor=ray: the Ray cluster that ran on this machine last does not answer at 10.0.0.1:6379 "
        "([Errno 111] Connection refused); another one is started here"
    ]


def test_a_head_node_that_answers_is_left_to_ray(installed, monkeypatch):
    monkeypatch.setattr(ray_cluster.socket, "create_connection", lambda address, timeout: SimpleNamespace(close=int))
    ray = installed(FakeRay("10.0.0.1:6379"), "10.0.0.1:6379")
    assert connected_ray("x") is ray and ray.told == [None]


def test_a_sweep_on_ray_looks_first_whether_the_cluster_answers(installed):
    installed(FakeRay("10.0.0.1:6379"))
    launcher, address = "hydra/launcher=ray", "hydra.launcher.ray.init.address"
    assert let_join_ray([launcher]) == [launcher, f"{address}=local"]
    given = f"{address}=10.0.0.2:6379"
    assert let_join_ray([launcher, given])[:2] == [launcher, given]
    installed(FakeRay("10.0.0.1:6379"), "auto")
    with pytest.raises(ConfigError, match="hydra/launcher=ray finds no Ray cluster by RAY_ADDRESS=auto: no head node"):
        let_join_ray([launcher])


@pytest.mark.parametrize(
    ("given", "ray", "message"),
    [
        ("nonsense", FakeRay(ValueError("Invalid address format: nonsense")), "Invalid address format: nonsense"),
        ("auto", FakeRay(ConnectionError("Could not find any Ray")), "Could not find any Ray"),
        ("local", FakeRay(fault=RuntimeError("Version mismatch:\n Ray: 2.9")), "Version mismatch: Ray: 2.9"),
        ("local", FakeRay(fault=raised_from(ValueError("no\nport"))), "no port"),
        ("local", FakeRay(fault=RuntimeError(f"Last error: {TRACEBACK}ValueError: no port\n")), "ValueError: no port"),
        (
            "local",
            FakeRay(fault=raised_from(RuntimeError(f"{TRACEBACK}ray.exceptions.AuthenticationError: RPC\n"))),
            TOKEN,
        ),
        ("local", FakeRay(fault=AuthenticationError("Token authentication is enabled, but")), TOKEN),
    ],
    ids=["no address", "none runs", "another version", "a cause", "a traceback", "another token", "no token"],
)
def test_what_ray_finds_wrong_is_one_line(given, ray, message, installed):
    installed(ray, given)
    with pytest.raises(ConfigError) as found:
        connected_ray("x")
    assert str(found.value) == f"x finds no Ray cluster by RAY_ADDRESS={given}: {message}"


def test_an_actor_that_no_node_can_hold_is_told_with_the_numbers(caplog):
    nodes = [{"Alive": alive, "Resources": {"CPU": cpus}} for alive, cpus in ((True, 2.0), (True, 4.0), (False, 64.0))]
    ray = SimpleNamespace(nodes=lambda: nodes)
    warn_if_none_fits(ray, "batch.executor=ray", 4, 0)
    assert not caplog.records
    warn_if_none_fits(ray, "batch.executor=ray", 8, 1)
    assert caplog.messages == [
        "batch.executor=ray waits: an engine takes 8 CPUs and 1 GPUs of one node, and the nodes of this Ray cluster "
        "have 4 and 0; 2 and 0"
    ]


def test_a_call_that_ends_in_time_gives_what_it_brings_and_another_one_is_left_behind():
    assert within(10.0, lambda: 5) == 5
    with pytest.raises(KeyError):
        within(10.0, {}.popitem)
    is_over = threading.Event()
    with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"):
        within(0.01, is_over.wait)
    is_over.set()
