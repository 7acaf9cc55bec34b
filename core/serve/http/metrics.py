"""The response of /metrics: the engine's metrics and the HTTP metrics, written by prometheus_client's application.

The engine's metrics come as text, from its process. The HTTP metrics are of this process, or of all front ends that
share a folder of prometheus_client's (PROMETHEUS_MULTIPROC_DIR).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, make_asgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Scope

from hookline.core.contracts import ApiError
from hookline.core.serve.engine_metrics import SHARED

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
METHODS = frozenset(("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"))
OTHER = "other"
"""Label of paths without an endpoint and of unknown methods: clients may make up any number, so they share a series."""
LEFT = "left"
"""The status of a request whose client left before its answer began."""


class HttpMetrics:
    """Counts requests of this process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "hookline_http_requests",
            "HTTP requests, by path and status.",
            ["method", "path", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "hookline_http_request_duration_seconds",
            "From the head of an HTTP request to the end of its answer.",
            ["path"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._series: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        """By method, path and status, which are as few as the labels: labels() takes 2 us a call."""

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request that is over. status: 0 if no answer began."""
        path = path_of(scope)
        method = scope["method"] if scope["method"] in METHODS else OTHER
        series = self._series.get((method, path, status))
        if series is None:
            counter = self._requests.labels(method, path, str(status) if status else LEFT)
            series = self._series[method, path, status] = counter, self._seconds.labels(path)
        series[0].inc()
        series[1].observe(seconds)

    def families(self) -> Iterator[Metric]:
        """The HTTP metrics of this process."""
        return iter(self._registry.collect())

    def app(self, text: str) -> ASGIApp:
        """An application that answers one scrape. text: the engine's metrics in Prometheus' format.

        Raises: ApiError if an observer's text is not in Prometheus' format.
        """
        registry = CollectorRegistry()
        registry.register(Families(families_in(text)))
        folder = os.environ.get(SHARED)
        if folder is None:
            registry.register(self._registry)
        else:
            MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        app: ASGIApp = make_asgi_app(registry)
        return app


class Families(Collector):
    """Metrics that are known already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        return iter(self._families)


def families_in(text: str, **labels: str) -> list[Metric]:
    """The metrics of a text in Prometheus' format, each sample with these labels before its own.

    The `_created` series (the time when another series began) are left out: no dashboard uses them.
    Raises: ApiError if the text is not in that format.
    """
    try:
        families = [one for one in text_string_to_metric_families(text) if not one.name.endswith("_created")]
    except ValueError as error:
        message = f"what an observer exports is not in Prometheus' text format: {error}"
        raise ApiError(500, message, "server_error", code="metrics") from None
    for family in families:
        family.samples[:] = [one._replace(labels={**labels, **one.labels}) for one in family.samples]
    return families


def path_of(scope: Scope) -> str:
    """The path of the endpoint that a request reached, with the names of its parameters in place of their values."""
    if "endpoint" not in scope:
        return OTHER
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    for name, value in scope.get("path_params", {}).items():
        path = path.replace(str(value), f"{{{name}}}")
    return path
