"""The keys that clients must send, if any are set. Compared in constant time, and never shown."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hookline.core.errors import ConfigError
from hookline.core.util.files import read_bounded

VARIABLE = "HOOKLINE_API_KEY"
_log = logging.getLogger("hookline")


class ApiKeys:
    """Digests of the keys. All are compared, even after a match, so that the time tells nothing."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def accept(self, headers: Iterable[tuple[bytes, bytes]], others: Sequence[bytes] = ()) -> bool:
        """Whether a request has a valid key, as `Authorization: Bearer KEY`, or as the value of one of the other
        headers. One of them is enough, because a proxy in front may use the Authorization header itself.
        """
        given = {}
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given[name] = value[7:].strip()
            elif name in others:
                given[name] = value.strip()
        digests = [_digest(key) for key in given.values() if key]
        return sum(hmac.compare_digest(digest, one) for digest in digests for one in self._digests) > 0


def read_keys(path: str | None, environ: Mapping[str, str] | None = None) -> ApiKeys:
    """The keys of a file, one a line, and of the environment.

    Raises: ConfigError if the file cannot be read or has no key.
    """
    keys = [value for value in [(os.environ if environ is None else environ).get(VARIABLE, "").strip()] if value]
    if path is not None:
        keys += _keys_of(Path(path))
    return ApiKeys(keys)


def a_key(path: str | None) -> str | None:
    """A word that a shell makes one of the keys of `read_keys`, from the variable or the file; None without keys."""
    if os.environ.get(VARIABLE, "").strip():
        return f"${VARIABLE}"
    return None if path is None else f"$(grep -m1 '^[^#]' {shlex.quote(path)})"


def _keys_of(path: Path) -> list[str]:
    try:
        lines = read_bounded(path, "serve.api_key_file").decode("utf-8-sig").split("\n")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.api_key_file={path} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"serve.api_key_file={path} holds no key; write one a line")
    if mode & stat.S_IROTH:
        _log.warning("serve.api_key_file=%s can be read by everybody on this machine: chmod 600 %s", path, path)
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
