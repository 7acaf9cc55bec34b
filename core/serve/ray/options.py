"""The keys `ray.*`, and the options of Ray Serve that follow from them and from the engine's sizes. Does not import
Ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.config.schema import build
from hookline.core.config.settings import Config
from hookline.core.errors import ConfigError
from hookline.core.serve.settings import ServeConfig
from hookline.core.util.ranges import bounded, check_ranges

PREFIX = "ray."
NOT_OURS = {
    "host": "http_options",
    "port": "http_options",
    "tls_certificate": "http_options",
    "tls_key": "http_options",
    "receive_s": "http_options",
    "unread_s": "http_options",
    "max_header_bytes": "http_options",
    "hosts": "http_options",
    "processes": "proxy_location",
    "replicas": "ray.min_replicas and ray.max_replicas",
    "restart": "its health checks, which always replace a dead replica",
}
"""Keys of `serve` about connections and processes, which Ray Serve runs -> what to use instead."""
STICKY_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
CLOSE_S = 10.0
"""Seconds for a replica to release its engine after its requests have ended."""


@dataclass(frozen=True)
class RayOptions:
    """Keys `ray.*` of the application.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    name: str = "hookline"
    """The deployment's name, by which a Serve config can override these options."""
    min_replicas: int = bounded(1, 0)
    """Least number of replicas."""
    max_replicas: int | None = bounded(None, 1)
    """Largest number of replicas; None: min_replicas, so that nothing is scaled."""
    target_ongoing_requests: float | None = bounded(None, above=0)
    """Requests of a replica, running and waiting, above which further replicas are started and below which fewer do.
    None: engine.max_num_seqs, so that a queue starts one."""
    max_ongoing_requests: int | None = bounded(None, 1)
    """Requests that a replica is sent at once; further ones wait at the proxy. None: twice engine.max_num_seqs, so that
    the engine always has the next ones."""
    upscale_delay_s: float = bounded(10.0, 0)
    """Seconds for which there must be too few replicas before another is started."""
    downscale_delay_s: float = bounded(300.0, 0)
    """Seconds for which there must be too many replicas before one is ended."""
    look_back_s: float = bounded(30.0, above=10)
    """Seconds over which requests are averaged for both; they are counted every 10 s."""
    sticky: bool = True
    """Send the requests of a session (X-Session-Id) to one replica, and others to any; else each to the less busy one
    of two."""
    num_cpus: float = bounded(1.0, 0)
    """CPUs of the cluster that a replica takes."""
    num_gpus: float | None = bounded(None, 0)
    """GPUs that it takes. None: one for each rank, unless device=cpu, or device=auto and the cluster has none."""

    def __post_init__(self) -> None:
        check_ranges(RayOptions, vars(self), "ray")
        most = self.max_replicas
        if most is not None and most < self.min_replicas:
            raise ConfigError(f"ray.max_replicas={most} is less than ray.min_replicas={self.min_replicas}")
        if most is None and not self.min_replicas:
            raise ConfigError("ray.min_replicas=0 needs ray.max_replicas: else there is never a replica")


def split_arguments(given: Mapping[str, Any]) -> tuple[list[str], RayOptions]:
    """Split the application's arguments into those of `hookline serve`'s command line and the options for Ray.

    given: `key=value` of `serve run`, or of a Serve config's `args`, whose values may be nested.
    Raises: ConfigError for a key that Ray Serve replaces, and for an invalid option.
    """
    import yaml

    flat = dict(_flat(given))
    for key in flat:
        section, _, name = key.partition(".")
        if section == "serve" and name in NOT_OURS:
            raise ConfigError(f"{key} has no effect under Ray Serve: use {NOT_OURS[name]}")
    options = {key.removeprefix(PREFIX): value for key, value in flat.items() if key.startswith(PREFIX)}
    read = {key: yaml.safe_load(value) if isinstance(value, str) else value for key, value in options.items()}
    arguments = [f"{key}={_spelt(value)}" for key, value in flat.items() if not key.startswith(PREFIX)]
    return arguments, build(RayOptions, read, "ray")


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def _spelt(value: Any) -> str:
    """A value as text for the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def deployment_options(options: RayOptions, config: Config, serve: ServeConfig, num_gpus: float) -> dict[str, Any]:
    """Keyword arguments of Ray Serve's `Deployment.options`. num_gpus: of each replica."""
    num_seqs = config.engine.max_num_seqs
    found: dict[str, Any] = {
        "name": options.name,
        "max_ongoing_requests": options.max_ongoing_requests or 2 * num_seqs,
        "max_queued_requests": serve.max_requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "ray_actor_options": {"num_cpus": options.num_cpus, "num_gpus": num_gpus},
        "graceful_shutdown_timeout_s": serve.drain_s + CLOSE_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 3,
    }
    if options.sticky:
        found["request_router_config"] = {"request_router_class": STICKY_ROUTER}
    most = options.min_replicas if options.max_replicas is None else options.max_replicas
    if most == options.min_replicas:
        return {**found, "num_replicas": most}
    scaling = {
        "min_replicas": options.min_replicas,
        "max_replicas": most,
        "target_ongoing_requests": options.target_ongoing_requests or float(num_seqs),
        "upscale_delay_s": options.upscale_delay_s,
        "downscale_delay_s": options.downscale_delay_s,
        "look_back_period_s": options.look_back_s,
    }
    return {**found, "autoscaling_config": scaling}


def gpus_of(options: RayOptions, config: Config, num_in_cluster: float) -> float:
    """GPUs of a replica. num_in_cluster: GPUs that the cluster has now."""
    if options.num_gpus is not None:
        return options.num_gpus
    if config.device == "cpu" or (config.device == "auto" and not num_in_cluster):
        return 0.0
    return float(config.num_ranks)
