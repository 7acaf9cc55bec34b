"""The keys of a server, which are added to an engine's keys, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hookline.core.cli.logs import FORMS, TEXT
from hookline.core.config.schema import build, check_keys
from hookline.core.config.settings import ENGINE_KEYS, Config, EngineKeys, option_of, validate
from hookline.core.errors import ConfigError, shown
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import OBSERVER, Option
from hookline.core.serve.apis import chosen_apis
from hookline.core.serve.parsers import chosen_parsers
from hookline.core.util.process import num_usable_cores
from hookline.core.util.ranges import bounded, check_ranges

MIB = 2**20
CORES_PER_PROCESS = 4
"""Cores for each front end; with fewer, a single process runs everything."""
MAX_DEFAULT_PROCESSES = 4
"""Default limit of front ends; each writes tens of thousands of chunks a second."""
REASONING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "both": ("reasoning_content", "reasoning"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}
"""Values of serve.reasoning_field -> the fields of a message."""


@dataclass(frozen=True)
class ServeConfig:
    """A server's address, its processes and the limits for its clients.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of the machine's."""
    port: int = bounded(8000, 0, 65535)
    """Port to listen on; 0 takes a free one."""
    names: tuple[str, ...] = ()
    """Names of the model in requests; none: the checkpoint's reference."""
    any_model: bool = False
    """Take requests for any model: whatever name they have, the served model answers, under its own name. Else an
    unknown name is refused with status 404."""
    processes: int | None = bounded(None, 0, 64)
    """Front ends, each a process that tokenizes, detokenizes and writes frames, beside the engine's process. 0: all in
    one process. None: as the machine's cores allow."""
    replicas: int = bounded(1, 1, 64)
    """Engines that serve the model, each a process with its own part of the GPUs, or of a CPU's cores. A request goes
    to an engine that has its prefix in its cache, unless that engine is much busier than others."""
    restart: bool = False
    """Start the engine again after it died; else the server stays, unhealthy, until it is ended. An engine that has
    died five times within 300 s of service is not started again: the server ends with exit code 2."""
    drain_s: float = bounded(30.0, 0)
    """Seconds that running requests have to end by themselves after SIGTERM."""
    timeout_s: float | None = bounded(None, above=0)
    """Longest that a request may take, in seconds; None: no limit."""
    max_requests: int = bounded(4096, 1)
    """Most completions of each replica that run or wait at once; further ones are refused with status 429."""
    max_body_bytes: int = bounded(16 * MIB, 1)
    """Largest body of a request."""
    max_unfinished_bytes: int = bounded(128 * MIB, 1)
    """Most memory of a front end for incomplete bodies of all requests; beyond it the largest of them is refused with
    status 503. At least serve.max_body_bytes."""
    max_header_bytes: int = bounded(64 * 1024, 1024)
    """Largest head of a request: its line and its headers, with the trailers and the extensions of its chunks."""
    receive_s: float = bounded(60.0, above=0)
    """Longest that a client may take to send a request, in seconds; then its connection is closed."""
    unread_s: float = bounded(30.0, above=0)
    """Longest that a client may read nothing while data waits for it, in seconds; then its connection is closed and its
    requests end."""
    api_key_file: str | None = None
    """File with the keys that clients must send, one a line; HOOKLINE_API_KEY in the environment is one more."""
    tls_certificate: str | None = None
    """PEM file with the server's certificate chain: serves https."""
    tls_key: str | None = None
    """PEM file with its private key; None: in the certificate's file."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may use the server, or * for all; none: only its own."""
    gzip: bool = False
    """Compress answers of 1 KiB and more for clients that accept gzip; streams never are."""
    hosts: tuple[str, ...] = ()
    """Host names by which requests may come over the machine's own loopback without a key, beside localhost, names
    without a dot and addresses; * for all. A page whose name leads to 127.0.0.1 is not to use the server."""
    access_log: bool = True
    """Log a line for each request, without its content; the reason of an error may quote the value at fault."""
    quiet_paths: tuple[str, ...] = ("/health", "/ping", "/ready", "/metrics", "/load")
    """Paths whose requests are logged only if they get an error."""
    log_format: str = TEXT
    """Of the log on standard error: text, lines with time and level; json, an object a line; plain, as other commands.
    The environment variable HOOKLINE_LOG says it for any command."""
    apis: tuple[Any, ...] | None = None
    """The APIs that are served, e.g. [openai]: names, or mappings with a name and fields; hookline info lists them. The
    first API writes the errors of paths that belong to no API. None: OpenAI's and Anthropic's, and the APIs of
    installed plugins that ask for it."""
    reasoning_parser: Any = None
    """The parser that separates reasoning from the answer in chats: a name, or a mapping with name and fields; None: no
    parser. hookline info lists them."""
    tool_parser: Any = None
    """The parser that finds tool calls in the answers of chats with tools, likewise."""
    reasoning_field: str = "both"
    """Field of a message for the reasoning: reasoning, reasoning_content, or both."""
    tokenizer_info: bool = False
    """Serve /tokenizer_info, which tells the tokenizer's configuration and the chat template."""
    keep_alive_s: float | None = bounded(15.0, above=0)
    """Seconds of silence after which a stream gets a comment, so that proxies keep it; None: never."""

    def __post_init__(self) -> None:
        check_ranges(ServeConfig, vars(self), "serve")
        for name in self.names:
            if not name.strip():
                raise ConfigError(f"serve.names={shown(list(self.names))}: a name must not be empty")
            if self.names.count(name) > 1:
                raise ConfigError(f"serve.names={shown(list(self.names))} has {shown(name)} twice")
        if self.log_format not in FORMS:
            raise ConfigError(f"serve.log_format={shown(self.log_format)} is not one of {', '.join(FORMS)}")
        if self.reasoning_field not in REASONING_FIELDS:
            allowed = ", ".join(REASONING_FIELDS)
            raise ConfigError(f"serve.reasoning_field={shown(self.reasoning_field)} is not one of {allowed}")
        if self.replicas > 1 and self.processes == 0:
            raise ConfigError(
                f"serve.processes=0 puts all into one process, which has one engine: serve.replicas={self.replicas} "
                "needs serve.processes=1 or more"
            )


