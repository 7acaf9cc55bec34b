"""The endpoints for operators: health, readiness, load, metrics and version."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import hookline
from hookline.core.errors import HooklineError
from hookline.core.serve.engine_client import EngineClient, EngineLoad
from hookline.core.serve.errors import api_error, response
from hookline.core.serve.http.gate import Life
from hookline.core.serve.http.metrics import HttpMetrics
from hookline.core.serve.http.surfaces import Surfaces


def operations(client: EngineClient, life: Life, http: HttpMetrics, surfaces: Surfaces) -> list[Route]:
    """/health, /ping: 200 while an engine lives. /ready: 200 while requests are taken. /version, /load, /metrics."""

    async def _health(request: Request) -> Response:
        status = 503 if client.death is not None else 200
        states = ["ready" if one.death is None else "dead" for one in client.replicas]
        return JSONResponse({"replicas": states}, status) if states else Response(status_code=status)

    async def _ready(request: Request) -> Response:
        return Response(status_code=200 if client.is_ready and not life.is_draining else 503)

    async def _version(request: Request) -> Response:
        return JSONResponse({"version": hookline.__version__})

    async def _load(request: Request) -> Response:
        found = {**_figures(client.load()), "event_loop_blocked_s": round(life.watch.longest_s, 4)}
        if states := client.replicas:
            found["replicas"] = [{"death": one.death, **_figures(one.load)} for one in states]
        return JSONResponse(found)

    async def _metrics(request: Request) -> ASGIApp:
        try:
            return http.app(await client.metrics())
        except HooklineError as error:
            return response(api_error(error), surfaces.form_of(request.scope))

    return [
        Route("/health", _health, methods=["GET"]),
        Route("/ping", _health, methods=["GET", "POST"]),
        Route("/ready", _ready, methods=["GET"]),
        Route("/version", _version, methods=["GET"]),
        Route("/load", _load, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),  # Starlette calls the application that it returns
    ]


def _figures(now: EngineLoad) -> dict[str, Any]:
    return {
        "server_load": now.num_running + now.num_waiting,
        "num_running": now.num_running,
        "num_waiting": now.num_waiting,
        "num_free_blocks": now.num_free_blocks,
        "num_blocks": now.num_blocks,
        "prompt_tokens_s": round(now.prompt_tokens_s, 1),
        "tokens_s": round(now.tokens_s, 1),
    }
