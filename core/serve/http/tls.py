"""The server's TLS certificate: checked before the engine starts, and reloaded when its files change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import TYPE_CHECKING, TypeAlias

from hookline.core.errors import ConfigError

if TYPE_CHECKING:
    from hookline.core.serve.settings import ServeConfig

LOOK_S = 5.0
"""Seconds between two checks of the files."""
_Marks: TypeAlias = tuple[tuple[int, int, int] | None, ...]
_log = logging.getLogger("hookline")


def check_tls(settings: ServeConfig) -> None:
    """Check a certificate and its key.

    Raises: ConfigError if they cannot be used.
    """
    if settings.tls_certificate is None:
        if settings.tls_key is not None:
            raise ConfigError(f"serve.tls_key={settings.tls_key} needs serve.tls_certificate")
        return
    try:
        _load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), settings)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"serve.tls_certificate={settings.tls_certificate} cannot be used: {error}") from error


class CertificateWatch:
    """Reloads the certificate's files for new connections, on the running event loop and until `stop`.

    Open connections keep their certificate. Files that do not match, as when only one of two has been replaced, are
    ignored until they do. context: of the server's connections.
    """

    def __init__(self, context: ssl.SSLContext, settings: ServeConfig) -> None:
        self._context, self._settings = context, settings
        self._seen = self._marks()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_S, self._tick)

    def stop(self) -> None:
        """Stop checking the files."""
        self._timer.cancel()

    def look(self) -> None:
        """Load the files if they have changed since the last check."""
        marks = self._marks()
        if marks == self._seen:
            return
        self._seen = marks
        try:
            check_tls(self._settings)  # first, as a context that fails to load new files loses its present ones
            _load(self._context, self._settings)
        except (ConfigError, OSError) as error:
            _log.error("the certificate stays as it was: %s", error)
        else:
            _log.info("serve.tls_certificate=%s was loaded again", self._settings.tls_certificate)

    def _tick(self) -> None:
        self.look()
        self._timer = self._loop.call_later(LOOK_S, self._tick)

    def _marks(self) -> _Marks:
        """The identity of a file's content: it differs once the file is replaced."""
        return tuple(_mark(path) for path in (self._settings.tls_certificate, self._settings.tls_key) if path)


def _load(context: ssl.SSLContext, settings: ServeConfig) -> None:
    assert settings.tls_certificate is not None
    context.load_cert_chain(settings.tls_certificate, settings.tls_key, password="")  # without one OpenSSL asks


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
