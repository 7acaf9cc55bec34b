"""An application on its sockets, from ready to drained: uvicorn with limits, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from hookline.core.serve.http.protocol import limited
from hookline.core.serve.http.stopping import Stopping
from hookline.core.serve.http.tls import CertificateWatch

if TYPE_CHECKING:
    from hookline.core.serve.http.app import Served
    from hookline.core.serve.settings import ServeConfig

_log = logging.getLogger("hookline")
KEEP_ALIVE_S = 75
"""Seconds that a connection may be idle between two requests; most proxies close theirs earlier."""
LAST_WORDS_S = 2.0
"""Seconds for writing the last frames after all requests were ended."""


class HttpServer(uvicorn.Server):
    """uvicorn's server without signal handlers. announce: called once it listens. handshake_s: limit of a TLS
    handshake.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None], handshake_s: float) -> None:
        super().__init__(config)
        self._announce, self._handshake_s = announce, handshake_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and call `announce`."""
        loop, config = asyncio.get_running_loop(), self.config
        state = self.server_state
        self.servers = [
            await loop.create_server(
                lambda: config.http_protocol_class(config, state, {}),  # type: ignore[call-arg]
                sock=one,
                ssl=config.ssl,
                backlog=config.backlog,
                # uvicorn's own startup has no such argument, and asyncio waits 60 s
                ssl_handshake_timeout=self._handshake_s if config.ssl else None,
            )
            for one in sockets or ()
        ]
        self.started = True
        self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


async def serve_http(
    served: Served,
    sockets: Sequence[socket.socket],
    settings: ServeConfig,
    stopping: Stopping,
    announce: Callable[[], None],
) -> None:
    """Serve until `stopping` is told to end, then drain for the seconds that it says, or until it is told again.

    announce: called once connections are accepted.
    """
    raise_file_limit()
    config = uvicorn.Config(
        served.app,
        http=limited(settings, served.surfaces),
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # no trust in X-Forwarded headers
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(LAST_WORDS_S),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    server = HttpServer(config, announce, settings.receive_s)
    config.load()
    certificate = None if config.ssl is None else CertificateWatch(config.ssl, settings)
    served.life.watch.start()
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see http.sockets
    running = asyncio.ensure_future(server.serve(list(sockets)))
    await asyncio.wait((running, stopping.drain_s), return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        served.gate.drain()
        if (num_open := served.gate.num_open) and stopping.drain_s.result():
            _log.info(
                "draining: %d request%s", num_open, "" if num_open == 1 else "s", extra={"fields": {"open": num_open}}
            )
        await served.gate.wait_until_idle(stopping.drain_s.result(), stopping.at_once)
        await served.client.aclose()
        await served.gate.wait_until_idle(LAST_WORDS_S)
        server.should_exit = True
    await running
    if certificate is not None:
        certificate.stop()


def raise_file_limit() -> None:
    """Raise this process' limit of open files, and with it of connections, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
