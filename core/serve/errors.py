"""Errors of requests, each with a status from which a client knows what to do.

Endpoints raise `ApiError`, and errors of the engine are converted to it; a surface's `ErrorForm` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import TracebackType

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from hookline.core.contracts import ApiError, ErrorForm
from hookline.core.errors import (
    EngineError,
    HooklineError,
    PluginError,
    PromptTooLongError,
    QueueFullError,
    RankError,
    RequestError,
    clipped,
)
from hookline.core.serve.access import note_reason

TOO_LONG, ABORTED = "context_length_exceeded", "aborted"
_OPTIONS = "priority|tags|deadline_s|timeout_s|cache_salt"
_FIELD = re.compile(rf"(?:(?:sampling|pooling)\.|^(?=(?:{_OPTIONS})\b))(?P<name>[a-z_]+)(?P<inner>\.[a-z_]+)?")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An error with status 400."""
    return ApiError(400, message, param=param, code=code)


def too_long(
    max_model_len: int, detail: str, param: str | None = None, *, lengths: tuple[int, int] | None = None
) -> ApiError:
    """The error of a request whose prompt and completion are too long, in the words that clients search for.

    param: the field with the prompt. lengths: tokens of the prompt, and tokens that the request asks for.
    """
    message = f"This model's maximum context length is {max_model_len} tokens. {detail}"
    found = None if lengths is None else (*lengths, max_model_len)
    return ApiError(400, message, param=param, code=TOO_LONG, lengths=found)


def placed(error: Exception, place: str) -> Exception:
    """The error of a prompt, with the prompt's place in the request: in its message, too, if it is one of several, as
    in `prompt.1`. Errors that concern all prompts stay as they are.
    """
    told = f"{place}: {error}" if "." in place else str(error)
    if type(error) is PromptTooLongError:
        return _PlacedTooLong(told, place)
    if type(error) is RequestError and not _FIELD.search(str(error)):
        return invalid(told, place)
    return error


class _PlacedTooLong(PromptTooLongError):
    """A prompt that is too long, with its place in the request."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def aborted(message: str, param: str | None = None) -> ApiError:
    """The error of a request that the server ended, such as one whose grammar waited too long for others'."""
    return ApiError(503, message, "server_error", param=param, code=ABORTED)


def timed_out(message: str) -> ApiError:
    """The error of a request that its time limit ended. Clients should not retry it."""
    return ApiError(408, message, "timeout_error", code="timeout", headers={"x-should-retry": "false"})


def top_field(place: str) -> str:
    """The top-level field of a place in a request: `tools` of `tools[0].function.parameters`."""
    return re.split(r"[.\[]", place, maxsplit=1)[0]


class Naming:
    """A context in which errors of the engine's parameters name the request's fields; it can be entered again.

    names: parameter -> the request's name for it, e.g. {"stop": "stop_sequences"}; other parameters have the same name.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_ended = isinstance(error, ApiError) and error.code == ABORTED
        if (is_ended or kind is RequestError) and _FIELD.search(str(error)):
            named = _of_field(str(error), self._names)
            raise aborted(named.message, named.param) if is_ended else named from error


SAME_NAMES = Naming({})
"""The Naming of a request whose fields have the parameters' names."""


def _of_field(message: str, names: Mapping[str, str]) -> ApiError:
    def _own(field: re.Match[str]) -> str:
        name = field["name"]
        return names[name] if name in names else name + (field["inner"] or "")

    field = _FIELD.search(message)
    return invalid(_FIELD.sub(_own, message), None if field is None else top_field(_own(field)))


def api_error(error: BaseException, max_model_len: int | None = None) -> ApiError:
    """The ApiError for any error of a request.

    An error of an unknown kind becomes status 500 without its text, which may contain secrets. For an error of a
    plugin, the client is told the plugin and the method.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException) and error.status_code < 500:  # a body that Starlette cannot parse
        return ApiError(error.status_code, clipped(str(error.detail)))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), "rate_limit_error", code="queue_full")
    if isinstance(error, PromptTooLongError) and max_model_len is not None:
        place = error.place if isinstance(error, _PlacedTooLong) else None
        return too_long(max_model_len, f"However, {error}.", place)
    if isinstance(error, PluginError):
        message = "internal server error" if error.blame is None else f"{error.blame}; the server's log says why"
        return ApiError(500, message, "server_error", code="internal_error")
    if isinstance(error, RequestError):
        return _of_field(str(error), {})
    if isinstance(error, EngineError | RankError):
        return ApiError(503, "the engine broke off; the server's log says why", "engine_error", code="engine_error")
    if isinstance(error, HooklineError):
        return ApiError(503, clipped(str(error)), "server_error", code="server_error")
    return ApiError(500, "internal server error", "server_error", code="internal_error")


def response(error: ApiError, form: ErrorForm) -> Response:
    """The error as a response. The access log gets its message."""
    note_reason(error.message)
    return JSONResponse(form.body(error), error.status, error.headers)
