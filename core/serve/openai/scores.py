"""/score and /rerank: how well documents answer a query, in the forms of vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from hookline.core.errors import shown
from hookline.core.frontend.relevance import (
    QWEN3_RERANKER,
    cosine,
    embedding_params,
    pair_tokens,
    reading,
    scored,
    scoring_params,
)
from hookline.core.outputs import RequestOutput
from hookline.core.serve.endpoints.answering import json_response
from hookline.core.serve.endpoints.body import read
from hookline.core.serve.endpoints.generation import check_end
from hookline.core.serve.endpoints.pooling import pooled
from hookline.core.serve.endpoints.surface import Surface, new_id, now_s
from hookline.core.serve.errors import invalid, too_long


class _Scoring(msgspec.Struct, kw_only=True):
    """Fields of both."""

    model: str | None = None
    """One of the names in /v1/models; unset: the model that is served."""
    user: str | None = None
    priority: int | None = None
    """Lower comes first, with a scheduler that heeds it."""
    cache_salt: str | None = None
    """Prompts share cached blocks with those of the same salt alone."""
    tags: dict[str, str] | None = None
    """Whose request it is, for schedulers and metrics."""
    deadline_s: float | None = None
    """Seconds after which it should be done, for schedulers that heed it."""
    timeout_s: float | None = None
    """Seconds after which it is ended with an error."""


class ScoreRequest(_Scoring, kw_only=True):
    """Pairs of texts; one text_1 goes with each text_2."""

    IGNORED: ClassVar[tuple[str, ...]] = ("user",)

    text_1: str | list[str] | None = None
    """The query, or one for each text_2."""
    text_2: str | list[str] | None = None
    """A document, or several."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Queries with their documents.

        Raises: ApiError if one side is empty, or if they do not fit together.
        """
        first, second = _texts("text_1", self.text_1), _texts("text_2", self.text_2)
        if len(first) not in (1, len(second)):
            raise invalid(f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many", "text_1")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class RerankRequest(_Scoring, kw_only=True):
    """A query, and the documents to be put in order."""

    IGNORED: ClassVar[tuple[str, ...]] = ("user",)

    query: str | None = None
    documents: list[Any] | None = None
    """Texts, or objects with a text."""
    top_n: int | None = None
    """Give so many of the best; unset or 0: all."""
    return_documents: bool | None = None
    """Give the texts back; true unless set."""

    @property
    def texts(self) -> list[str]:
        """The documents' texts.

        Raises: ApiError if one has none.
        """
        found: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in self.documents or ()]
        for place, one in enumerate(found):
            if not isinstance(one, str):
                given = (self.documents or [])[place]
                raise invalid(f"documents.{place}={shown(given)} is no text", f"documents.{place}")
        return _texts("documents", found)


class Scores:
    """The endpoints."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def score(self, request: Request) -> Response:
        """The scores of pairs, in their order."""
        fields, headers = await read(request, ScoreRequest)
        name = self._surface.model_name(fields.model)
        pairs = fields.pairs
        self._surface.check_number(len(pairs), param="text_2")
        numbers, num_tokens = await self._scores(pairs, fields, request.headers)
        data = [{"index": index, "object": "score", "score": number} for index, number in enumerate(numbers)]
        named = {"id": new_id("score-", request), "object": "list", "created": now_s(), "model": name}
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return json_response({**named, "data": data, "usage": usage}, headers=headers)

    async def rerank(self, request: Request) -> Response:
        """Documents with their scores, the best first."""
        fields, headers = await read(request, RerankRequest)
        name, texts = self._surface.model_name(fields.model), fields.texts
        if not isinstance(fields.query, str):
            raise invalid("query is missing; give a text", "query")
        if fields.top_n is not None and fields.top_n < 0:
            raise invalid(f"top_n={shown(fields.top_n)} must be at least 0", "top_n")
        self._surface.check_number(len(texts), param="documents")
        numbers, num_tokens = await self._scores([(fields.query, text) for text in texts], fields, request.headers)
        order = sorted(range(len(texts)), key=lambda index: -numbers[index])[: fields.top_n or None]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": numbers[index]} for index in order]
        if fields.return_documents is not False:
            results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
        named = {"id": new_id("rerank-", request), "model": name}
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return json_response({**named, "usage": usage, "results": results}, headers=headers)

    async def _scores(self, pairs: Sequence[tuple[str, str]], fields: Any, headers: Headers) -> tuple[list[float], int]:
        """The scores of pairs, and how many tokens were read."""
        surface = self._surface
        params = scoring_params(None, surface.facts.scored_by)
        if params is None:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            prompts = await surface.encoded(texts)
            found = await pooled(surface, prompts, embedding_params(None), fields, headers)
            vectors = dict(zip(texts, found, strict=True))
            outputs = [scored(vectors[document], cosine(vectors[query])) for query, document in pairs]
        else:
            prompts = await surface.each(pairs, lambda pair: len(pair[0]) + len(pair[1]), self._pair)
            found = await pooled(surface, prompts, params, fields, headers)
            outputs = [scored(output, reading(params)) for output in found]
        return [_number(output) for output in outputs], sum(map(len, prompts))

    def _pair(self, pair: tuple[str, str]) -> list[int]:
        """The prompt of a query and a document.

        Raises: ApiError at the first that is too long, since a long query comes with every document.
        """
        ids, most = pair_tokens(self._surface.codec, QWEN3_RERANKER, *pair), self._surface.facts.max_model_len
        if len(ids) > most:
            raise too_long(most, f"However, a query with its document has {len(ids)} tokens. Please shorten them.")
        return ids


def _number(output: RequestOutput) -> float:
    check_end(output)
    assert output.score is not None
    return output.score


def _texts(name: str, given: Any) -> list[str]:
    texts: list[str] = [given] if isinstance(given, str) else given
    if not texts:
        raise invalid(f"{name} is missing or empty; give a text or several", name)
    return texts
