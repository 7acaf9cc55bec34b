"""The endpoints that clients of a model use. Each is a coroutine over a Request that asks an `EngineClient`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hookline.core.serve.anthropic.errors import ANTHROPIC_ERRORS
from hookline.core.serve.anthropic.messages import count_tokens, messages
from hookline.core.serve.endpoints.answering import Answers
from hookline.core.serve.endpoints.surface import Surface
from hookline.core.serve.engine_client import EngineClient
from hookline.core.serve.errors import OPENAI_ERRORS
from hookline.core.serve.http.models import list_models, one_model
from hookline.core.serve.http.openapi import docs_page, openapi_json
from hookline.core.serve.openai.chat import chat
from hookline.core.serve.openai.completions import completions
from hookline.core.serve.openai.embeddings import embeddings
from hookline.core.serve.openai.responses import responses
from hookline.core.serve.openai.scores import rerank, score
from hookline.core.serve.openai.tokens import detokenize, tokenize, tokenizer_info
from hookline.core.serve.settings import ServeConfig

Endpoint: TypeAlias = Callable[[Surface, Request], Awaitable[Response]]
_OPENAI: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/openapi.json", openapi_json),
    ("GET", "/docs", docs_page),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", one_model),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/embeddings", embeddings),
    *(("POST", path, score) for path in ("/score", "/v1/score")),
    *(("POST", path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
)
"""Method, path and handler of each route."""
_ANTHROPIC: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
)


def routes(client: EngineClient, settings: ServeConfig) -> list[Route]:
    """The routes below /v1, and their aliases.

    Raises: PluginError or ConfigError for a parser that cannot be used.
    """
    surface, max_len = Surface(client, settings), client.facts.max_model_len
    openai = (*_OPENAI, ("GET", "/tokenizer_info", tokenizer_info)) if settings.tokenizer_info else _OPENAI
    return [
        Route(path, Answers(partial(endpoint, surface), form, max_len), methods=[method])
        for form, endpoints in ((OPENAI_ERRORS, openai), (ANTHROPIC_ERRORS, _ANTHROPIC))
        for method, path, endpoint in endpoints
    ]
