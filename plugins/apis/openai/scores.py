"""/score and /rerank: how well documents answer a query, in the forms of vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from hookline.core.errors import shown
from hookline.core.outputs import RequestOutput
from hookline.core.serving import (
    QWEN3_RERANKER,
    ServedEngine,
    ServiceFields,
    check_end,
    cosine,
    embedding_params,
    invalid,
    json_response,
    new_id,
    now_s,
    pair_tokens,
    pooled,
    read,
    reading,
    scored,
    scoring_params,
    too_long,
)


class ScoreRequest(ServiceFields, kw_only=True):
    """Pairs of texts to be scored; a single text_1 is paired with each text_2."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"text_1": "capital of France", "text_2": ["Paris", "a loaf of bread"]}
    text_1: str | list[str] | None = None
    """The query, or a query for each text_2."""
    text_2: str | list[str] | None = None
    """A document or a list of documents."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of queries and documents.

        Raises: ApiError if one side is empty, or if their numbers differ.
        """
        first, second = _texts("text_1", self.text_1), _texts("text_2", self.text_2)
        if len(first) not in (1, len(second)):
            raise invalid(f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many", "text_1")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class RerankRequest(ServiceFields, kw_only=True):
    """A query, and documents to be sorted by relevance."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"query": "capital of France", "documents": ["Paris", "a loaf of bread"]}
    query: str | None = None
    documents: list[Any] | None = None
    """Texts, or objects with a text."""
    top_n: int | None = None
    """Number of documents to return, the best ones; unset or 0: all."""
    return_documents: bool | None = None
    """Return the texts; true unless set."""

    @property
    def texts(self) -> list[str]:
        """The texts of the documents.

        Raises: ApiError if a document has none.
        """
        found: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in self.documents or ()]
        for place, one in enumerate(found):
            if not isinstance(one, str):
                given = (self.documents or [])[place]
                raise invalid(f"documents.{place}={shown(given)} is no text", f"documents.{place}")
        return _texts("documents", found)


async def score(engine: ServedEngine, request: Request) -> Response:
    """The response with the scores of pairs, in their order."""
    fields, headers = await read(request, ScoreRequest)
    name = engine.model_name(fields.model)
    engine.check_prompts(fields.text_2, param="text_2")
    pairs, id = fields.pairs, new_id("score-", request)
    numbers, num_tokens = await _scores(engine, pairs, fields, request.headers, id, ("text_1", "text_2"))
    data = [{"index": index, "object": "score", "score": number} for index, number in enumerate(numbers)]
    named = {"id": id, "object": "list", "created": now_s(), "model": name}
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json_response({**named, "data": data, "usage": usage}, headers=headers)


async def rerank(engine: ServedEngine, request: Request) -> Response:
    """The response with documents and their scores, the best first."""
    fields, headers = await read(request, RerankRequest)
    name = engine.model_name(fields.model)
    if not isinstance(fields.query, str):
        raise invalid("query is missing; give a text", "query")
    if fields.top_n is not None and fields.top_n < 0:
        raise invalid(f"top_n={shown(fields.top_n)} must be at least 0", "top_n")
    engine.check_number(len(fields.documents or ()), param="documents")
    texts = fields.texts
    pairs, id = [(fields.query, text) for text in texts], new_id("rerank-", request)
    numbers, num_tokens = await _scores(engine, pairs, fields, request.headers, id, ("query", "documents"))
    order = sorted(range(len(texts)), key=lambda index: -numbers[index])[: fields.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": numbers[index]} for index in order]
    if fields.return_documents is not False:
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    named = {"id": id, "model": name}
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json_response({**named, "usage": usage, "results": results}, headers=headers)


async def _scores(
    engine: ServedEngine,
    pairs: Sequence[tuple[str, str]],
    fields: ServiceFields,
    headers: Headers,
    id: str,
    names: tuple[str, str],
) -> tuple[list[float], int]:
    """The scores of pairs, and the number of tokens read. names: of the fields with queries and with documents."""
    params, of_query, of_document = scoring_params(None, engine.facts.scored_by), *names
    documents = [f"{of_document}.{index}" for index in range(len(pairs))]
    if params is None:
        places: dict[str, str] = {}
        for pair, document in zip(pairs, documents, strict=True):
            places.setdefault(pair[0], of_query)
            places.setdefault(pair[1], document)
        prompts = await engine.encoded(list(places))
        found = await pooled(engine, prompts, embedding_params(None), fields, headers, id, list(places.values()))
        vectors = dict(zip(places, found, strict=True))
        outputs = [scored(vectors[document], cosine(vectors[query])) for query, document in pairs]
    else:
        prompts = await engine.each(pairs, lambda pair: len(pair[0]) + len(pair[1]), partial(_pair, engine))
        found = await pooled(engine, prompts, params, fields, headers, id, documents)
        outputs = [scored(output, reading(params)) for output in found]
    return [_number(output) for output in outputs], sum(map(len, prompts))


def _pair(engine: ServedEngine, pair: tuple[str, str]) -> list[int]:
    """The prompt of a query and a document.

    Raises: ApiError for the first prompt that is too long; the others need not be made then, since a long query is in
    all of them.
    """
    ids, most = pair_tokens(engine.codec, QWEN3_RERANKER, *pair), engine.facts.max_model_len
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
