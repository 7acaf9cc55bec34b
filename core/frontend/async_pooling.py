"""Embeddings, classes and scores of the asynchronous front, for one prompt or pair each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookline.core.frontend.pooling_calls import NOT_SAMPLED
from hookline.core.frontend.relevance import (
    QWEN3_RERANKER,
    PairTemplate,
    cosine,
    embedding_params,
    pair_tokens,
    reading,
    scored,
    scoring_params,
)
from hookline.core.outputs import RequestOutput
from hookline.core.pooling_params import CLASSIFY, PoolingParams
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Prompt

if TYPE_CHECKING:
    from hookline.core.frontend.async_llm import RequestStream
    from hookline.core.frontend.llm import LLM


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
        timeout_s: float | None = None,
    ) -> RequestStream:
        """Queue a prompt to be pooled; its only Delta has the output with the vector. Raises: as `stream`."""
        info = {"priority": priority, "tags": tags, "deadline_s": deadline_s, "cache_salt": cache_salt}
        pooling = PoolingParams() if params is None else params
        return self._submit(prompt, NOT_SAMPLED, timeout_s=timeout_s, pooling=pooling, **info)

    async def embed(self, prompt: Prompt, params: PoolingParams | None = None, **options: Any) -> RequestOutput:
        """Make a vector of a prompt; it is the output's `vector`, float32. Arguments as for LLM.embed, for one prompt.

        Raises: RequestError if it cannot be served, QueueFullError among them; EngineError if the engine breaks off.
        """
        (output,) = [delta.output async for delta in self.pool(prompt, params, **options) if delta.output is not None]
        return output

    async def classify(
        self,
        prompt: Prompt,
        params: PoolingParams = PoolingParams(task=CLASSIFY),  # noqa: B008 - frozen
        **options: Any,
    ) -> RequestOutput:
        """Logits of a ForSequenceClassification checkpoint's classes, as the output's `vector`. Raises: as `embed`."""
        return await self.embed(prompt, params, **options)

    async def score(
        self,
        query: str,
        document: str,
        params: PoolingParams | None = None,
        *,
        template: PairTemplate = QWEN3_RERANKER,
        **options: Any,
    ) -> RequestOutput:
        """How well a document answers a query, as the output's `score`; see LLM.score. Raises: as `embed`."""
        pooling = scoring_params(params, self.llm.pooling_defaults.scored_by)
        if pooling is None:
            each = (self.embed(text, embedding_params(params), **options) for text in (query, document))
            first, second = await asyncio.gather(*each)
            return scored(second, cosine(first))
        prompt = await asyncio.to_thread(pair_tokens, self.llm.codec, template, query, document)
        return scored(await self.embed(prompt, pooling, **options), reading(pooling))
