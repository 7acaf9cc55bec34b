"""Settings of the client in a benchmark of a server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hookline.core.errors import ConfigError, shown
from hookline.core.util.ranges import bounded, check_ranges

PROMPT_FORMS = ("ids", "text", "chat")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ClientConfig:
    """How a server is asked; without `url` it has no effect.

    Raises: ConfigError naming the key, the value and what it must be.
    """

    prompts: str = "ids"
    """Form of the prompts: "ids", token ids to /v1/completions; "text" to /v1/completions; "chat", messages to
    /v1/chat/completions. As text, a token is a short English word, so that lengths are about right."""
    model: str | None = None
    """Name that requests give; None: the first of /v1/models."""
    api_key_env: str = "HOOKLINE_API_KEY"
    """Environment variable that holds the API key; it is sent if it is set."""
    timeout_s: float = bounded(600.0, above=0)
    """Seconds that a request may take from being sent to its end."""
    body: dict[str, Any] | None = None
    """Members added to every request's body; they replace others, and client.body.ignore_eos=null removes one."""

    def __post_init__(self) -> None:
        check_ranges(ClientConfig, vars(self), "client")
        if self.prompts not in PROMPT_FORMS:
            raise ConfigError(f"client.prompts={shown(self.prompts)} is not one of {', '.join(PROMPT_FORMS)}")

    def api_key(self) -> str | None:
        """The key that the environment holds.

        Raises: ConfigError if it cannot stand in a header; the key itself is not shown.
        """
        key = os.environ.get(self.api_key_env)
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise ConfigError(f"the environment's {self.api_key_env} is no API key: it is empty or not printable ASCII")
        return key


@dataclass(frozen=True)
class Address:
    """Where a server is. prefix: of its paths, without /v1 and the last slash."""

    host: str
    port: int
    secure: bool = False
    prefix: str = ""

    @classmethod
    def of(cls, url: object) -> Address:
        """The address in `url`, with or without /v1 at its end.

        Raises: ConfigError if it is not one.
        """
        try:
            parts = urlsplit(str(url))
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.username is not None:
            raise ConfigError(f"url={shown(url)} must be http://host:port or https://host:port")
        if parts.query or parts.fragment or not str(url).isprintable() or " " in str(url):
            raise ConfigError(f"url={shown(url)} must end with the server's path; leave out what follows it")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.hostname, port or DEFAULT_PORTS[parts.scheme], parts.scheme == "https", prefix)

    @property
    def authority(self) -> str:
        """Of a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS["https" if self.secure else "http"] else f"{host}:{self.port}"
