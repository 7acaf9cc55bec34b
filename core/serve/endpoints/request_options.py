"""The fields and headers about the service of a request: priority, tags, deadline, salt, time limit, session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from starlette.datastructures import Headers

from hookline.core.errors import clipped
from hookline.core.request_options import MAX_TRACE_CHARACTERS, NO_TAGS
from hookline.core.sampling_params import as_float
from hookline.core.serve.endpoints.body import number_header
from hookline.core.serve.errors import invalid

PRIORITY, TAGS, CACHE_SALT = "X-Priority", "X-Tags", "X-Cache-Salt"
DEADLINE, TIMEOUT = "X-Deadline-S", "X-Timeout-S"
SESSION = "X-Session-Id"
TRACE_HEADERS = (
    *("traceparent", "tracestate", "baggage", "b3", "uber-trace-id", "x-amzn-trace-id"),
    *(f"x-b3-{name}" for name in ("traceid", "spanid", "parentspanid", "sampled", "flags")),
)
"""Headers that OpenTelemetry's propagators know: W3C's, Zipkin's, Jaeger's and AWS'."""
_TRACE_NAMES = frozenset(name.encode() for name in TRACE_HEADERS)


class ServiceFields(msgspec.Struct, kw_only=True):
    """Fields of every request that concern its service. IGNORED: fields that are accepted without an effect."""

    IGNORED: ClassVar[tuple[str, ...]] = ("user",)

    model: str | None = None
    """A name listed by /v1/models; unset: the served model."""
    user: str | None = None
    priority: int | None = None
    """Lower is more urgent, with a scheduler that heeds priorities."""
    cache_salt: str | None = None
    """Prompts share cached blocks only with prompts of the same salt."""
    tags: dict[str, str] | None = None
    """Labels of the request, e.g. its tenant, for schedulers and metrics."""
    deadline_s: float | None = None
    """Seconds after which the request should be finished, for schedulers that heed deadlines."""
    timeout_s: float | None = None
    """Seconds after which the request is ended with an error."""


def span(operation: str, id: str) -> dict[str, str]:
    """Attributes of a request's span in a trace, by OpenTelemetry's conventions.

    operation: chat, text_completion or embeddings. id: of the response.
    """
    return {"gen_ai.operation.name": operation, "gen_ai.response.id": id}


def request_options(fields: ServiceFields, headers: Headers, attributes: Mapping[str, str] = NO_TAGS) -> dict[str, Any]:
    """Keyword arguments of EngineClient.stream that a header or a field sets.

    A header overrides a field, because a gateway can set headers; the session has only a header. attributes: of the
    request's span, beside the trace context of the caller.
    Raises: ApiError for a header or a time limit that is invalid.
    """
    found = {
        "priority": number_header(headers, PRIORITY, int),
        "tags": _tags(headers),
        "deadline_s": number_header(headers, DEADLINE, float),
        "cache_salt": headers.get(CACHE_SALT),
        "timeout_s": number_header(headers, TIMEOUT, float),
        "session": headers.get(SESSION),
        "trace": {**_caller(headers), **attributes} or None,
    }
    options = {name: getattr(fields, name, None) if value is None else value for name, value in found.items()}
    timeout_s = options["timeout_s"]
    if timeout_s is not None and not 0 < as_float(timeout_s) < float("inf"):
        raise invalid(f"timeout_s={timeout_s} must be a finite number of seconds above 0", "timeout_s")
    return {name: value for name, value in options.items() if value is not None}


def _caller(headers: Headers) -> dict[str, str]:
    """The headers with the caller's trace context, for OpenTelemetry's propagators."""
    found: dict[str, str] = {}
    for name, value in headers.raw:
        if name in _TRACE_NAMES:
            found.setdefault(name.decode("latin-1"), value.decode("latin-1"))  # the first counts
    return {name: value for name, value in found.items() if len(value) <= MAX_TRACE_CHARACTERS}


def _tags(headers: Headers) -> Mapping[str, str] | None:
    """Parse tags of the form `tenant=acme, class=chat`."""
    text = headers.get(TAGS)
    if text is None:
        return None
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise invalid(f"header {TAGS}: {clipped(text)!r} is not of the form 'key=value, key=value'", TAGS)
    return {key.strip(): value.strip() for key, _, value in pairs}
