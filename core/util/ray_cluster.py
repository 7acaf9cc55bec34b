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
"""The type of Ray's error, or a word in its text, if a cluster's token is missing."""
HEAD_S = 5.0
"""Seconds for the head node to accept a connection; Ray itself would try for two minutes."""


def imported_ray(asker: str) -> Any:
    """The package ray, with the submodules that Hookline uses. Raises: ConfigError if it is not installed."""
    try:
        import ray
        import ray.util.placement_group
    except ImportError as error:
        raise ConfigError(f'{asker} needs the package ray: pip install "hookline[ray]"') from error
    return ray


def connected_ray(asker: str) -> Any:
    """The package ray, connected with a cluster: this process's, else that of RAY_ADDRESS, else a new one.

    asker: the name, in errors, of the feature that needs Ray.
    Raises: ConfigError if it is not installed, the head node does not answer, its Ray or Python has another version, or
    it requires a token that this process does not have.
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
            signal.signal(signal.SIGTERM, before)  # Ray sets its own handler, which must not replace the process's
    return ray


def cluster_address(asker: str) -> str | None:
    """The address for ray.init: None lets it look for a cluster; "local" starts a new one, if the cluster that ran last
    on this machine does not answer, which is logged. (Ray keeps the address of a killed cluster in a file, and tries it
    silently for two minutes.)

    Raises: ConfigError if RAY_ADDRESS names no head node that answers.
    """
    try:
        return _address(asker)
    except (OSError, ValueError) as error:
        raise _no_cluster(asker, error) from error


def _address(asker: str) -> str | None:
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:  # a private name, which may change: then Ray itself reports the error, two minutes later
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
    """An error of ray.init in one line, by the text of its first cause."""
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
    """The last line of Ray's text, which may be a traceback, without the type's name if it is Hookline's; or ""."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return re.sub(r"^hookline\.[\w.]+: ", "", "".join(lines[-1:]))


def free_resources(ray: Any) -> list[Mapping[str, float]]:
    """The free resources of each living node, as last reported to the head node; if unknown, all of its resources."""
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


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call, which runs in a thread and goes on there after the time limit.

    Raises: TimeoutError if it is not done in time; the call's own error.
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
