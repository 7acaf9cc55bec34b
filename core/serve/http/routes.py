"""The endpoints that clients of a model use. Each is a coroutine over a Request that asks an `EngineClient`."""

from __future__ import annotations

from typing import TypeAlias

from starlette.routing import Route

from hookline.core.serve.anthropic.errors import ANTHROPIC_ERRORS
from hookline.core.serve.anthropic.messages import Messages
from hookline.core.serve.endpoints.answering import Answers, Endpoint
from hookline.core.serve.endpoints.surface import Surface
from hookline.core.serve.engine_client import EngineClient
from hookline.core.serve.errors import OPENAI_ERRORS
from hookline.core.serve.http.openapi import Documents
from hookline.core.serve.openai.chat import Chat
from hookline.core.serve.openai.completions import Completions
from hookline.core.serve.openai.embeddings import Embeddings
from hookline.core.serve.openai.models import Models
from hookline.core.serve.openai.responses import Responses
from hookline.core.serve.openai.scores import Scores
from hookline.core.serve.openai.tokens import Tokens
from hookline.core.serve.settings import ServeConfig

Handler: TypeAlias = tuple[str, str, Endpoint]
"""Method, path, and who answers."""


def routes(client: EngineClient, settings: ServeConfig) -> list[Route]:
    """The routes below /v1, and those that go with them.

    Raises: PluginError or ConfigError for a parser that cannot be used.
    """
    surface, max_len = Surface(client, settings), client.facts.max_model_len
    return [
        Route(path, Answers(handler, form, max_len), methods=[method])
        for form, handlers in ((OPENAI_ERRORS, _openai(surface)), (ANTHROPIC_ERRORS, _anthropic(surface)))
        for method, path, handler in handlers
    ]


def _openai(surface: Surface) -> list[Handler]:
    models, tokens, scores = Models(surface), Tokens(surface), Scores(surface)
    documents = Documents(surface.settings)
    handlers: list[Handler] = [
        ("GET", "/openapi.json", documents.json),
        ("GET", "/docs", documents.page),
        ("GET", "/v1/models", models.list),
        ("GET", "/v1/models/{name:path}", models.one),
        ("POST", "/v1/completions", Completions(surface).handle),
        ("POST", "/v1/chat/completions", Chat(surface).handle),
        ("POST", "/v1/responses", Responses(surface).handle),
        ("POST", "/v1/embeddings", Embeddings(surface).handle),
        *(("POST", path, scores.score) for path in ("/score", "/v1/score")),
        *(("POST", path, scores.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
    ]
    return [*handlers, ("GET", "/tokenizer_info", tokens.info)] if surface.settings.tokenizer_info else handlers


def _anthropic(surface: Surface) -> list[Handler]:
    messages = Messages(surface)
    return [("POST", "/v1/messages", messages.handle), ("POST", "/v1/messages/count_tokens", messages.count)]
