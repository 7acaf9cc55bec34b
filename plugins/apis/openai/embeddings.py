"""/v1/embeddings: embeddings of texts, in OpenAI's form with vLLM's and our own fields."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from hookline.core.contracts import ApiError
from hookline.core.errors import shown
from hookline.core.outputs import RequestOutput
from hookline.core.serving import (
    ServedEngine,
    ServiceFields,
    are_ids,
    invalid,
    json_response,
    new_id,
    now_s,
    places_of,
    pooled,
    pooling_params,
    read,
)

FLOAT, BASE64 = "float", "base64"


class EmbeddingsRequest(ServiceFields, kw_only=True):
    """Texts to be embedded."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"input": ["one text", "another"]}
    input: str | list[Any] | None = None
    """A text, texts, token ids, or lists of token ids."""
    encoding_format: str | None = None
    """float: numbers, the default. base64: their bytes as little-endian float32, which is a third of the size."""
    dimensions: int | None = None
    """How many numbers to keep of each vector, from its first one on; unset: all."""
    normalize: bool | None = None
    """Normalise vectors to length 1; unset: as the checkpoint says."""
    pooler: str | None = None
    """How hidden states become a vector; unset: as the checkpoint says."""
    add_special_tokens: bool | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs, each a text or a list of token ids.

        Raises: ApiError if there is none, or for an input of another type.
        """
        given = self.input
        if isinstance(given, str) or are_ids(given):
            return [given]  # type: ignore[list-item]
        if not given:
            raise invalid("input is missing or empty; give a text, token ids or a list of such", "input")
        for place, one in enumerate(given):
            if not isinstance(one, str) and not are_ids(one):
                raise invalid(f"input.{place}={shown(one)} is neither a text nor a list of token ids", f"input.{place}")
        return list(given)


async def embeddings(engine: ServedEngine, request: Request) -> Response:
    """Embed each text.

    Raises: the errors that api_error converts to a response.
    """
    fields, headers = await read(request, EmbeddingsRequest)
    name = engine.model_name(fields.model)
    if fields.pooler is None and engine.facts.no_embeddings is not None:
        raise ApiError(404, engine.facts.no_embeddings, param="model", code="model_not_supported")
    form = fields.encoding_format or FLOAT
    if form not in (FLOAT, BASE64):
        raise invalid(f"encoding_format={shown(form)} must be {FLOAT} or {BASE64}", "encoding_format")
    params = pooling_params(fields)
    engine.check_prompts(fields.input, param="input")
    given = fields.inputs
    adds = fields.add_special_tokens is not False
    prompts = await engine.token_ids(given, param="input", add_special_tokens=adds)
    id, num_tokens = new_id("embd-", request), sum(map(len, prompts))
    outputs = await pooled(engine, prompts, params, fields, request.headers, id, places_of("input", prompts))
    body = await engine.in_time(sum(_size(one) for one in outputs), lambda: _body(outputs, form))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    named = {"id": id, "object": "list", "created": now_s(), "model": name}
    return json_response({**named, "data": msgspec.Raw(body), "usage": usage}, headers=headers)


def _size(output: RequestOutput) -> int:
    return 0 if output.vector is None else len(output.vector)


def _body(outputs: Sequence[RequestOutput], form: str) -> bytes:
    """The list of vectors as JSON."""
    found = []
    for index, output in enumerate(outputs):
        assert output.vector is not None
        data = output.vector.astype(np.dtype("<f4"))
        shape = base64.b64encode(data.tobytes()).decode() if form == BASE64 else data.tolist()
        found.append({"object": "embedding", "index": index, "embedding": shape})
    return msgspec.json.encode(found)
