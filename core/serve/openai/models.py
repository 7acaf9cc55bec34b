"""/v1/models: the cards of the model under each of its names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.serve.endpoints.answering import json_response
from hookline.core.serve.endpoints.surface import Surface


async def list_models(surface: Surface, request: Request) -> Response:
    """The cards of the model under all its names."""
    return json_response({"object": "list", "data": [_card(surface, name) for name in surface.facts.names]})


async def one_model(surface: Surface, request: Request) -> Response:
    """The card of one name. Names may have slashes in them; without one, all cards."""
    if not request.path_params["name"]:
        return await list_models(surface, request)
    return json_response(_card(surface, surface.model_name(request.path_params["name"])))


def _card(surface: Surface, name: str) -> dict[str, Any]:
    facts = surface.facts
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
