"""The endpoints that clients of a model use. Each is a coroutine over a Request that asks an `EngineClient`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hookline.core.serve.answering import Endpoint, endpoint
from hookline.core.serve.engine_client import EngineClient
from hookline.core.serve.errors import OPENAI_ERRORS, ApiError
from hookline.core.serve.openai.chat import Chat
from hookline.core.serve.openai.completions import Completions
from hookline.core.serve.openai.models import Models
from hookline.core.serve.openai.tokens import Tokens
from hookline.core.serve.settings import ServeConfig
from hookline.core.serve.surface import Surface


def routes(client: EngineClient, settings: ServeConfig) -> list[Route]:
    """The routes below /v1, and those that go with them.

    Raises: PluginError or ConfigError for a parser that cannot be used.
    """
    surface = Surface(client, settings)
    models, tokens = Models(surface), Tokens(surface)
    handlers: list[tuple[str, str, Endpoint]] = [
        ("GET", "/v1/models", models.list),
        ("GET", "/v1/models/{name:path}", models.one),
        ("POST", "/v1/completions", Completions(surface).handle),
        ("POST", "/v1/chat/completions", Chat(surface).handle),
        ("POST", "/v1/embeddings", _embeddings),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
    ]
    if settings.tokenizer_info:
        handlers.append(("GET", "/tokenizer_info", tokens.info))
    max_len = client.facts.max_model_len
    return [
        Route(path, endpoint(handler, OPENAI_ERRORS, max_len), methods=[method]) for method, path, handler in handlers
    ]


async def _embeddings(request: Request) -> Response:
    message = "The model that is served writes text and offers no embeddings; serve an embedding model for them."
    raise ApiError(404, message, param="model", code="model_not_supported")
