"""Embeddings, classes and scores of the blocking front: prompts in, one vector each out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from hookline.core.frontend.generation import Asked, Call, ProgressBar, params_each
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.frontend.relevance import (
    QWEN3_RERANKER,
    PairTemplate,
    as_texts,
    check_texts,
    cosine,
    embedding_params,
    pair_tokens,
    reading,
    scored,
    scoring_params,
)
from hookline.core.outputs import RequestOutput
from hookline.core.pooling_params import CLASSIFY, PoolingDefaults, PoolingParams
from hookline.core.request_options import PLAIN, EachOptionKeys, RequestOptions, options_each
from hookline.core.sampling_params import NOT_SAMPLED
from hookline.core.tokenizer.codec import Codec, Prompt, as_prompts

Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingCalls:
    """The pooling methods of an LLM, run by the same engine. Arguments that `generate` has, too, mean the same here."""

    output_processor: OutputProcessor
    codec: Codec

    @property
    def pooling_defaults(self) -> PoolingDefaults:
        """The checkpoint's defaults: how its vectors are pooled and pairs are scored."""
        return self.output_processor.engine.limits.poolers.defaults

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool | ProgressBar | None = None,
        **options: Unpack[EachOptionKeys],
    ) -> list[RequestOutput]:
        """Make a vector of each prompt; it is the output's `vector`, float32.

        prompts: as for `generate`. params: for all prompts, or one each; None pools as the checkpoint's
        sentence-transformers files say, or takes the last token without them, scaled to length 1.
        A prompt that cannot be served yields an output with finish_reason "error" and its reason; the others run on.
        Raises: as generate.
        """
        wanted = as_prompts(prompts)
        each = options_each(len(wanted), **options)
        return self._pool(wanted, params_each(params, PoolingParams, len(wanted)), each, progress)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = PoolingParams(task=CLASSIFY),  # noqa: B008 - frozen
        *,
        progress: bool | ProgressBar | None = None,
        **options: Unpack[EachOptionKeys],
    ) -> list[RequestOutput]:
        """Logits of a ForSequenceClassification checkpoint's classes, as the output's `vector`, float32 (classes,).

        Their softmax gives the classes' probabilities. Arguments as for `embed`.
        Raises: as generate.
        """
        return self.embed(prompts, params, progress=progress, **options)

    def score(
        self,
        query: str,
        documents: str | Sequence[str],
        params: PoolingParams | None = None,
        *,
        template: PairTemplate = QWEN3_RERANKER,
        progress: bool | ProgressBar | None = None,
        **options: Unpack[EachOptionKeys],
    ) -> list[RequestOutput]:
        """How well each document answers the query; the number is the output's `score`.

        A reranker reads both in `template` and gives a probability: that of yes against no, or of its class. A
        checkpoint with sentence-transformers files embeds them one by one, and the score is the vectors' cosine.
        Raises: as generate; RequestError if query or documents are no texts, or if there is no tokenizer.
        """
        texts = as_texts(documents)
        check_texts(query, *texts)
        each = options_each(len(texts), **options)
        pooling = scoring_params(params, self.pooling_defaults.scored_by)
        if pooling is None:
            embedding = params_each(embedding_params(params), PoolingParams, 1 + len(texts))
            found = self._pool([query, *texts], embedding, [*(each[:1] or [PLAIN]), *each], progress)
            return [scored(output, cosine(found[0])) for output in found[1:]]
        prompts = [pair_tokens(self.codec, template, query, text) for text in texts]
        outputs = self._pool(prompts, params_each(pooling, PoolingParams, len(texts)), each, progress)
        return [scored(output, reading(pooling)) for output in outputs]

    def _pool(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[PoolingParams],
        options: Sequence[RequestOptions],
        progress: bool | ProgressBar | None,
    ) -> list[RequestOutput]:
        asked = [
            Asked(prompt, NOT_SAMPLED, option, one)
            for prompt, one, option in zip(prompts, params, options, strict=True)
        ]
        return Call(self.output_processor, asked).outputs(progress)
