"""From a command line to a running server: what `hookline serve` does. Bare at import, as its package says."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hookline.core.cli.command import guarded, is_sweep
from hookline.core.cli.logs import JSON, START, TEXT, chosen_form, form_in

if TYPE_CHECKING:
    from socket import socket

    from hookline.core.plugin.host import PluginHost
    from hookline.core.serve.http.api_keys import ApiKeys
    from hookline.core.serve.settings import ServeConfig, ServeRun

    Announce = Callable[[Sequence[str], int], None]

ENGINE = "hookline.core.serve.processes.engine_main:main"
"""The function that the engine's process runs, as "module:function"."""
LOCAL = ("127.0.0.1", "::1", "localhost")
"""Addresses that only programs on this machine can reach."""
_log = logging.getLogger("hookline")


def main(arguments: Sequence[str] | None = None, *, engine: str = ENGINE) -> int:
    """Run the command line and return its exit code. engine: what the engine's process runs, as "module:function"."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(partial(_run, engine=engine), given, form_in(given, "serve.log_format", TEXT), "serve")


def _run(arguments: list[str], engine: str) -> int:
    from hookline.core.config.compose import compose
    from hookline.core.errors import ConfigError
    from hookline.core.plugin.host import PluginHost
    from hookline.core.serve.extra import check_extra
    from hookline.core.serve.settings import ServeKeys, validate_serve
    from hookline.core.util.process import called_as

    host = PluginHost.load()
    host.log_problems()
    if is_sweep(arguments):
        raise ConfigError("a server runs one configuration; leave out -m (--multirun)")
    jobs = compose(arguments, host, ServeKeys, "serve", positional="model")
    if not jobs:
        return 0
    run = validate_serve(jobs[0].tree, host)
    check_extra(called_as("serve"))
    logging.getLogger(START).info("the configuration is sound; importing torch and the model's libraries")
    return _serve(run, host, engine)


def _serve(run: ServeRun, host: PluginHost, engine: str) -> int:
    import asyncio

    from hookline.core.serve.http.api_keys import a_key, read_keys
    from hookline.core.serve.http.sockets import listening_sockets
    from hookline.core.serve.http.tls import check_tls
    from hookline.core.serve.processes.shares import shares_of
    from hookline.core.serve.settings import num_front_ends

    keys = read_keys(run.serve.api_key_file)  # before the engine starts, so that an error comes at once
    check_tls(run.serve)
    if run.serve.host not in LOCAL and not len(keys):
        _log.warning("serve.host=%s lets others in, and no API key is set: docs/serving.md", run.serve.host)
    shares = shares_of(run.config, run.serve.replicas)
    count = num_front_ends(run.serve)
    sockets = listening_sockets(run.serve, max(1, count))
    announce = partial(_announce, run.serve, sockets[0].getsockname()[1], a_key(run.serve.api_key_file))
    if not count:
        return _serve_here(run, host, sockets, keys, announce)

    from hookline.core.serve.processes.supervisor import Supervisor

    return asyncio.run(Supervisor(run, sockets, announce, engine, shares).serve())


def _announce(settings: ServeConfig, port: int, a_key: str | None, names: Sequence[str], max_model_len: int) -> None:
    """Print that the server is ready: the model, the address, and a command to try. a_key: a shell's word for a key."""
    scheme = "http" if settings.tls_certificate is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    url = f"{scheme}://{host}:{port}"
    key = f'\n    -H "Authorization: Bearer {a_key}" \\' if a_key else ""
    insecure = " -k" if scheme == "https" else ""
    if chosen_form() == JSON:
        fields = {"url": url, "names": list(names), "max_model_len": max_model_len}
        _log.info("serving %s at %s/v1", ", ".join(names), url, extra={"fields": fields})
        return
    body = json.dumps({"model": names[0], "prompt": "Hello", "max_tokens": 16})
    text = f"""\
hookline: serving {", ".join(names)} (up to {max_model_len} tokens) at {url}/v1
  a page to try it    {url}/  (all endpoints: {url}/docs)
  health, metrics     {url}/health  {url}/metrics
  from a terminal     curl{insecure} {url}/v1/completions -H "Content-Type: application/json" \\{key}
    -d '{body}'
Stop it with Ctrl-C."""
    print(text, flush=True)


def _serve_here(run: ServeRun, host: PluginHost, sockets: list[socket], keys: ApiKeys, announce: Announce) -> int:
    """Run the engine and the HTTP server in this process."""
    import asyncio
    import signal
    import time

    from hookline.core.assembly.compiler_child import begin_early

    begin_early(run.config)
    from hookline.core.frontend.async_llm import AsyncLLM
    from hookline.core.serve.engine_metrics import tell_of_metrics
    from hookline.core.serve.http.app import make_app
    from hookline.core.serve.http.collecting import QuietCollector
    from hookline.core.serve.http.server import serve_http
    from hookline.core.serve.http.stopping import Stopping, tell_of_signal
    from hookline.core.serve.in_process import InProcessClient
    from hookline.core.serve.processes.front_main import run_loop
    from hookline.core.serve.throughput import Throughput

    throughput = Throughput(time.monotonic)
    host.manager.register(throughput)
    llm = AsyncLLM.from_config(run.config, host)

    async def _run_server() -> int:
        tell_of_metrics(llm.observers)
        client = InProcessClient(llm, run.serve, throughput)
        loop = asyncio.get_running_loop()
        stopping = Stopping()

        def _hear_signal() -> None:
            tell_of_signal(is_again=stopping.drain_s.done(), drain_s=run.serve.drain_s)
            stopping.tell(run.serve.drain_s)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _hear_signal)
        served, facts = make_app(client, run.serve, keys, host=host), client.facts
        QuietCollector(lambda: served.gate.num_open).start()
        try:
            await serve_http(served, sockets, run.serve, stopping, lambda: announce(facts.names, facts.max_model_len))
        finally:
            await client.aclose()
        return 0

    return run_loop(_run_server())
