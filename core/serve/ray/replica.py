"""A replica of the Ray Serve application: one engine, and the ASGI application around it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.core.errors import EngineError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class EngineReplica:
    """One engine in the replica's process. tree: the configuration as `core.serve.settings.validate_serve` takes it.

    driver: versions and plugins of the process that made the application, which must be the same here.

    Ray Serve calls its methods: the application is made once the engine has started, each health check asks the engine,
    and when the replica is deleted its running requests end first.
    """

    def __init__(self, tree: Mapping[str, Any], driver: Mapping[str, Any]) -> None:
        from hookline.core.frontend.async_llm import AsyncLLM
        from hookline.core.plugin.environment import check_here
        from hookline.core.plugin.host import PluginHost
        from hookline.core.serve.http.api_keys import read_keys
        from hookline.core.serve.settings import validate_serve
        from hookline.core.serve.throughput import Throughput
        from hookline.core.util.ray_cluster import node_here

        host = PluginHost.load()
        check_here(driver, node_here(), host)
        host.log_problems()
        self._run = validate_serve(tree, host)
        self._keys = read_keys(self._run.serve.api_key_file)
        self._throughput = Throughput(time.monotonic)
        host.manager.register(self._throughput)
        self._llm, self._host = AsyncLLM.from_config(self._run.config, host), host

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application that Ray Serve hands requests to, on the loop that they run on.

        Ray's proxy gives each response its X-Request-Id; ours has X-Hookline-Replica.
        """
        from ray import serve

        from hookline.core.serve.engine_metrics import tell_of_metrics
        from hookline.core.serve.http.app import make_app
        from hookline.core.serve.http.collecting import QuietCollector
        from hookline.core.serve.in_process import InProcessClient

        tell_of_metrics(self._llm.observers)
        client = InProcessClient(self._llm, self._run.serve, self._throughput)
        name: str = serve.get_replica_context().replica_id.unique_id
        headers = ((b"x-hookline-replica", name.encode()),)
        served = make_app(client, self._run.serve, self._keys, headers, host=self._host)
        QuietCollector(lambda: served.gate.num_open).start()
        served.life.watch.start()
        return served.app

    def check_health(self) -> None:
        """Ray Serve's health check; a replica that fails it is replaced.

        Raises: EngineError if the engine is dead.
        """
        if self._llm.death is not None:
            raise EngineError(self._llm.death)

    def __del__(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.close()
