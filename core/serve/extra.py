"""Checks the extra `serve`, the libraries that the server and batches need. Bare at import."""

from __future__ import annotations

from importlib.util import find_spec

from hookline.core.errors import ConfigError

NEEDED = ("starlette", "uvicorn", "msgspec", "zmq")
"""Libraries of the extra."""


def check_extra(asker: str) -> None:
    """Raise ConfigError if a library of the extra is missing. asker: the command that needs it, for the error."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{asker} needs {', '.join(missing)}: pip install 'hookline[serve]'")
