"""The ASGI application: all routes around one `EngineClient`, behind the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from hookline.core.errors import clipped
from hookline.core.plugin.host import PluginHost
from hookline.core.serve.apis import chosen_apis
from hookline.core.serve.endpoints.served_engine import ServedEngine
from hookline.core.serve.engine_client import EngineClient
from hookline.core.serve.http.api_keys import ApiKeys
from hookline.core.serve.http.gate import Gate, Header, Life
from hookline.core.serve.http.metrics import HttpMetrics
from hookline.core.serve.http.openapi import openapi_routes
from hookline.core.serve.http.operations import operations
from hookline.core.serve.http.page import page_routes
from hookline.core.serve.http.surfaces import Surfaces
from hookline.core.serve.settings import ServeConfig
from hookline.core.util.text import near_miss


@dataclass(frozen=True)
class Served:
    """An application, its gate, its surfaces, and the client of its engine."""

    app: ASGIApp
    gate: Gate
    life: Life
    client: EngineClient
    surfaces: Surfaces


def make_app(
    client: EngineClient,
    settings: ServeConfig,
    keys: ApiKeys | None = None,
    headers: Sequence[Header] | None = None,
    host: PluginHost | None = None,
) -> Served:
    """The application around a client; the caller of this function closes the client. keys: that clients must send.
    headers: see Gate. host: the plugins of this process; None loads them.

    Raises: PluginError or ConfigError for an API or a parser that cannot be used.
    """
    return application(client, settings, surfaces_of(client, settings, host), keys, headers)


def application(
    client: EngineClient,
    settings: ServeConfig,
    surfaces: Surfaces,
    keys: ApiKeys | None = None,
    headers: Sequence[Header] | None = None,
) -> Served:
    """The application with these surfaces; see make_app."""
    life, http = Life(), HttpMetrics()
    routes = [
        *surfaces.routes,
        *openapi_routes(surfaces),
        *operations(client, life, http, surfaces),
        *page_routes(client, surfaces),
    ]
    inner = Router(routes, default=_no_route([route.path for route in routes]))
    gate = Gate(inner, settings, ApiKeys(()) if keys is None else keys, life, surfaces, http, headers)
    app: ASGIApp = gate
    if settings.cors_origins:
        app = CORSMiddleware(
            gate,
            allow_origins=settings.cors_origins,
            allow_methods=list(dict.fromkeys(("GET", "POST", *surfaces.methods))),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", *surfaces.exposed_headers),
        )
    return Served(app, gate, life, client, surfaces)


def _no_route(paths: Sequence[str]) -> ASGIApp:
    """The handler of unknown paths: status 404, with the nearest of these paths as a hint."""

    async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
        hint = near_miss(clipped(scope["path"]), paths)
        raise HTTPException(404, f"nothing is served at this path.{hint} /docs lists all paths")

    return _refuse


def surfaces_of(client: EngineClient, settings: ServeConfig, host: PluginHost | None = None) -> Surfaces:
    """The API surfaces of a server around a client. Raises: see make_app."""
    host = PluginHost.load() if host is None else host
    return Surfaces(ServedEngine(client, settings, host), chosen_apis(settings.apis, host))
