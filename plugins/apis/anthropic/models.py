"""/v1/models in Anthropic's form: pages of cards of the model under each of its names."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.errors import clipped
from hookline.core.serving import ServedEngine, invalid, json_response

PAGE, MAX_PAGE = 20, 1000
"""Cards in a page of the list: by default, and at most."""


async def list_models(engine: ServedEngine, request: Request) -> Response:
    """A page of cards: those after `after_id`, or before `before_id`.

    Raises: ApiError for an invalid page.
    """
    return json_response(_page(engine, request.query_params))


async def one_model(engine: ServedEngine, request: Request) -> Response:
    """The card of one name, which may contain slashes; without a name, a page of cards."""
    if not request.path_params["name"]:
        return await list_models(engine, request)
    return json_response(_card(engine, engine.model_name(request.path_params["name"])))


def _card(engine: ServedEngine, name: str) -> dict[str, Any]:
    facts = engine.facts
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(facts.created_s, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": facts.max_model_len,
        "max_tokens": facts.max_model_len,
    }


def _page(engine: ServedEngine, query: Mapping[str, str]) -> dict[str, Any]:
    names, limit = list(engine.facts.names), query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= MAX_PAGE):
        raise invalid(f"limit={clipped(limit)} must be between 1 and {MAX_PAGE}", "limit")
    for key in ("after_id", "before_id"):
        if (id_ := query.get(key)) is None:
            continue
        place = names.index(engine.model_name(id_))
        names = names[place + 1 :] if key == "after_id" else names[:place]
    size = int(limit)
    shown = names[-size:] if "before_id" in query else names[:size]
    return {
        "data": [_card(engine, name) for name in shown],
        "has_more": len(shown) < len(names),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }
