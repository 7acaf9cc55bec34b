"""What all endpoints share: the engine's client, the settings, the parsers, tokens' texts, and the model's names."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from hookline.core.errors import clipped
from hookline.core.pooling_params import PoolingParams
from hookline.core.serve.endpoints.answering import EventStream, closing
from hookline.core.serve.endpoints.generation import Generation
from hookline.core.serve.endpoints.request_options import request_options
from hookline.core.serve.engine_client import DeltaStream, EngineClient, ServedModel
from hookline.core.serve.errors import ApiError, ErrorForm, invalid
from hookline.core.serve.parsers import Parsers, chosen_parsers
from hookline.core.serve.settings import ServeConfig
from hookline.core.tokenizer.codec import Codec
from hookline.core.tokenizer.token_spelling import TokenSpelling

LONG_TEXT = 4000
"""Characters that take a millisecond or more to tokenize, which is then done in a thread."""
Result = TypeVar("Result")


class Work(Protocol):
    """How an endpoint makes its answer of a generation."""

    def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The frames of a stream."""
        ...

    async def whole(self, generation: Generation, headers: Mapping[str, str]) -> Response:
        """The response when all is there."""
        ...


class Surface:
    """The server as its endpoints see it."""

    def __init__(self, client: EngineClient, settings: ServeConfig, parsers: Parsers | None = None) -> None:
        self.client, self.settings = client, settings
        self.parsers = chosen_parsers(settings.reasoning_parser, settings.tool_parser) if parsers is None else parsers
        self.spelling = TokenSpelling(client.facts.codec)

    @property
    def facts(self) -> ServedModel:
        """The model that is served."""
        return self.client.facts

    @property
    def codec(self) -> Codec:
        """The model's tokenizer."""
        return self.client.facts.codec

    def model_name(self, asked: str | None) -> str:
        """The name that a response bears; a request without one means the model that is served.

        Raises: ApiError with status 404 for another one.
        """
        names = self.facts.names
        if asked is not None and asked not in names:
            message = f"The model `{clipped(asked)}` does not exist. Served: {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked or names[0]

    async def in_time(self, num_characters: int, work: Callable[[], Result]) -> Result:
        """The result of some work with a text, done in a thread if the text is long."""
        return work() if num_characters < LONG_TEXT else await asyncio.to_thread(work)

    async def encoded(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""
        encode = partial(self.codec.encode_text, add_special_tokens=add_special_tokens)
        return await self.in_time(sum(map(len, texts)), lambda: [encode(text) for text in texts])

    async def open(
        self,
        asked: list[tuple[list[int], Any]],
        fields: Any,
        headers: Headers,
        *,
        pooling: PoolingParams | None = None,
    ) -> Generation:
        """Queue prompts, each with its sampling parameters; or all to be pooled.

        Raises: what EngineClient.stream raises at once; none of the prompts is left queued then.
        """
        if len(asked) > self.settings.max_requests:
            raise invalid(
                f"prompt holds {len(asked)} prompts; at most {self.settings.max_requests} are allowed", "prompt"
            )
        options = request_options(fields, headers) | ({} if pooling is None else {"pooling": pooling})
        streams: list[DeltaStream] = []
        try:
            for token_ids, params in asked:
                streams.append(self.client.stream(token_ids, params, **options))
        except BaseException:
            await Generation(streams).aclose()
            raise
        return Generation(streams)

    async def answer(
        self,
        work: Work,
        asked: list[tuple[list[int], Any]],
        fields: Any,
        request: Request,
        headers: Mapping[str, str],
        form: ErrorForm,
    ) -> Response:
        """Queue prompts as `open` does and answer with what comes of them: as events, or whole.

        Raises: as `open`.
        """
        generation = await self.open(asked, fields, request.headers)
        if not fields.stream:
            return await closing(work.whole(generation, headers), generation.aclose)
        return EventStream(
            work.events(generation),
            generation.aclose,
            form,
            self.facts.max_model_len,
            headers=headers,
            keep_alive_s=self.settings.keep_alive_s,
        )


def new_id(prefix: str, request: Request | None = None) -> str:
    """An id for a response: the request's own, if it has one."""
    own = None if request is None else getattr(request.state, "request_id", None)
    return f"{prefix}{own or secrets.token_hex(12)}"


def now_s() -> int:
    """Seconds since 1970."""
    return int(time.time())
