"""The endpoints that clients of a model use. Each is a coroutine over a Request that asks an `EngineClient`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hookline.core.errors import HooklineError
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.engine_client import EngineClient
from hookline.core.serve.errors import error_response, response_of
from hookline.core.serve.settings import ServeConfig


def routes(client: EngineClient, settings: ServeConfig) -> list[Route]:
    """The routes below /v1, and those that go with them."""

    async def models(request: Request) -> Response:
        facts = client.facts
        cards = [
            {
                "id": name,
                "object": "model",
                "created": facts.created_s,
                "owned_by": "hookline",
                "root": facts.root,
                "parent": None,
                "max_model_len": facts.max_model_len,
            }
            for name in facts.names
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def completions(request: Request) -> Response:
        try:
            body: dict[str, Any] = msgspec.json.decode(await request.body(), type=dict)
        except msgspec.DecodeError as error:
            return error_response(400, f"the body is not a JSON object: {error}", "invalid_request_error")
        try:
            params = SamplingParams(max_tokens=body.get("max_tokens", 16), temperature=body.get("temperature"))
            stream = client.stream(body.get("prompt", ""), params)
            outputs = [delta.output async for delta in stream if delta.output is not None]
        except HooklineError as error:
            return response_of(error)
        choices = [
            {"index": one.index, "text": one.text, "finish_reason": one.finish_reason.value, "logprobs": None}
            for one in outputs
        ]
        usage = outputs[0].usage
        counts = {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_completion_tokens,
            "total_tokens": usage.num_total_tokens,
        }
        named = {"object": "text_completion", "created": client.facts.created_s, "model": client.facts.names[0]}
        return JSONResponse({"id": "cmpl-0", **named, "choices": choices, "usage": counts})

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
