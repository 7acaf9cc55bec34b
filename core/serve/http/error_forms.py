"""Which API's form the errors of a path have, including errors that occur before any endpoint is reached."""

from __future__ import annotations

from hookline.core.serve.anthropic.errors import ANTHROPIC_ERRORS
from hookline.core.serve.errors import OPENAI_ERRORS, ErrorForm

_ANTHROPIC = "/v1/messages"


def form_of(path: str) -> ErrorForm:
    """Anthropic's for /v1/messages and what is below it, OpenAI's for all others."""
    return ANTHROPIC_ERRORS if path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/") else OPENAI_ERRORS
