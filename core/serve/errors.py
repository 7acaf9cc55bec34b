"""Errors as clients of OpenAI's API expect them: a JSON object with a message, and a status that says what to do."""

from __future__ import annotations

from starlette.responses import JSONResponse

from hookline.core.errors import EngineError, HooklineError, QueueFullError, RequestError

RETRY_AFTER_S = 1
"""What a client is told to wait while the queue is full."""


def error_body(
    message: str, type: str, *, param: str | None = None, code: str | int | None = None
) -> dict[str, object]:
    """The body of an error."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def error_response(
    status: int, message: str, type: str, *, param: str | None = None, code: str | int | None = None
) -> JSONResponse:
    """A response that says what was wrong; with a status that invites to retry, also when."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None
    return JSONResponse(error_body(message, type, param=param, code=code), status, headers)


def response_of(error: HooklineError) -> JSONResponse:
    """The response of a request that could not be served."""
    if isinstance(error, QueueFullError):
        return error_response(429, str(error), "rate_limit_error", code="queue_full")
    if isinstance(error, RequestError):
        return error_response(400, str(error), "invalid_request_error")
    kind = "engine_error" if isinstance(error, EngineError) else "server_error"
    return error_response(503, str(error), kind, code=kind)
