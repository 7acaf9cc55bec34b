"""The routes of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hookline.core.contracts import ApiRoute, ApiSurface
from hookline.core.serving import ServedEngine
from hookline.plugins.apis.anthropic.answers import Message, ModelPage, TokenCount
from hookline.plugins.apis.anthropic.errors import ANTHROPIC_ERRORS
from hookline.plugins.apis.anthropic.messages import count_tokens, messages
from hookline.plugins.apis.anthropic.models import list_models, one_model
from hookline.plugins.apis.anthropic.request import CountRequest, MessagesRequest


class Anthropic(ApiSurface):
    """Anthropic's API: messages, the count of their tokens, and models."""

    errors = ANTHROPIC_ERRORS
    key_headers = ("x-api-key",)
    client_header = "anthropic-version"
    request_id_header = "request-id"
    exposed_headers = ("request-id",)

    def __init__(self, config: Any, engine: ServedEngine) -> None:
        self._engine = engine

    def routes(self) -> Sequence[ApiRoute]:
        """See ApiSurface."""
        engine = self._engine
        counts = "Count a prompt's tokens, in Anthropic's form"
        cards = "The model's card under each of its names"
        return [
            ApiRoute(
                "POST",
                "/v1/messages",
                partial(messages, engine),
                "Answer messages, in Anthropic's form",
                MessagesRequest,
                Message,
                streams=True,
            ),
            ApiRoute(
                "POST", "/v1/messages/count_tokens", partial(count_tokens, engine), counts, CountRequest, TokenCount
            ),
            ApiRoute("GET", "/v1/models", partial(list_models, engine), cards, answer=ModelPage),
            ApiRoute("GET", "/v1/models/{name:path}", partial(one_model, engine)),
        ]