@dataclass(frozen=True)
class ServeKeys(EngineKeys):
    """Root keys of a server, beside the kinds."""

    serve: ServeConfig = field(default_factory=ServeConfig)
    """The server's address, its processes and the limits for its clients."""


@dataclass(frozen=True)
class ServeRun:
    """A validated server: its engine's configuration and its own."""

    config: Config
    serve: ServeConfig
    tree: Mapping[str, Any]
    """The keys of `config` as plain values, for other processes."""


def validate_serve(tree: Mapping[str, Any], host: PluginHost) -> ServeRun:
    """Check a composed tree.

    Raises: ConfigError or PluginError naming the key, the value and the fix.
    """
    check_keys(tree, (*ENGINE_KEYS, "serve"))
    engine = {key: tree[key] for key in ENGINE_KEYS if key in tree}
    serve: ServeConfig = build(ServeConfig, tree.get("serve") or {}, "serve")
    chosen_parsers(serve.reasoning_parser, serve.tool_parser, lambda: host)  # before a model is loaded
    if serve.apis is not None:
        chosen_apis(serve.apis, host)
    config = validate(engine, host)
    if serve.names and config.observers:
        engine["observers"] = _with_model_name(config.observers, engine["observers"], serve.names[0])
        config = replace(
            config, observers=tuple(option_of(OBSERVER, one, host, "observers") for one in engine["observers"])
        )
    return ServeRun(config, serve, engine)


def _with_model_name(options: Sequence[Option], given: Any, name: str) -> list[dict[str, Any]]:
    """The key `observers`, where each observer with a field model_name gets the model's name if it has none."""
    values = [given] if isinstance(given, str) else given
    mappings = [{"name": one} if isinstance(one, str) else dict(one) for one in values]
    for option, mapping in zip(options, mappings, strict=True):
        if getattr(option.config, "model_name", None) == "":
            mapping["model_name"] = name
    return mappings


def num_front_ends(settings: ServeConfig, num_cores: int | None = None) -> int:
    """The number of front ends beside the engines' processes: as configured, else as the cores allow, and at least one
    with replicas.
    """
    if settings.processes is not None:
        return settings.processes
    cores = num_usable_cores() if num_cores is None else num_cores
    return max(min(cores // CORES_PER_PROCESS, MAX_DEFAULT_PROCESSES), settings.replicas > 1)
