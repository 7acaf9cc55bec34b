"""What the observers of an engine write for a server's /metrics. Knows none of them: those that write have `text`.

Imports nothing large, as the supervisor needs it before an engine's process begins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""The variable with the folder in which several front ends count HTTP requests together."""
_log = logging.getLogger("hookline")


def metrics_of(observers: Mapping[str, Any]) -> str:
    """The metrics of an engine with these observers, in Prometheus' text format."""
    return "".join(one.text() for one in observers.values() if hasattr(one, "text"))


def tell_of_metrics(observers: Mapping[str, Any]) -> None:
    """Warn if the observers that are given took the place of the one that writes metrics, which is there by default."""
    if observers and not any(hasattr(one, "text") for one in observers.values()):
        given = ",".join(observers)
        told = "observers=[%s] leaves /metrics without the engine's metrics; observers=[prometheus,%s] keeps both"
        _log.warning(told, given, given)
