"""Response types of OpenAI's endpoints for the OpenAPI document. Responses are made as plain mappings, which a test
compares with these types; fields that are UNSET here are absent unless a request asks for them.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class ModelCard(Struct, kw_only=True):
    """The served model under one of its names."""

    id: str
    """The name of the model in requests."""
    object: Literal["model"] = "model"
    created: int
    """Seconds since 1970 at which the server started."""
    owned_by: str
    root: str
    """The checkpoint's reference."""
    parent: str | None
    max_model_len: int
    """Tokens of prompt and answer together."""
    vocab_size: int


class ModelList(Struct, kw_only=True):
    """The model's card under each of its names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class CachedTokens(Struct, kw_only=True):
    """Of a prompt's tokens."""

    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


class CompletionUsage(Struct, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptUsage(Struct, kw_only=True):
    """Tokens of a request that generates none."""

    prompt_tokens: int
    total_tokens: int


class TextLogprobs(Struct, kw_only=True):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins, in characters."""


class CompletionChoice(Struct, kw_only=True):
    """A completion of a prompt."""

    index: int
    """The prompt's number times `n`, plus the completion's."""
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str
    """stop, length, or what else ended it."""
    stop_reason: str | int | None
    """The stop string or the stop token that ended it."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    extensions: dict[str, list[Any]] | UnsetType = UNSET
    """Values of step extensions, one a token, by the extensions' names."""
    prompt_logprobs: list[Any] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """Completions of texts."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class CalledFunction(Struct, kw_only=True):
    """The called function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ChatCall(Struct, kw_only=True):
    """A tool that the answer calls."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | UnsetType = UNSET
    custom: dict[str, str] | UnsetType = UNSET
    """`name` and `input` of a custom tool."""


class ChatMessage(Struct, kw_only=True):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    """Null if there are only tool calls."""
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """An answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    """`content`: for each token its text, its bytes, its log-probability, and the likeliest tokens."""
    finish_reason: str
    """stop, length, tool_calls, or what else ended it."""
    stop_reason: str | int | None
    """The stop string or the stop token that ended it."""
    token_ids: list[int] | UnsetType = UNSET
    extensions: dict[str, list[Any]] | UnsetType = UNSET
    """Values of step extensions, one a token, by the extensions' names."""


class ChatCompletion(Struct, kw_only=True):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType = UNSET


class ResponseUsage(Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(Struct, kw_only=True):
    """An answer as a list of items, with the request's parameters."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress"]
    background: bool
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    """Items: `message`, `reasoning`, `function_call`, `custom_tool_call`, …"""
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    usage: ResponseUsage | UnsetType = UNSET
    extensions: dict[str, list[Any]] | UnsetType = UNSET
    """Values of step extensions, one a token, by the extensions' names."""
    user: str | UnsetType = UNSET


class EmbeddedText(Struct, kw_only=True):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or with `encoding_format` base64 the bytes of little-endian float32."""


class EmbeddingList(Struct, kw_only=True):
    """The vectors, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddedText]
    usage: PromptUsage


class PairScore(Struct, kw_only=True):
    """How well a document answers a query."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(Struct, kw_only=True):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage


class RankedDocument(Struct, kw_only=True):
    """A document with its score."""

    index: int
    """Its place in the request."""
    relevance_score: float
    document: dict[str, str] | UnsetType = UNSET


class Ranking(Struct, kw_only=True):
    """Documents, the best first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]


class TokenList(Struct, kw_only=True):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """Each token's text, if asked for."""


class DetokenizedText(Struct, kw_only=True):
    """The text of token ids."""

    prompt: str
