"""The ASGI application: all routes around one `EngineClient`, behind the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp

from hookline.core.serve.engine_client import EngineClient
from hookline.core.serve.http.api_keys import ApiKeys
from hookline.core.serve.http.gate import Gate, Header, Life
from hookline.core.serve.http.operations import operations
from hookline.core.serve.http.page import page_routes
from hookline.core.serve.http.routes import routes
from hookline.core.serve.settings import ServeConfig


@dataclass(frozen=True)
class Served:
    """An application, its gate, and the client of its engine."""

    app: ASGIApp
    gate: Gate
    life: Life
    client: EngineClient


def make_app(
    client: EngineClient,
    settings: ServeConfig,
    keys: ApiKeys | None = None,
    headers: Sequence[Header] | None = None,
) -> Served:
    """The application around a client; the caller of this function closes the client. keys: that clients must send.
    headers: see Gate.
    """
    life = Life()
    inner = Router([*routes(client, settings), *operations(client, life), *page_routes(client)])
    gate = Gate(inner, settings, ApiKeys(()) if keys is None else keys, life, headers)
    app: ASGIApp = gate
    if settings.cors_origins:
        app = CORSMiddleware(
            gate,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return Served(app, gate, life, client)
