"""`hookline.serve.ray:app`, named by `serve run` and Serve configs: makes a Ray Serve application from arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from hookline.core.serve.ray.options import deployment_options, gpus_of, split_arguments
from hookline.core.serve.ray.replica import EngineReplica

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: Mapping[str, Any]) -> Application:
    """Ray Serve's application. arguments: the keys of `hookline serve`, and `ray.*` for Ray Serve itself.

    Raises: ConfigError or PluginError in one line, before anything is started.
    """
    from hookline.core.config.compose import compose
    from hookline.core.plugin.environment import environment
    from hookline.core.plugin.host import PluginHost
    from hookline.core.serve.settings import ServeKeys, validate_serve

    given, options = split_arguments(arguments)
    host = PluginHost.load()
    (job,) = compose(given, host, ServeKeys, "serve", positional="model")
    run = validate_serve(job.tree, host)
    num_in_cluster = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0
    num_gpus = gpus_of(options, run.config, num_in_cluster)
    deployment = serve.deployment(serve.ingress()(EngineReplica))
    return deployment.options(**deployment_options(options, run.config, run.serve, num_gpus)).bind(
        job.tree, environment(host)
    )
