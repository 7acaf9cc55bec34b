"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hookline.core.contracts import ApiError
from hookline.core.errors import RequestError, one_short_line, shown
from hookline.core.serving import (
    ChatPrompt,
    ServedEngine,
    checked_arguments,
    checked_messages,
    invalid,
    json_response,
    read,
)
from hookline.plugins.apis.openai.chat_request import ChatRequest


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or a chat's messages."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"prompt": "import os"}
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    """Add special tokens: by default to a text, not to a chat."""
    return_token_strs: bool | None = None
    """Return each token's text as well."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to be decoded."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"tokens": [1, 2, 3]}
    tokens: list[int]
    model: str | None = None


async def tokenize(engine: ServedEngine, request: Request) -> Response:
    """Tokenize a text or a chat, as a request for a completion would."""
    fields, headers = await read(request, TokenizeRequest)
    engine.model_name(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    is_text, size = fields.prompt is not None, len(await request.body())
    text = fields.prompt
    if text is None:
        text = await engine.in_time(size, lambda: _rendered(engine, fields))
    adds = is_text if fields.add_special_tokens is None else fields.add_special_tokens
    (ids,) = await engine.encoded([text], add_special_tokens=adds)
    texts = None
    if fields.return_token_strs:
        texts = await engine.in_time(len(ids), lambda: [engine.spelling.text(one) for one in ids])
    found = {"count": len(ids), "max_model_len": engine.facts.max_model_len, "tokens": ids, "token_strs": texts}
    return json_response(found, headers=headers)


def _rendered(engine: ServedEngine, fields: TokenizeRequest) -> str:
    chat = ChatPrompt(
        checked_messages(fields.messages or []),
        ChatRequest(tools=fields.tools).chosen_tools().for_template,
        checked_arguments(fields.chat_template_kwargs, engine.codec),
        continues_last=bool(fields.continue_final_message),
        adds_generation_prompt=fields.add_generation_prompt is not False,
    )
    return chat.render(engine.codec)


async def detokenize(engine: ServedEngine, request: Request) -> Response:
    """Decode token ids, including special tokens."""
    fields, headers = await read(request, DetokenizeRequest)
    engine.model_name(fields.model)
    text = await engine.in_time(4 * len(fields.tokens), lambda: _text(engine, fields.tokens))
    return json_response({"prompt": text}, headers=headers)


def _text(engine: ServedEngine, tokens: list[int]) -> str:
    largest = engine.facts.vocab_size - 1
    for token_id in tokens:
        if not 0 <= token_id <= largest:
            raise invalid(f"token id {shown(token_id)} is outside the vocabulary (0 to {largest})", "tokens")
    if engine.codec.tokenizer is None:
        raise RequestError("the checkpoint has no tokenizer")
    try:
        return engine.codec.decode(tokens, skip_special_tokens=False)
    except Exception as error:
        raise RequestError(f"the tokens cannot be read: {one_short_line(error)}") from None


async def tokenizer_info(engine: ServedEngine, request: Request) -> Response:
    """Return the tokenizer's configuration."""
    tokenizer = engine.codec.tokenizer
    if tokenizer is None:
        raise ApiError(404, "the checkpoint has no tokenizer", code="not_found")
    known = {name: value for name, value in tokenizer.init_kwargs.items() if _is_plain(value)}
    return json_response(
        {
            **known,
            "tokenizer_class": type(getattr(tokenizer, "in_full", tokenizer)).__name__,
            "chat_template": tokenizer.chat_template,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "vocab_size": engine.facts.vocab_size,
        }
    )


def _is_plain(value: Any) -> bool:
    """Whether a value of the configuration is a setting, and not a path on this machine."""
    return isinstance(value, bool | int | float) or (isinstance(value, str) and "/" not in value)
