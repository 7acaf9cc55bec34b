"""A server on a free port, in a thread of its own with an event loop of its own, around any engine client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from hookline.core.serve.http.app import make_app
from hookline.core.serve.settings import ServeConfig

PARSERS = ServeConfig(reasoning_parser="think", tool_parser="hermes", tokenizer_info=True)
"""What conf/serve.yaml chooses, and all endpoints."""


class LiveServer:
    """url: where it listens. client: what it asks, on the server's own loop."""

    def __init__(self, url: str, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.client, self._loop = url, client, loop

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of some work on the server's loop."""

        async def awaited() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(30)


@contextmanager
def live_server(make_client: Callable[[], Any], settings: ServeConfig = PARSERS) -> Iterator[LiveServer]:
    """Serve what `make_client`, called on the server's loop, returns; it is closed at the end."""
    started: list[LiveServer] = []
    is_up = threading.Event()
    ended: list[BaseException] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)

        async def serve() -> None:
            client = make_client()
            try:
                config = uvicorn.Config(make_app(client, settings).app, log_level="error", lifespan="off")
                server = uvicorn.Server(config)
                servers.append(server)
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                started.append(LiveServer(url, client, asyncio.get_running_loop()))
                is_up.set()
                await server.serve([listener])
            finally:
                await client.aclose()

        def main() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                ended.append(error)
            is_up.set()

        servers: list[uvicorn.Server] = []
        thread = threading.Thread(target=main, name="live-server")
        thread.start()
        assert is_up.wait(60)
        if ended:
            raise ended[0]
        try:
            yield started[0]
        finally:
            servers[0].should_exit = True
            thread.join(30)
            assert not thread.is_alive()
            assert not ended, ended
