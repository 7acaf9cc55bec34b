"""From a command line to a running server: what `core.serve` does. Bare at import, as its package says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hookline.core.cli.command import guarded, is_sweep

if TYPE_CHECKING:
    from socket import socket

    from hookline.core.plugin.host import PluginHost
    from hookline.core.serve.http.api_keys import ApiKeys
    from hookline.core.serve.processes.shares import Share
    from hookline.core.serve.settings import ServeRun

    Announce = Callable[[Sequence[str], int], None]

NEEDED = ("starlette", "uvicorn", "msgspec", "zmq")
"""What the extra brings."""
ENGINE = "hookline.core.serve.processes.engine_main:main"
"""What the engine's process runs."""
LOCAL = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches."""
_log = logging.getLogger("hookline")


def main(arguments: Sequence[str] | None = None, *, engine: str = ENGINE) -> int:
    """Run the command line and return its exit code. engine: what the engine's process runs, as "module:function"."""
    return guarded(partial(_run, engine=engine), arguments)


def _run(arguments: list[str], engine: str) -> int:
    from hookline.core.config.compose import compose
    from hookline.core.errors import ConfigError
    from hookline.core.plugin.host import PluginHost
    from hookline.core.serve.settings import ServeKeys, validate_serve

    host = PluginHost.load()
    host.log_problems()
    if is_sweep(arguments):
        raise ConfigError("a server runs one configuration; leave out -m (--multirun)")
    jobs = compose(arguments, host, ServeKeys, "serve")
    if not jobs:
        return 0
    run = validate_serve(jobs[0].tree, host)
    _check_extra()
    return _serve(run, host, engine)


def _check_extra() -> None:
    """Raises: ConfigError if a library of the extra is missing."""
    from importlib.util import find_spec

    from hookline.core.errors import ConfigError

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"hookline serve needs {', '.join(missing)}: pip install 'hookline[serve]'")


def _serve(run: ServeRun, host: PluginHost, engine: str) -> int:
    from hookline.core.serve.http.api_keys import read_keys
    from hookline.core.serve.http.server import listening_sockets
    from hookline.core.serve.http.tls import check_tls
    from hookline.core.serve.processes.shares import shares_of
    from hookline.core.serve.settings import num_front_ends

    keys = read_keys(run.serve.api_key_file)  # a mistake here costs no start-up
    check_tls(run.serve)
    if run.serve.host not in LOCAL and not len(keys):
        _log.warning("serve.host=%s lets others in, and no API key is set: docs/serving.md", run.serve.host)
    shares = shares_of(run.config, run.serve.replicas)
    count = num_front_ends(run.serve)
    sockets = listening_sockets(run.serve, max(1, count))
    port = sockets[0].getsockname()[1]

    def announce(names: Sequence[str], max_model_len: int) -> None:
        from hookline.core.serve.announce import start_message

        print(start_message(run.serve, port, names, max_model_len, has_keys=len(keys) > 0), flush=True)

    if count:
        return _serve_from_processes(run, sockets, announce, engine, shares)
    return _serve_here(run, host, sockets, keys, announce)


def _serve_from_processes(
    run: ServeRun, sockets: list[socket], announce: Announce, engine: str, shares: Sequence[Share]
) -> int:
    import asyncio

    from hookline.core.serve.processes.supervisor import Supervisor

    def ready(news: dict[str, Any]) -> None:
        announce(news["names"], news["max_model_len"])

    supervisor = Supervisor(run, sockets, ready, engine, shares)
    return asyncio.run(supervisor.serve())


def _serve_here(run: ServeRun, host: PluginHost, sockets: list[socket], keys: ApiKeys, announce: Announce) -> int:
    """Engine and HTTP in this process."""
    import asyncio
    import signal
    import time

    from hookline.core.frontend.async_llm import AsyncLLM
    from hookline.core.serve.http.app import make_app
    from hookline.core.serve.http.collecting import QuietCollector
    from hookline.core.serve.http.server import serve_http
    from hookline.core.serve.in_process import InProcessClient
    from hookline.core.serve.processes.front_main import run_loop
    from hookline.core.serve.throughput import Throughput

    throughput = Throughput(time.monotonic)
    host.manager.register(throughput)
    llm = AsyncLLM.from_config(run.config, host)

    async def serve() -> int:
        client = InProcessClient(llm, run.serve, throughput)
        loop = asyncio.get_running_loop()
        stopping: asyncio.Future[float] = loop.create_future()

        def stop() -> None:
            if not stopping.done():
                stopping.set_result(run.serve.drain_s)
            else:  # told again: at once
                client.closing = loop.create_task(client.aclose())

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        served, facts = make_app(client, run.serve, keys), client.facts
        QuietCollector(lambda: served.gate.num_open).start()
        try:
            await serve_http(served, sockets, run.serve, stopping, lambda: announce(facts.names, facts.max_model_len))
        finally:
            await client.aclose()
        return 0

    return run_loop(serve())
