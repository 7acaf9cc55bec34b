"""Errors as clients of OpenAI's API expect them."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from hookline.core.contracts import ApiError, ErrorForm

_TEXT = {"type": ["string", "null"]}
_FIELDS: dict[str, Any] = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": {}}


class OpenAIErrors(ErrorForm):
    """`{"error": {message, type, param, code}}`; a stream ends with it and [DONE]."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type"], "properties": _FIELDS}},
    }

    def body(self, error: ApiError) -> dict[str, object]:
        """See ErrorForm."""
        told = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        return {"error": told}

    def frames(self, error: ApiError) -> bytes:
        """See ErrorForm."""
        return b"data: " + msgspec.json.encode(self.body(error)) + b"\n\ndata: [DONE]\n\n"


OPENAI_ERRORS = OpenAIErrors()
