"""The routes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.contracts import ApiRoute, ApiSurface
from hookline.core.serving import ServedEngine
from hookline.plugins.apis.openai import answers
from hookline.plugins.apis.openai.chat import chat
from hookline.plugins.apis.openai.chat_request import ChatRequest
from hookline.plugins.apis.openai.completion_request import CompletionRequest
from hookline.plugins.apis.openai.completions import completions
from hookline.plugins.apis.openai.embeddings import EmbeddingsRequest, embeddings
from hookline.plugins.apis.openai.errors import OPENAI_ERRORS
from hookline.plugins.apis.openai.models import list_models, one_model
from hookline.plugins.apis.openai.responses import responses
from hookline.plugins.apis.openai.responses_request import ResponsesRequest
from hookline.plugins.apis.openai.scores import RerankRequest, ScoreRequest, rerank, score
from hookline.plugins.apis.openai.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
    tokenizer_info,
)

Endpoint = Callable[[ServedEngine, Request], Awaitable[Response]]


class OpenAI(ApiSurface):
    """OpenAI's API, and the endpoints for scores and tokens of vLLM's server."""

    errors = OPENAI_ERRORS

    def __init__(self, config: Any, engine: ServedEngine) -> None:
        self._engine = engine

    def routes(self) -> Sequence[ApiRoute]:
        """See ApiSurface."""
        found = [
            self._get("/v1/models", list_models, "The model's card under each of its names", answers.ModelList),
            self._get("/v1/models/{name:path}", one_model, ""),
            *self._generating(),
            self._post("/v1/embeddings", embeddings, "Vectors of texts", EmbeddingsRequest, answers.EmbeddingList),
            *self._ranking(),
            self._post("/tokenize", tokenize, "Token ids of a text or of messages", TokenizeRequest, answers.TokenList),
            self._post("/detokenize", detokenize, "The text of token ids", DetokenizeRequest, answers.DetokenizedText),
        ]
        if self._engine.settings.tokenizer_info:
            found.append(self._get("/tokenizer_info", tokenizer_info, "What the tokenizer was made with"))
        return found

    def _generating(self) -> list[ApiRoute]:
        told = "Answer a conversation with items; nothing is kept"
        return [
            self._post(
                "/v1/completions", completions, "Go on with a text", CompletionRequest, answers.Completion, True
            ),
            self._post("/v1/chat/completions", chat, "Answer messages", ChatRequest, answers.ChatCompletion, True),
            self._post("/v1/responses", responses, told, ResponsesRequest, answers.ResponseObject, True),
        ]

    def _ranking(self) -> list[ApiRoute]:
        scores, ranks = (
            "How well documents answer a query",
            "Documents in the order of how well they answer a query",
        )
        return [
            self._post("/score", score, scores, ScoreRequest, answers.ScoreList),
            self._post("/v1/score", score, "", ScoreRequest, answers.ScoreList),
            self._post("/rerank", rerank, ranks, RerankRequest, answers.Ranking),
            self._post("/v1/rerank", rerank, "", RerankRequest, answers.Ranking),
            self._post("/v2/rerank", rerank, "", RerankRequest, answers.Ranking),
        ]

    def _get(self, path: str, endpoint: Endpoint, summary: str, answer: type | None = None) -> ApiRoute:
        return ApiRoute("GET", path, partial(endpoint, self._engine), summary, answer=answer)

    def _post(
        self, path: str, endpoint: Endpoint, summary: str, body: type, answer: type, streams: bool = False
    ) -> ApiRoute:
        return ApiRoute("POST", path, partial(endpoint, self._engine), summary, body, answer, streams=streams)
