"""Embeddings, classes and scores of the asynchronous front, for one prompt or pair each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Unpack

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
from hookline.core.request_options import OptionKeys, RequestOptions, options_of
from hookline.core.sampling_params import NOT_SAMPLED, SamplingParams
from hookline.core.tokenizer.codec import Prompt

if TYPE_CHECKING:
    from hookline.core.frontend.completion_stream import RequestStream
    from hookline.core.frontend.llm import LLM


class AsyncPoolingCalls:
    """The pooling methods of an AsyncLLM: embeddings, classes, scores."""

    llm: LLM

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, **further: Any
    ) -> RequestStream:
        raise NotImplementedError

    def pool(self, prompt: Prompt, params: PoolingParams | None = None, **options: Unpack[OptionKeys]) -> RequestStream:
        """Queue a prompt to be pooled; its only Delta has the output with the vector. Raises: as `stream`."""
        pooling = PoolingParams() if params is None else params
        return self._submit(prompt, NOT_SAMPLED, options_of(**options), pooling=pooling)

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None, **options: Unpack[OptionKeys]
    ) -> RequestOutput:
        """Make a vector of a prompt; it is the output's `vector`, float32. Arguments as for LLM.embed, for one prompt.

        Raises: RequestError if it cannot be served, QueueFullError among them; EngineError if the engine breaks off.
        """
        stream = self.pool(prompt, params, **options)
        (output,) = [delta.output async for delta in stream if delta.output is not None]
        return output

    async def classify(
        self,
        prompt: Prompt,
        params: PoolingParams = PoolingParams(task=CLASSIFY),  # noqa: B008 - frozen
        **options: Unpack[OptionKeys],
    ) -> RequestOutput:
        """Logits of a ForSequenceClassification checkpoint's classes, as the output's `vector`, float32 (classes,).

        Arguments as for LLM.classify, for one prompt. Raises: as `embed`.
        """
        return await self.embed(prompt, params, **options)

    async def score(
        self,
        query: str,
        document: str,
        params: PoolingParams | None = None,
        *,
        template: PairTemplate = QWEN3_RERANKER,
        **options: Unpack[OptionKeys],
    ) -> RequestOutput:
        """How well a document answers a query, as the output's `score`. Arguments as for LLM.score, for one document.

        Raises: as `embed`; RequestError if one of the two is no text, or if there is no tokenizer.
        """
        check_texts(query, document)
        pooling = scoring_params(params, self.llm.pooling_defaults.scored_by)
        if pooling is None:
            each = (self.embed(text, embedding_params(params), **options) for text in (query, document))
            first, second = await asyncio.gather(*each)
            return scored(second, cosine(first))
        prompt = await asyncio.to_thread(pair_tokens, self.llm.codec, template, query, document)
        return scored(await self.embed(prompt, pooling, **options), reading(pooling))
