"""The main function of a front end's process: HTTP on one side, the engines' processes on the other."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hookline.core.cli.logs import logging_to_stderr
from hookline.core.serve.processes.parent import Parent

if TYPE_CHECKING:
    from hookline.core.plugin.host import PluginHost
    from hookline.core.serve.engine_client import EngineClient, ModelFacts
    from hookline.core.serve.processes.engine_link import EngineLink
    from hookline.core.serve.processes.messages import FromEngine, Message
    from hookline.core.serve.processes.remote_client import RemoteClient
    from hookline.core.serve.settings import ServeConfig
    from hookline.core.tokenizer.codec import Codec

ORPHANED_S = 1.0
"""Seconds for running requests once the supervisor is gone."""


def main() -> int:
    """Serve HTTP as the task says that comes over the inherited socket; returns the exit code."""
    from hookline.core.errors import HooklineError, show_traceback

    parent = Parent(int(sys.argv[1]))
    with logging_to_stderr():
        try:
            return run_loop(_FrontEnd(parent).serve())
        except HooklineError as error:
            show_traceback(error)
            parent.tell(failed=str(error))
            return 2


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine on the fastest event loop there is."""
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    if find_spec("uvloop") is not None:
        import uvloop

        make_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(main)


class _FrontEnd:
    def __init__(self, parent: Parent) -> None:
        from hookline.core.config.schema import build
        from hookline.core.serve.settings import ServeConfig

        self._parent, self._task = parent, parent.task
        self._settings: ServeConfig = build(ServeConfig, self._task["serve"], "serve")
        self._engines = [_Engine() for _ in range(self._settings.replicas)]

    async def serve(self) -> int:
        """Wait for the engine, then serve until told to stop."""
        from hookline.core.plugin.host import PluginHost
        from hookline.core.serve.http.api_keys import read_keys
        from hookline.core.serve.http.app import make_app
        from hookline.core.serve.http.collecting import QuietCollector
        from hookline.core.serve.http.server import serve_http
        from hookline.core.serve.http.stopping import Stopping

        loop = asyncio.get_running_loop()
        self._stopping = Stopping()
        self._facts: asyncio.Future[ModelFacts] = loop.create_future()
        keys = read_keys(self._settings.api_key_file)
        self._parent.follow(self._obey)
        host = PluginHost.load()
        import_ahead(self._settings, host)
        await asyncio.wait((self._facts, self._stopping.drain_s), return_when=asyncio.FIRST_COMPLETED)
        if self._stopping.drain_s.done():
            return 0
        client = self._make_client(self._facts.result(), host)
        served = make_app(client, self._settings, keys, host=host)
        QuietCollector(lambda: served.gate.num_open).start()
        facts, sockets = client.facts, [socket.socket(fileno=self._task["socket"])]

        def _announce() -> None:
            self._parent.tell(ready=True, names=facts.names, max_model_len=facts.max_model_len)

        await serve_http(served, sockets, self._settings, self._stopping, _announce)
        for engine in self._engines:
            engine.close()
        return 0

    def _make_client(self, facts: ModelFacts, host: PluginHost) -> EngineClient:
        from hookline.core.serve.engine_client import served_model
        from hookline.core.serve.processes.remote_client import RemoteClient

        model = served_model(facts, self._settings.names, codec_of(facts, self._task["config"], host))
        clients = [engine.follow(RemoteClient(model, engine.send, self._settings)) for engine in self._engines]
        if len(clients) == 1:
            return clients[0]
        from hookline.core.serve.processes.replica_client import ReplicaClient

        return ReplicaClient(clients, self._settings)

    def _obey(self, order: dict[str, Any] | None) -> None:
        """Carry out an order of the supervisor; None if the supervisor is gone."""
        if order is None:
            shutil.rmtree(self._task["folder"], ignore_errors=True)  # as the supervisor would have done
            for engine in self._engines:
                engine.die("the server was killed")
            self._stopping.tell(ORPHANED_S)
        elif "drain" in order:
            self._stopping.tell(float(order["drain"]))
        elif "dead" in order:
            self._engines[order["replica"]].die(order["dead"])
        elif "engine" in order:
            self._connect(**order["engine"])

    def _connect(self, replica: int, address: str, name: str, facts: dict[str, Any]) -> None:
        """Connect to a replica's engine, which was started for the first time or again."""
        from hookline.core.serve.engine_client import ModelFacts

        self._engines[replica].connect(address, name)
        if not self._facts.done():
            self._facts.set_result(ModelFacts(**facts))


class _Engine:
    """The link to one replica's engine; its client is set once the model is known."""

    def __init__(self) -> None:
        self._client: RemoteClient | None = None
        self._link: EngineLink | None = None
        self._death: str | None = None

    def follow(self, client: RemoteClient) -> RemoteClient:
        """Pass the engine's messages, and its death or return, on to this client."""
        self._client = client
        if self._death is not None:
            client.break_off(self._death)
        return client

    def send(self, message: Message) -> None:
        """Send a message to the engine, if it is connected."""
        if self._link is not None:
            self._link.send(message)

    def connect(self, address: str, name: str) -> None:
        """Connect to an engine, which was started for the first time or again."""
        from hookline.core.serve.processes.engine_link import EngineLink

        self.close()
        self._link, self._death = EngineLink(address, name, self._take), None
        if self._client is not None:
            self._client.revive()

    def die(self, reason: str) -> None:
        """Note that the engine has ended."""
        self._death = reason
        if self._client is not None:
            self._client.break_off(reason)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.close()

    def _take(self, messages: list[FromEngine]) -> None:
        if self._client is not None:
            self._client.receive(messages)


def import_ahead(settings: ServeConfig, host: PluginHost) -> None:
    """Import while the engine starts what serving needs: once it is ready, clients wait for nothing else.

    Raises: PluginError or ConfigError for an API or a parser that cannot be used.
    """
    from hookline.core.serve.apis import chosen_apis
    from hookline.core.serve.parsers import chosen_parsers
    from hookline.core.serve.processes import engine_link, remote_client
    from hookline.core.tokenizer import chat_templates

    _ = engine_link, remote_client
    chosen_parsers(settings.reasoning_parser, settings.tool_parser, lambda: host)
    for option in chosen_apis(settings.apis, host):
        assert option.entry is not None
        option.entry.load()
    chat_templates.import_ahead()


def codec_of(facts: ModelFacts, tree: dict[str, Any], host: PluginHost) -> Codec:
    """The tokenizer of the model, made ready for several threads. tree: the engine's configuration."""
    from pathlib import Path

    from hookline.core.checkpoint.files import open_source
    from hookline.core.config.settings import option_with, validate
    from hookline.core.tokenizer.codec import Codec

    option = validate({key: tree[key] for key in tree if key != "observers"}, host).model
    if option.entry is None:  # model=auto, which the engine's process has decided
        option = option_with(host.choose("model", facts.model), option.config)
    source = None
    if option.entry is not None and not option.config.tokenizer:
        model_class = option.entry.load() if facts.folder is None else None  # its import takes torch's
        opened = open_source(option.config, model_class, host)
        source = None if opened is None else opened[0]
    folder = None if facts.folder is None else Path(facts.folder)
    codec = Codec(folder, source=source, chat=option.config.chat, max_len=facts.max_model_len)
    codec.make_ready()
    return codec
