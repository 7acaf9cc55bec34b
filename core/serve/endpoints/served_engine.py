"""The engine that API surfaces are given: its client, the settings, the parsers, texts of tokens, the model's names."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from hookline.core.contracts import ApiError, ErrorForm
from hookline.core.errors import RequestError, clipped, shown
from hookline.core.json_schemas import SchemaRules
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import schema_rules
from hookline.core.plugin.registry import GRAMMARS
from hookline.core.pooling_params import PoolingParams
from hookline.core.request_options import NO_TAGS
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.endpoints.answering import EventStream
from hookline.core.serve.endpoints.fields import SamplingFields
from hookline.core.serve.endpoints.generation import Generation
from hookline.core.serve.endpoints.request_options import ServiceFields, request_options
from hookline.core.serve.engine_client import DeltaStream, EngineClient, ServedModel
from hookline.core.serve.errors import SAME_NAMES, Naming, invalid, placed
from hookline.core.serve.parsers import Parsers, chosen_parsers
from hookline.core.serve.settings import ServeConfig
from hookline.core.tokenizer.codec import Codec
from hookline.core.tokenizer.token_spelling import TokenSpelling

LONG_TEXT = 4000
"""Characters that take a millisecond or more to tokenize, which is then done in a thread."""
SCHEMA_WEIGHT = 8
"""Characters of ordinary text that take as long to process as one of a schema, since a schema may have a pattern to be
tried every twenty characters."""
TEXT_AT_ONCE, EACH_TEXT = 50_000, 50
"""Characters that are tokenized between two checks whether the client is still connected, and how many characters a
text counts as at least."""
OPENED_AT_ONCE = 16
"""Prompts of a request that are queued before the event loop runs again."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class Work(Protocol):
    """How an endpoint makes its response from a generation."""

    @property
    def span(self) -> Mapping[str, str]:
        """Attributes of the request's span in a trace."""
        ...

    def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The frames of a stream."""
        ...

    async def whole(self, generation: Generation, headers: Mapping[str, str]) -> Response:
        """The response once all completions are finished."""
        ...


class ServedEngine:
    """A server's engine, as `hookline.core.contracts.ApiEngine` has it, and what else endpoints are made with.

    host: the plugins of this process.
    """

    def __init__(self, client: EngineClient, settings: ServeConfig, host: PluginHost) -> None:
        self.client, self.settings, self._host = client, settings, host
        self.parsers: Parsers = chosen_parsers(settings.reasoning_parser, settings.tool_parser, lambda: host)
        self.spelling = TokenSpelling(client.facts.codec)

    @property
    def facts(self) -> ServedModel:
        """Facts of the served model."""
        return self.client.facts

    @cached_property
    def schema_rules(self) -> SchemaRules:
        """The rules by which schemas are adapted to the engine's grammar back end.

        Raises: PluginError if the back end cannot be loaded in this process.
        """
        name = self.facts.grammars
        if name is None:
            return SchemaRules()
        entry = self._host.choose(GRAMMARS, name)
        return schema_rules(entry, opens_objects=self.facts.opens_objects)

    @property
    def codec(self) -> Codec:
        """The model's tokenizer."""
        return self.client.facts.codec

    def model_name(self, asked: str | None) -> str:
        """The model's name in the response. A request without a name gets the served model, and with serve.any_model a
        request for any other.

        Raises: ApiError with status 404 for an unknown name.
        """
        names = self.facts.names
        if asked and asked not in names and not self.settings.any_model:
            message = f"The model `{clipped(asked)}` does not exist. Served: {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked if asked in names else names[0]

    async def in_time(self, num_characters: int, work: Callable[[], Result], *, has_schemas: bool = False) -> Result:
        """Run some work on a text, in a thread if the text is long or contains schemas; returns its result."""
        weight = num_characters * (SCHEMA_WEIGHT if has_schemas else 1)
        loads = has_schemas and "schema_rules" not in vars(self)  # the first schema imports the back end's library
        return await asyncio.to_thread(work) if loads or weight >= LONG_TEXT else work()

    def check_number(self, num_prompts: int, n: int = 1, param: str = "prompt") -> None:
        """Refuse a request for more completions than the server ever makes at once: trying again later would not help.

        Called by `open`, and earlier where many prompts would have to be tokenized first. n: completions of each
        prompt. param: the field with the prompts.
        Raises: ApiError.
        """
        limit, replicas = self.settings.max_requests, self.settings.replicas
        if n > limit or num_prompts * n > limit * replicas:
            of_each = f" of each of {replicas} replicas" if replicas > 1 else ""
            raise invalid(
                f"{shown(num_prompts * n)} answers are asked for ({shown(n)} for each of {num_prompts} in {param}); "
                f"serve.max_requests={limit} are the most at once{of_each}",
                "n" if num_prompts == 1 else param,
            )

    def check_prompts(self, given: object, n: int = 1, param: str = "prompt") -> None:
        """The same check for a field with one prompt or a list of prompts, before any is looked at; a body may have
        hundreds of thousands.
        """
        prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        self.check_number(len(prompts), n, param)

    async def encoded(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""
        return await self.each(texts, len, partial(self.codec.encode_text, add_special_tokens=add_special_tokens))

    def decoded(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises: RequestError for an id outside the vocabulary."""
        return self.codec.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def token_ids(
        self, prompts: Sequence[str | list[int]], *, param: str = "prompt", add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each prompt, which is a text or a list of token ids. param: the field with the prompts."""

        def encode(text: tuple[str, str]) -> list[int]:
            try:
                return self.codec.encode_text(text[1], add_special_tokens=add_special_tokens)
            except RequestError as error:
                raise placed(error, text[0]) from None

        places = zip(places_of(param, prompts), prompts, strict=True)
        texts = [(place, one) for place, one in places if isinstance(one, str)]
        encoded = iter(await self.each(texts, lambda text: len(text[1]), encode))
        return [next(encoded) if isinstance(one, str) else one for one in prompts]

    async def each(
        self, items: Sequence[Item], size: Callable[[Item], int], work: Callable[[Item], Result]
    ) -> list[Result]:
        """Run some work on each of several texts, a few at a time, until the client disconnects. size: characters of an
        item.
        """
        found: list[Result] = []
        while len(found) < len(items):
            end, total = len(found), 0
            while end < len(items) and total < TEXT_AT_ONCE:
                total += size(items[end]) + EACH_TEXT
                end += 1
            some = items[len(found) : end]
            found += await self.in_time(total, partial(_worked, some, work))
        return found

    async def open(
        self,
        asked: list[tuple[list[int], SamplingParams]],
        fields: ServiceFields,
        headers: Headers,
        *,
        pooling: PoolingParams | None = None,
        naming: Naming = SAME_NAMES,
        places: Sequence[str] = (),
        span: Mapping[str, str] = NO_TAGS,
    ) -> Generation:
        """Queue prompts, each with its sampling parameters, or all to be pooled.

        naming: parameter -> the request's field that errors name. places: names of the prompts in errors, if there are
        several. span: see Work.
        Raises: as EngineClient.stream does at once; then none of the prompts stays queued.
        """
        self.check_number(len(asked), 1 if pooling is not None else max(params.n for _, params in asked))
        options = request_options(fields, headers, span) | ({} if pooling is None else {"pooling": pooling})
        streams: list[DeltaStream] = []
        try:
            for number, (token_ids, params) in enumerate(asked, 1):
                if number % OPENED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                with naming:
                    streams.append(self.client.stream(token_ids, params, **options))
        except BaseException as error:
            await Generation(streams).aclose()
            if places and isinstance(error, RequestError):
                raise placed(error, places[len(streams)]) from None
            raise
        return Generation(streams, naming, places)

    async def answer(
        self,
        work: Work,
        asked: list[tuple[list[int], SamplingParams]],
        fields: SamplingFields,
        request: Request,
        headers: Mapping[str, str],
        form: ErrorForm,
        naming: Naming,
        places: Sequence[str] = (),
    ) -> Response:
        """Queue prompts as `open` does, and make the response: a stream of events, or the whole answer.

        Raises: as `open`.
        """
        generation = await self.open(asked, fields, request.headers, naming=naming, places=places, span=work.span)
        if not fields.stream:
            try:
                return await work.whole(generation, headers)
            finally:
                await generation.aclose()
        return EventStream(
            work.events(generation),
            generation.aclose,
            form,
            self.facts.max_model_len,
            headers=headers,
            keep_alive_s=self.settings.keep_alive_s,
        )


def _worked(items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
    return [work(item) for item in items]


def places_of(param: str, prompts: Sequence[object]) -> list[str]:
    """Names of the prompts of a field in errors."""
    return [f"{param}.{index}" for index in range(len(prompts))] if len(prompts) > 1 else [param]


def new_id(prefix: str, request: Request | None = None) -> str:
    """An id for a response: that of the request, if the request has one."""
    own = None if request is None else getattr(request.state, "request_id", None)
    return f"{prefix}{own or secrets.token_hex(12)}"


def now_s() -> int:
    """Seconds since 1970."""
    return int(time.time())
