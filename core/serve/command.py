"""From a command line to a running server: what `core.serve` does. Bare at import, as its package says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hookline.core.cli.command import guarded, is_sweep

if TYPE_CHECKING:
    from hookline.core.plugin.host import PluginHost
    from hookline.core.serve.settings import ServeRun

NEEDED = ("starlette", "uvicorn", "msgspec", "zmq")
"""What the extra brings."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return guarded(_run, arguments)


def _run(arguments: list[str]) -> int:
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
    return _serve(run, host)


def _check_extra() -> None:
    """Raises: ConfigError if a library of the extra is missing."""
    from importlib.util import find_spec

    from hookline.core.errors import ConfigError

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"hookline serve needs {', '.join(missing)}: pip install 'hookline[serve]'")


def _serve(run: ServeRun, host: PluginHost) -> int:
    import asyncio

    import uvicorn

    from hookline.core.frontend.async_llm import AsyncLLM
    from hookline.core.serve.app import make_app
    from hookline.core.serve.in_process import InProcessClient

    async def serve() -> None:
        client = InProcessClient(AsyncLLM.from_config(run.config, host), run.serve)
        try:
            settings = uvicorn.Config(make_app(client, run.serve), run.serve.host, run.serve.port, log_level="warning")
            await uvicorn.Server(settings).serve()
        finally:
            await client.aclose()

    asyncio.run(serve())
    return 0
