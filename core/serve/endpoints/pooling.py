"""Shared by the endpoints that pool prompts: their parameters, and one output for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers

from hookline.core.outputs import RequestOutput
from hookline.core.pooling_params import PoolingParams
from hookline.core.sampling_params import NOT_SAMPLED
from hookline.core.serve.endpoints.request_options import ServiceFields, span
from hookline.core.serve.endpoints.served_engine import ServedEngine
from hookline.core.serve.errors import SAME_NAMES

FIELDS = ("pooler", "normalize", "dimensions")


def pooling_params(fields: Any) -> PoolingParams:
    """The pooling parameters of a request.

    Raises: ApiError naming the field.
    """
    with SAME_NAMES:
        return PoolingParams(**{name: getattr(fields, name) for name in FIELDS})


async def pooled(
    engine: ServedEngine,
    prompts: Sequence[list[int]],
    params: PoolingParams,
    fields: ServiceFields,
    headers: Headers,
    id: str,
    places: Sequence[str] = (),
) -> list[RequestOutput]:
    """Pool prompts; returns one output with a vector for each.

    id: of the response. places: names of the prompts in errors.
    Raises: RequestError or ApiError if a prompt cannot be served; the other prompts are cancelled then.
    """
    asked = [(token_ids, NOT_SAMPLED) for token_ids in prompts]
    generation = await engine.open(asked, fields, headers, pooling=params, places=places, span=span("embeddings", id))
    try:
        return [output for (output,) in await generation.outputs()]
    finally:
        await generation.aclose()
