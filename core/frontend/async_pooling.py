"""Embeddings, classes and scores of the asynchronous front, for one prompt or pair each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.core.frontend.relevance import (
    QWEN3_RERANKER,
    PairTemplate,
    check_texts,
    cosine,
    embedding_params,
    pair_tokens,
    reading,
    scored,
    scoring_params,
)
from hookline.core.outputs import RequestOutput
from hookline.core.pooling_params import CLASSIFY, PoolingParams
from hookline.core.sampling_params import NOT_SAMPLED, SamplingParams
from hookline.core.tokenizer.codec import Prompt

if TYPE_CHECKING:
    from hookline.core.frontend.llm import LLM
    from hookline.core.frontend.request_stream import RequestStream


class AsyncPoolingCalls:
    """What an AsyncLLM does beside generating."""

    llm: LLM

    def _submit(self, prompt: Prompt, params: SamplingParams | None, **options: Any) -> RequestStream:
        raise NotImplementedError

    def pool(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        priority: int = 0,
        tags: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        trace: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> RequestStream:
        """Queue a prompt to be pooled; its only Delta has the output with the vector. Raises: as `stream`."""
        info = {"priority": priority, "tags": tags, "deadline_s": deadline_s, "cache_salt": cache_salt}
        pooling = PoolingParams() if params is None else params
        return self._submit(prompt, NOT_SAMPLED, timeout_s=timeout_s, pooling=pooling, trace=trace, **info)

    async def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        priority: int = 0,
        tags: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Make a vector of a prompt; it is the output's `vector`, float32. Arguments as for LLM.embed, for one prompt.

        Raises: RequestError if it cannot be served, QueueFullError among them; EngineError if the engine breaks off.
        """
        info = {"priority": priority, "tags": tags, "deadline_s": deadline_s, "cache_salt": cache_salt}
        return await self._pooled(prompt, params, timeout_s, info)

    async def classify(
        self,
        prompt: Prompt,
        params: PoolingParams = PoolingParams(task=CLASSIFY),  # noqa: B008 - frozen
        *,
        priority: int = 0,
        tags: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Logits of a ForSequenceClassification checkpoint's classes, as the output's `vector`, float32 (classes,).

        Arguments as for LLM.classify, for one prompt. Raises: as `embed`.
        """
        info = {"priority": priority, "tags": tags, "deadline_s": deadline_s, "cache_salt": cache_salt}
        return await self._pooled(prompt, params, timeout_s, info)

    async def score(
        self,
        query: str,
        document: str,
        params: PoolingParams | None = None,
        *,
        template: PairTemplate = QWEN3_RERANKER,
        priority: int = 0,
        tags: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """How well a document answers a query, as the output's `score`. Arguments as for LLM.score, for one document.

        Raises: as `embed`; RequestError if one of the two is no text, or if there is no tokenizer.
        """
        info = {"priority": priority, "tags": tags, "deadline_s": deadline_s, "cache_salt": cache_salt}
        check_texts(query, document)
        pooling = scoring_params(params, self.llm.pooling_defaults.scored_by)
        if pooling is None:
            each = (self._pooled(text, embedding_params(params), timeout_s, info) for text in (query, document))
            first, second = await asyncio.gather(*each)
            return scored(second, cosine(first))
        prompt = await asyncio.to_thread(pair_tokens, self.llm.codec, template, query, document)
        return scored(await self._pooled(prompt, pooling, timeout_s, info), reading(pooling))

    async def _pooled(
        self, prompt: Prompt, params: PoolingParams | None, timeout_s: float | None, info: Mapping[str, Any]
    ) -> RequestOutput:
        stream = self.pool(prompt, params, timeout_s=timeout_s, **info)
        (output,) = [delta.output async for delta in stream if delta.output is not None]
        return output
