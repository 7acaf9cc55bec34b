"""How well a document answers a query: the prompts for rerankers, and a score from their vectors.

The texts of a query and a document come from a request, so special tokens in them are read as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hookline.core.errors import PluginFault, RequestError, shown
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.pooling_params import CLASSIFY, EMBED, PoolingParams
from hookline.core.tokenizer.codec import Codec
from hookline.core.util.arrays import VectorArray


@dataclass(frozen=True)
class PairTemplate:
    """The text around a query and a document in a reranker's prompt; the defaults are Qwen3-Reranker's.

    prefix and suffix may hold special tokens. instruction, in the pair's text, says what a good answer is.
    """

    prefix: str = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix: str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction: str = "Given a web search query, retrieve relevant passages that answer the query"


QWEN3_RERANKER = PairTemplate()


def pair_tokens(codec: Codec, template: PairTemplate, query: str, document: str) -> list[int]:
    """The prompt of one pair.

    Raises: RequestError if query, document or instruction is no text, or if there is no tokenizer.
    """
    for what, text in (("query", query), ("document", document), ("instruction", template.instruction)):
        if not isinstance(text, str):
            raise RequestError(f"{what}={shown(text)} must be a text")
    pair = "<Instruct>: " + template.instruction + "\n<Query>: " + query + "\n<Document>: " + document
    around = [codec.encode_text(text, add_special_tokens=False) for text in (template.prefix, template.suffix)]
    return around[0] + codec.encode_plain(pair) + around[1]


def scoring_params(params: PoolingParams | None, scored_by: str) -> PoolingParams | None:
    """Pooling of a pair's prompt; None embeds query and document separately. scored_by: see PoolingDefaults."""
    if params is not None and params.pooler is not None:
        return params
    return None if scored_by == EMBED else PoolingParams(task=scored_by)


def embedding_params(params: PoolingParams | None) -> PoolingParams:
    """Pooling of a text whose vector is compared with another: normalised, so that a dot product is the cosine."""
    return replace(PoolingParams() if params is None else params, normalize=True)


def scored(output: RequestOutput, find: Callable[[VectorArray], float]) -> RequestOutput:
    """The output with its vector replaced by the score, (1,), that `find` computes; an error output if it raises."""
    if output.vector is None:
        return output
    try:
        return replace(output, vector=np.array([find(output.vector)], dtype=np.float32))
    except RequestError as error:
        is_fault = isinstance(error, PluginFault)
        return replace(output, vector=None, finish_reason=FinishReason.ERROR, error=str(error), is_fault=is_fault)


def relevance(vector: VectorArray) -> float:
    """The score that a vector of one number is.

    Raises: RequestError if there are more.
    """
    if len(vector) != 1:
        raise RequestError(f"a score is one number, and this pooler gives {len(vector)}; use embed or classify")
    return float(vector[0])


def class_relevance(logits: VectorArray) -> float:
    """The probability of a single class, or of the second of two, from their logits.

    Raises: RequestError if there are more.
    """
    numbers = logits.astype(np.float64)
    if len(numbers) > 2:
        raise RequestError(f"a score needs one class or two, and this checkpoint has {len(numbers)}; use classify")
    return float(1 / (1 + np.exp(-(numbers[-1] - (numbers[0] if len(numbers) == 2 else 0.0)))))


def reading(params: PoolingParams) -> Callable[[VectorArray], float]:
    """The function that reads a score from a pair's vector."""
    return class_relevance if params.pooler is None and params.task == CLASSIFY else relevance


def cosine(query: RequestOutput) -> Callable[[VectorArray], float]:
    """A function from a document's embedding to its cosine with the query's.

    Raises: RequestError with the query's error, if it has no embedding.
    """
    if query.vector is None:
        kind = PluginFault if query.is_fault else RequestError
        raise kind(f"the query cannot be embedded: {query.error}")
    vector = query.vector
    return lambda other: float(np.dot(vector.astype(np.float64), other))


def as_texts(documents: Any) -> Sequence[Any]:
    """A text or several, as a list. Raises: RequestError for anything else."""
    if isinstance(documents, str):
        return [documents]
    if not isinstance(documents, Iterable):
        raise RequestError(f"score compares texts, and documents={shown(documents)} holds none")
    return list(documents)


def check_texts(*texts: object) -> None:
    """Refuse values that are not texts. Raises: RequestError."""
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"score compares texts, and {shown(text)} is none")
