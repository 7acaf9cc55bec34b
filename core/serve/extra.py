"""What the server and batches need beyond Hookline itself: the extra `serve`. Bare at import."""

from __future__ import annotations

from importlib.util import find_spec

from hookline.core.errors import ConfigError

NEEDED = ("starlette", "uvicorn", "msgspec", "zmq")
"""What the extra brings."""


def check_extra(asker: str) -> None:
    """Raise ConfigError if a library of the extra is missing. asker: what needs it, as errors call it."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{asker} needs {', '.join(missing)}: pip install 'hookline[serve]'")
