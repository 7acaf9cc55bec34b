"""Versions and plugins, which must be equal in all processes that compute for one caller, and their comparison."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost


def environment(host: PluginHost | None = None) -> dict[str, Any]:
    """The facts that must be equal in all processes, by name. host: the plugins of this process; None loads them."""
    return {
        "hookline": _version("hookline"),
        "torch": _version("torch").partition("+")[0],
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "HOOKLINE_PLUGINS": os.environ.get("HOOKLINE_PLUGINS", ""),
        "plugins": list((PluginHost.load() if host is None else host).description),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first difference between another process's environment and ours, with the fix; None if they are equal."""
    for name, ours in here.items():
        theirs = there.get(name)
        if theirs != ours:
            return _told(name, theirs, ours)
    return None


def check_here(drivers: Mapping[str, Any], node: str, host: PluginHost | None = None) -> None:
    """Make sure that this process has the driver's environment. node: the node of this process, for the message.
    host: see `environment`.

    Raises: ConfigError naming the node and the first difference.
    """
    if (told := difference(environment(host), drivers)) is not None:
        raise ConfigError(f"node {node} has another environment than the driver: {told}")


def _told(name: str, theirs: Any, ours: Any) -> str:
    if not isinstance(ours, list):
        return f"{name} is {theirs or 'not set'} there and {ours or 'not set'} here; make it the same on every node"
    missing = [line for line in ours if line not in theirs][:2]
    surplus = [line for line in theirs if line not in ours][:2]
    parts = [f"without {'; '.join(missing)}"] * bool(missing) + [f"with {'; '.join(surplus)}"] * bool(surplus)
    return f"its plugins are {' and '.join(parts)}; install the same on every node"
