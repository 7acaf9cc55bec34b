"""/v1/models: the cards of the model under each of its names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.serving import ServedEngine, json_response


async def list_models(engine: ServedEngine, request: Request) -> Response:
    """The cards of the model under all its names."""
    return json_response({"object": "list", "data": [_card(engine, name) for name in engine.facts.names]})


async def one_model(engine: ServedEngine, request: Request) -> Response:
    """The card of one name, which may contain slashes; without a name, all cards."""
    if not request.path_params["name"]:
        return await list_models(engine, request)
    return json_response(_card(engine, engine.model_name(request.path_params["name"])))


def _card(engine: ServedEngine, name: str) -> dict[str, Any]:
    facts = engine.facts
    return {
        "id": name,
        "object": "model",
        "created": facts.created_s,
        "owned_by": "hookline",
        "root": facts.root,
        "parent": None,
        "max_model_len": facts.max_model_len,
        "vocab_size": facts.vocab_size,
    }
