"""What a request says about its own service: priority, tags, deadline, salt, time limit and session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers

from hookline.core.errors import clipped
from hookline.core.sampling_params import as_float
from hookline.core.serve.endpoints.body import number_header
from hookline.core.serve.errors import invalid

PRIORITY, TAGS, CACHE_SALT = "X-Priority", "X-Tags", "X-Cache-Salt"
DEADLINE, TIMEOUT = "X-Deadline-S", "X-Timeout-S"
SESSION = "X-Session-Id"


def request_options(fields: Any, headers: Headers) -> dict[str, Any]:
    """Keyword arguments of EngineClient.stream; those that nobody set are left out.

    A header wins over a field, since a gateway sets headers. fields: a struct with any of priority, tags, deadline_s,
    cache_salt and timeout_s; the session is a header alone.
    Raises: ApiError for a header or a time limit that cannot be read.
    """
    found = {
        "priority": number_header(headers, PRIORITY, int),
        "tags": _tags(headers),
        "deadline_s": number_header(headers, DEADLINE, float),
        "cache_salt": headers.get(CACHE_SALT),
        "timeout_s": number_header(headers, TIMEOUT, float),
        "session": headers.get(SESSION),
    }
    options = {name: getattr(fields, name, None) if value is None else value for name, value in found.items()}
    timeout_s = options["timeout_s"]
    if timeout_s is not None and not 0 < as_float(timeout_s) < float("inf"):
        raise invalid(f"timeout_s={timeout_s} must be a finite number of seconds above 0", "timeout_s")
    return {name: value for name, value in options.items() if value is not None}


def _tags(headers: Headers) -> Mapping[str, str] | None:
    """`tenant=acme, class=chat`."""
    text = headers.get(TAGS)
    if text is None:
        return None
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise invalid(f"header {TAGS}: {clipped(text)!r} is not of the form 'key=value, key=value'", TAGS)
    return {key.strip(): value.strip() for key, _, value in pairs}
