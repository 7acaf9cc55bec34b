"""/v1/models: the cards of the model under each of its names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.serve.endpoints.answering import json_response
from hookline.core.serve.endpoints.surface import Surface


class Models:
    """The endpoints."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def list(self, request: Request) -> Response:
        """All cards."""
        return json_response({"object": "list", "data": [self._card(name) for name in self._surface.facts.names]})

    async def one(self, request: Request) -> Response:
        """The card of one name. Names may have slashes in them; without one, all cards."""
        if not request.path_params["name"]:
            return await self.list(request)
        return json_response(self._card(self._surface.model_name(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        facts = self._surface.facts
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
