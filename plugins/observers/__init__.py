"""The observers that ship with Hookline: their options and their registration. Imports no observer code."""

from dataclasses import dataclass

from hookline.core.contracts import Needs, Registrar, hookimpl

API_VERSION = 2


@dataclass
class PrometheusConfig:
    """Metrics of one engine, in the text format that Prometheus scrapes."""

    port: int | None = None
    """Port of an HTTP endpoint for scraping; 0 takes a free one, None opens none: `text()` has the same."""
    address: str = "127.0.0.1"
    """Address that the endpoint listens on; 0.0.0.0 for all."""
    model_name: str = ""
    """Value of the label `model_name`; the checkpoint's name if empty."""


@hookimpl
def register_observers(register: Registrar) -> None:
    """Register prometheus."""
    register(
        "prometheus",
        "hookline.plugins.observers.prometheus:Prometheus",
        config=PrometheusConfig,
        help="metrics for Prometheus, under vLLM's names with the prefix hookline:",
        needs=Needs(packages=("prometheus_client",)),
    )
