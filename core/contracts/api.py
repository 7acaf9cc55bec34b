"""The contract of an API surface, the endpoints of one API around a server's engine, and the engine it is given.

Core keeps sockets, TLS, keys, limits, processes and the engine. A surface defines the routes of its API, the meaning of
a body, and how answers and errors are written. Requests and responses are Starlette's. `hookline.core.serving` has the
parts of surfaces, from reading a body to a turn of a chat.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from hookline.core.errors import HooklineError

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response

    from hookline.core.outputs import Delta, RequestOutput
    from hookline.core.sampling_params import SamplingParams

RETRY_AFTER_S = 1
"""Seconds that a client is told to wait when the queue is full."""
INVALID_REQUEST = "invalid_request_error"
"""The type of most errors that a client can mend."""


class ApiError(HooklineError):
    """An error response: its status, and the contents of its body. A surface's `errors` writes it in its API's form.

    param: the field at fault. headers: further headers of the response. lengths: for a request that is too long, the
    tokens of its prompt, the tokens that it asks for, and the tokens that there is room for.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID_REQUEST,
        *,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
        lengths: tuple[int, int, int] | None = None,
    ) -> None:
        """See the class."""
        super().__init__(message)
        self.lengths = lengths
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))


EVENT_STREAM = "text/event-stream; charset=utf-8"
"""The media type of server-sent events."""


class ErrorForm(Protocol):
    """How an API writes errors, and ends streams with them. For classes to extend."""

    stream_type: ClassVar[str] = EVENT_STREAM
    """The media type of the API's streams. Streams of server-sent events get a comment after seconds of silence
    (serve.keep_alive_s), others get nothing."""

    schema: ClassVar[Mapping[str, Any]] = {"type": "object"}
    """The JSON schema of `body`, for the OpenAPI document."""

    def body(self, error: ApiError) -> dict[str, object]:
        """The JSON body of a response with this error."""
        ...

    def frames(self, error: ApiError) -> bytes:
        """The last bytes of a stream in which the error occurs."""
        ...


@dataclass(frozen=True)
class ApiRoute:
    """An endpoint of a surface, and its description in the OpenAPI document."""

    method: str
    """GET, POST or DELETE."""
    path: str
    """The path in Starlette's notation: /v1/models/{name:path}."""
    endpoint: Callable[[Request], Awaitable[Response]]
    """Makes the response. Its exceptions are answered in the surface's form: an ApiError unchanged, errors of the
    engine with a fitting status, and all others with status 500 and no details."""
    summary: str = ""
    """A description of the route in one line; a route with an empty summary is left out of the OpenAPI document."""
    body: type | None = None
    """The msgspec Struct of the request's body, whose fields' docstrings describe them. Its class variable `EXAMPLE`, a
    mapping, is the document's example of it, which /docs sends."""
    answer: type | None = None
    """The type of the answer's JSON, as msgspec knows types; docstrings of a Struct's fields describe them. None: an
    object."""
    streams: bool = False
    """Whether the answer may be a stream."""
    max_body_bytes: int | None = None
    """Largest body in bytes; None: serve.max_body_bytes. Only for paths without parameters."""


class ModelCard(Protocol):
    """The served model; it never changes."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may use; the first is shown."""
        ...

    @property
    def root(self) -> str:
        """The checkpoint's reference."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def created_s(self) -> int:
        """When the model was loaded, in seconds since 1970."""
        ...


class OpenCompletions(Protocol):
    """The completions of a request while they are generated. Must be closed in any case, which aborts running ones.

    Raises, when the next Delta is asked for: RequestError or ApiError for a completion that cannot be served or was
    ended from outside; EngineError if the engine failed.
    """

    def __aiter__(self) -> Self:
        """Itself."""
        ...

    async def __anext__(self) -> tuple[int, Delta]:
        """The number of a prompt, and a Delta of one of its completions; the last one of each has its output."""
        ...

    async def outputs(self) -> list[list[RequestOutput]]:
        """Wait for the end; returns the completions of each prompt."""
        ...

    async def aclose(self) -> None:
        """Abort completions that still run; a second call does nothing."""
        ...


class ApiEngine(Protocol):
    """A server's engine from a surface's point of view. To be called on the server's event loop, which no method
    blocks.
    """

    @property
    def facts(self) -> ModelCard:
        """The served model."""
        ...

    def model_name(self, asked: str | None) -> str:
        """The model's name in an answer. A request without a name gets the served model.

        Raises: ApiError with status 404 for an unknown name.
        """
        ...

    def check_number(self, num_prompts: int, n: int = 1, param: str = "prompt") -> None:
        """Refuse a request for more completions than the server ever makes at once. param: the field with the prompts.

        Raises: ApiError with status 400.
        """
        ...

    async def encoded(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text; long ones are tokenized in a thread."""
        ...

    def decoded(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Raises: RequestError for an id outside the vocabulary.
        """
        ...

    async def open(
        self, asked: list[tuple[list[int], SamplingParams]], fields: Any, headers: Headers
    ) -> OpenCompletions:
        """Queue prompts, each with its sampling parameters.

        fields: a hookline.core.serving.ServiceFields: priority, tags (the tenant), deadline, time limit and cache salt
        of the request. headers: of the HTTP request, which override the fields and bring the trace and the session.
        Raises: RequestError, QueueFullError or EngineError; then none of the prompts stays queued.
        """
        ...


class ApiSurface(Protocol):
    """The endpoints of one API. For classes to extend.

    Constructed once for each process that serves HTTP, when the engine is ready; config is an instance of the
    registered dataclass, or None. A surface that serve.apis does not name is not imported.
    """

    errors: ErrorForm
    """How errors are written: errors of its endpoints, and errors before an endpoint is reached, such as a missing key,
    if the path is one of its routes or below one. The first surface of a server writes the errors of all other paths.
    """

    key_headers: Sequence[str] = ()
    """Headers that clients of this API send their key in, beside `Authorization: Bearer KEY`, which is always read."""

    client_header: str | None = None
    """A header that clients of this API send with every request. Where surfaces have the same path, a request with this
    header is this surface's."""

    request_id_header: str | None = None
    """A header of each response that has the request's id, beside X-Request-Id. An endpoint finds the id as
    `request.state.request_id`; a client that sends X-Request-Id chooses it."""

    exposed_headers: Sequence[str] = ()
    """Headers of responses that pages of other origins may read, if serve.cors_origins allows these."""

    def __init__(self, config: Any, engine: ApiEngine) -> None:
        """Begin to serve. Raises: ConfigError for a configuration that does not fit the model."""
        ...

    def routes(self) -> Sequence[ApiRoute]:
        """All endpoints; called once."""
        ...
