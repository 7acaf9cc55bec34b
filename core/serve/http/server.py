"""An application on its sockets, from ready to drained: uvicorn with limits, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from hookline.core.serve.futures import first_of
from hookline.core.serve.http.protocol import limited
from hookline.core.serve.http.stopping import Stopping
from hookline.core.serve.http.tls import CertificateWatch

if TYPE_CHECKING:
    from hookline.core.serve.http.app import Served
    from hookline.core.serve.settings import ServeConfig

KEEP_ALIVE_S = 75
"""Between two requests of a connection: longer than most proxies keep theirs."""
LAST_WORDS_S = 2.0
"""For the last frames to be written, once everything was ended."""


class HttpServer(uvicorn.Server):
    """uvicorn's server without handlers of signals. announce: called once it listens.

    handshake_s: longest for a TLS handshake.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None], handshake_s: float) -> None:
        super().__init__(config)
        self._announce, self._handshake_s = announce, handshake_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
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
        """Capture none."""
        yield


async def serve_http(
    served: Served,
    sockets: Sequence[socket.socket],
    settings: ServeConfig,
    stopping: Stopping,
    announce: Callable[[], None],
) -> None:
    """Serve until `stopping` says for how long to drain, and then until all is answered or ended, or it is told again.

    announce: called once connections are taken.
    """
    raise_file_limit()
    config = uvicorn.Config(
        served.app,
        http=limited(settings),
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # what a request says of itself is not trusted
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
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # see _bound
    running = asyncio.ensure_future(server.serve(list(sockets)))
    await first_of(running, stopping.drain_s)
    if not running.done():
        served.gate.drain()
        await served.gate.wait_until_idle(stopping.drain_s.result(), stopping.at_once)
        await served.client.aclose()
        await served.gate.wait_until_idle(LAST_WORDS_S)
        server.should_exit = True
    await running
    if certificate is not None:
        certificate.stop()


def listening_sockets(settings: ServeConfig, count: int) -> list[socket.socket]:
    """Sockets that share the address of the settings, one for each of `count` processes.

    No other program can take the address from now on, though the sockets listen only once `serve_http` has them, which
    may be minutes later. Each keeps its own queue of connections, also while the process that took them is replaced.
    Raises: ConfigError if the address cannot be had.
    """
    from hookline.core.errors import ConfigError

    host, port = settings.host, settings.port
    sockets: list[socket.socket] = []
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        sockets.append(_bound(family, host, port, shares=False))  # fails if anybody has the port, however they share it
        if count > 1:
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = sockets[0].getsockname()[1]
        sockets += [_bound(family, host, port, shares=True) for _ in range(count - 1)]
    except OSError as error:
        for one in sockets:
            one.close()
        reason = error.strerror or error
        raise ConfigError(f"serve.host={host} serve.port={port} cannot be listened on: {reason}") from error
    return sockets


def _bound(family: int, host: str, port: int, *, shares: bool) -> socket.socket:
    """A socket beside which no other program can bind; shares: sockets of this server can.

    SO_REUSEADDR lets it bind while connections of an earlier server fade away. It would let another server bind as
    well until this one listens, and is taken back therefore; `serve_http` sets it again, for listening wants it, too.
    """
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((host, port))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        one.close()
        raise
    return one


def raise_file_limit() -> None:
    """Let this process have as many connections as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
