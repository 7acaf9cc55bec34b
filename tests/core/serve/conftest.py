"""What tests of the server's parts share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx
import pytest

from hookline.core.plugin.host import PluginHost
from hookline.core.serve.http.api_keys import ApiKeys
from hookline.core.serve.http.app import make_app
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient

Ask = Callable[..., httpx.Response]


@cache
def _host(plugins: str) -> PluginHost:
    """Loading the plugins takes longer than an answer. plugins: the value of HOOKLINE_PLUGINS."""
    return PluginHost.load()


@pytest.fixture
def ask() -> Ask:
    """One request to an application around a fake: ask(client, method, path, settings, keys, **options)."""

    def send(
        client: FakeEngineClient,
        method: str,
        path: str,
        settings: ServeConfig | None = None,
        keys: tuple[str, ...] = (),
        **options: Any,
    ) -> httpx.Response:
        async def send_it() -> httpx.Response:
            host = _host(os.environ.get("HOOKLINE_PLUGINS", ""))
            served = make_app(client, settings or ServeConfig(), ApiKeys(keys), host=host)
            transport = httpx.ASGITransport(served.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
                return await http.request(method, path, **options)

        return asyncio.run(send_it())

    return send
