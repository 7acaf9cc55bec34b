"""/v1/models: the cards of the model under each of its names, in OpenAI's form or in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.errors import clipped
from hookline.core.serve.anthropic.errors import ANTHROPIC_ERRORS
from hookline.core.serve.endpoints.answering import json_response
from hookline.core.serve.endpoints.surface import Surface
from hookline.core.serve.errors import ApiError, invalid, response

VERSION_HEADER = "anthropic-version"
"""The header that clients of Anthropic's API send with every request."""
PAGE, MAX_PAGE = 20, 1000
"""Cards in a page of Anthropic's list: by default, and at most."""


async def list_models(surface: Surface, request: Request) -> Response:
    """The cards of the model under all its names."""
    if VERSION_HEADER not in request.headers:
        return json_response({"object": "list", "data": [_card(surface, name) for name in surface.facts.names]})
    try:
        return json_response(_anthropic_list(surface, request.query_params))
    except ApiError as error:
        return response(error, ANTHROPIC_ERRORS)


async def one_model(surface: Surface, request: Request) -> Response:
    """The card of one name, which may contain slashes; without a name, all cards."""
    if not request.path_params["name"]:
        return await list_models(surface, request)
    is_anthropic = VERSION_HEADER in request.headers
    try:
        name = surface.model_name(request.path_params["name"])
    except ApiError as error:
        if is_anthropic:
            return response(error, ANTHROPIC_ERRORS)
        raise
    return json_response((_anthropic_card if is_anthropic else _card)(surface, name))


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


def _anthropic_card(surface: Surface, name: str) -> dict[str, Any]:
    facts = surface.facts
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(facts.created_s, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": facts.max_model_len,
        "max_tokens": facts.max_model_len,
    }


def _anthropic_list(surface: Surface, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of cards: those after `after_id`, or before `before_id`.

    Raises: ApiError for an invalid page.
    """
    names, limit = list(surface.facts.names), query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= MAX_PAGE):
        raise invalid(f"limit={clipped(limit)} must be between 1 and {MAX_PAGE}", "limit")
    for key in ("after_id", "before_id"):
        if (id_ := query.get(key)) is None:
            continue
        place = names.index(surface.model_name(id_))
        names = names[place + 1 :] if key == "after_id" else names[:place]
    size = int(limit)
    shown = names[-size:] if "before_id" in query else names[:size]
    return {
        "data": [_anthropic_card(surface, name) for name in shown],
        "has_more": len(shown) < len(names),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }
