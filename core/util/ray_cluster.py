"""The Ray cluster of a process: connected with, or an error of one line that says why not. Imports Ray on demand."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hookline.core.errors import ConfigError

T = TypeVar("T")
logger = logging.getLogger("hookline")
ADDRESS = "RAY_ADDRESS"
NO_TOKEN = "AuthenticationError"
"""What Ray raises, or names in what it raises, if a cluster's token is missing."""
HEAD_S = 5.0
"""For the head node to take a connection; Ray itself would try for two minutes."""


def imported_ray(asker: str) -> Any:
    """The package ray with all that we use of it. Raises: ConfigError if it is not installed."""
    try:
        import ray
        import ray.util.placement_group
    except ImportError as error:
        raise ConfigError(f'{asker} needs the package ray: pip install "hookline[ray]"') from error
    return ray


def connected_ray(asker: str) -> Any:
    """The package ray, connected with a cluster: the one this process is in, that of RAY_ADDRESS, or one of its own.

    asker: what needs it, as errors call it.
    Raises: ConfigError if it is not installed, the head node does not answer, its Ray or Python is another one, or it
    wants a token that is not here.
    """
    ray = imported_ray(asker)
    if ray.is_initialized():
        return ray
    address, before = cluster_address(asker), signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, include_dashboard=False)
    except Exception as error:  # no answer, another version, no address at all, no token
        raise _no_cluster(asker, error) from error
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray sets one of its own, which must not hide the process's
    return ray


def cluster_address(asker: str) -> str | None:
    """What ray.init is to be told: None lets it look for a cluster; "local" starts one, since the cluster that ran on
    this machine last does not answer, which is logged. Ray keeps the address of a cluster that was killed in a file,
    and tries it for two minutes without a word.

    Raises: ConfigError if RAY_ADDRESS names no head node that answers.
    """
    try:
        return _address(asker)
    except (OSError, ValueError) as error:
        raise _no_cluster(asker, error) from error


def _address(asker: str) -> str | None:
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:  # it may change: then Ray says what is wrong, two minutes later
        return None
    given = os.environ.get(ADDRESS)
    if given and "://" in given:  # a client of Ray, which looks for its server itself
        return None
    address = canonicalize_bootstrap_address(None)
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), HEAD_S).close()
    except OSError as error:
        if not given:
            lost = f"the Ray cluster that ran on this machine last does not answer at {address} ({error})"
            logger.warning("%s: %s; another one is started here", asker, lost)
            return "local"
        told = f"no head node answers at {address} ({error}); start one there, or unset {ADDRESS}"
        raise ConnectionError(told) from None
    return None


def _no_cluster(asker: str, error: Exception) -> ConfigError:
    given = os.environ.get(ADDRESS)
    named = f" by {ADDRESS}={given}" if given else ""
    return ConfigError(f"{asker} finds no Ray cluster{named}: {_why(error)}")


def _why(error: BaseException) -> str:
    """What ray.init raised, and from what, in one line."""
    told = str(error)
    if NO_TOKEN in (type(error).__name__, *re.findall(r"\w+", told)):
        return (
            "it wants a token, and here is none, or another one; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "~/.ray/auth_token to the head node's"
        )
    if error.__cause__ is not None:
        return _why(error.__cause__)
    lines = [line for line in told.splitlines() if line.strip()]
    return " ".join((lines[-1] if "Traceback" in told else told).split())


def last_line(told: str) -> str:
    """What Ray tells last, in a text that may be a traceback: without the name of its type if that is ours; or ""."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return re.sub(r"^hookline\.[\w.]+: ", "", "".join(lines[-1:]))


def free_resources(ray: Any) -> list[Mapping[str, float]]:
    """What each living node can give now, as the head node last heard; where Ray does not tell, what nodes have."""
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    try:
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
    except Exception:  # no public part of Ray, which may change
        return list(nodes.values())
    return [free.get(node, {}) for node in nodes]


def node_here() -> str:
    """The node of this process, which Ray runs, as Ray calls it."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def warn_if_none_fits(ray: Any, asker: str, num_cpus: float, num_gpus: float) -> None:
    """Say so if no node of the cluster is large enough for one actor, which waits then, since more nodes may come."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    sizes = [(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes]
    if not any(cpus >= num_cpus and gpus >= num_gpus for cpus, gpus in sizes):
        there = "; ".join(f"{cpus:g} and {gpus:g}" for cpus, gpus in sorted(set(sizes), reverse=True))
        wanted = f"an engine takes {num_cpus:g} CPUs and {num_gpus:g} GPUs of one node"
        logger.warning("%s waits: %s, and the nodes of this Ray cluster have %s", asker, wanted, there)


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call brings or raises, if it does so in time; else it goes on in a thread of its own.

    Raises: TimeoutError if it is not done by then.
    """
    done = threading.Event()
    found: list[T] = []
    faults: list[Exception] = []

    def _run() -> None:
        try:
            found.append(call())
        except Exception as error:
            faults.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=_run, name="hookline-ray", daemon=True).start()
    except RuntimeError:  # no thread starts while the interpreter ends
        _run()
    if not done.wait(seconds):
        raise TimeoutError(f"not done within {seconds:g} s")
    if faults:
        raise faults[0]
    return found[0]
