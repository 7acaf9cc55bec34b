"""The observers that ship with Hookline: their options and their registration. Imports no observer code."""

from dataclasses import dataclass

from hookline.core.contracts import Needs, Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class PrometheusConfig:
    """Metrics of one engine, in the text format that Prometheus scrapes."""

    port: int | None = None
    """Port of an HTTP endpoint for scraping; 0 takes a free one, None opens none: `text()` has the same."""
    address: str = "127.0.0.1"
    """Address that the endpoint listens on; 0.0.0.0 for all."""
    model_name: str = ""
    """Value of the label `model_name`. If empty: the first of a server's `serve.names`, else the checkpoint's name."""
    prefix: str = "hookline_"
    """Begins the name of each metric of the engine; "vllm:" where dashboards made for vLLM shall show it."""


@dataclass
class OtelConfig:
    """A span for each request, sent by OpenTelemetry's protocol over HTTP."""

    endpoint: str | None = None
    """Where spans go, e.g. http://localhost:4318/v1/traces; None: where OpenTelemetry's own variables say."""
    service_name: str | None = None
    """The resource's `service.name`; None: what OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say, else hookline."""
    model_name: str = ""
    """Value of `gen_ai.request.model`. If empty: the first of a server's `serve.names`, else the checkpoint's name."""
    timeout_s: float = bounded(5.0, above=0)
    """Longest that one export may take; also the longest that closing the engine waits for the last spans."""


@hookimpl
def register_observers(register: Registrar) -> None:
    """Add the observers, prometheus and otel."""
    register(
        "prometheus",
        "hookline.plugins.observers.prometheus:Prometheus",
        config=PrometheusConfig,
        help="metrics for Prometheus, under vLLM's names with the prefix hookline_",
        needs=Needs(packages=("prometheus_client",)),
    )
    register(
        "otel",
        "hookline.plugins.observers.otel:OpenTelemetry",
        config=OtelConfig,
        help="a span for each request, with gen_ai attributes and without any text, by OTLP over HTTP",
        needs=Needs(packages=("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")),
    )
