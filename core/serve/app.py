"""The ASGI application: all routes around one `EngineClient`. Knows no sockets and no processes."""

from __future__ import annotations

from starlette.applications import Starlette

from hookline.core.serve.engine_client import EngineClient
from hookline.core.serve.operations import operations
from hookline.core.serve.page import page_routes
from hookline.core.serve.routes import routes
from hookline.core.serve.settings import ServeConfig


def make_app(client: EngineClient, settings: ServeConfig) -> Starlette:
    """The application; whoever made the client closes it."""
    return Starlette(routes=[*routes(client, settings), *operations(client), *page_routes(client)])
