"""Errors as clients of Anthropic's API expect them."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from hookline.core.contracts import ApiError, ErrorForm

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrors(ErrorForm):
    """`{"type": "error", "error": {type, message}}`; a stream ends with it as an event."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    }

    def body(self, error: ApiError) -> dict[str, object]:
        """See ErrorForm."""
        kind = _TYPES.get(error.status, _TYPES[400] if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": _message(error)}}

    def frames(self, error: ApiError) -> bytes:
        """See ErrorForm."""
        return b"event: error\ndata: " + msgspec.json.encode(self.body(error)) + b"\n\n"


def _message(error: ApiError) -> str:
    """The words that clients search for when a conversation is too long, in order to shorten it."""
    if error.lengths is None:  # a text of too many characters is not tokenized
        return f"prompt is too long: {error.message}" if error.code == "context_length_exceeded" else error.message
    num_prompt_tokens, num_asked, most = error.lengths
    if num_prompt_tokens > most:
        return f"prompt is too long: {num_prompt_tokens} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt_tokens} + {num_asked} > {most}, "
        "decrease input length or `max_tokens` and try again"
    )


ANTHROPIC_ERRORS = AnthropicErrors()
