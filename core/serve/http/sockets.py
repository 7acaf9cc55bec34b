"""The sockets that a server listens on, which are bound before its processes begin.

Imports nothing large: the engine's process begins only after this.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from hookline.core.errors import ConfigError

if TYPE_CHECKING:
    from hookline.core.serve.settings import ServeConfig


def listening_sockets(settings: ServeConfig, count: int) -> list[socket.socket]:
    """Sockets that share the address of the settings, one for each of `count` processes.

    From now on no other program can bind the address, although the sockets listen only when `serve_http` gets them,
    possibly minutes later. Each socket keeps its own queue of connections, even while its process is replaced.
    Raises: ConfigError if the address cannot be bound.
    """
    host, port = settings.host, settings.port
    sockets: list[socket.socket] = []
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        sockets.append(_bound(family, host, port, shares=False))  # fails even if the port's owner shares it
        if count > 1:
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = sockets[0].getsockname()[1]
        sockets += [_bound(family, host, port, shares=True) for _ in range(count - 1)]
    except OSError as error:
        for one in sockets:
            one.close()
        reason = error.strerror or error
        fix = "; serve.port=N takes another port, 0 a free one" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"serve.host={host} serve.port={port} cannot be listened on: {reason}{fix}") from error
    return sockets


def _bound(family: int, host: str, port: int, *, shares: bool) -> socket.socket:
    """A socket on whose address no other program can bind. shares: whether further sockets of this server can.

    SO_REUSEADDR allows binding while connections of an earlier server are in TIME_WAIT. It would also allow another
    server to bind until this one listens, so it is removed after binding; `serve_http` sets it again, because listening
    needs it, too.
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
