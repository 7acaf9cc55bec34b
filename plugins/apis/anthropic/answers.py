"""Response types of Anthropic's endpoints for the OpenAPI document; see the answers of OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class MessageUsage(Struct, kw_only=True):
    """Tokens of a message."""

    input_tokens: int
    """Prompt tokens that were not found in the prefix cache."""
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class Message(Struct, kw_only=True):
    """The model's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks: `text`, `thinking`, `tool_use`."""
    stop_reason: str | None
    """end_turn, max_tokens, stop_sequence or tool_use."""
    stop_sequence: str | None
    usage: MessageUsage
    extensions: dict[str, list[Any]] | UnsetType = UNSET
    """Values of step extensions, one a token, by the extensions' names."""


class TokenCount(Struct, kw_only=True):
    """How many tokens a prompt has."""

    input_tokens: int


class ModelInfo(Struct, kw_only=True):
    """The served model under one of its names."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """In RFC 3339's form, UTC."""
    lifecycle: str
    max_input_tokens: int
    max_tokens: int


class ModelPage(Struct, kw_only=True):
    """A page of the model's cards."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None
