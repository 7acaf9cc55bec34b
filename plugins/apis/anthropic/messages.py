"""/v1/messages and /v1/messages/count_tokens: a conversation is answered with a message, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.outputs import Delta, FinishReason, RequestOutput
from hookline.core.serving import (
    Generation,
    ServedEngine,
    Turn,
    Usage,
    also_ignored,
    answer_turn,
    json_response,
    read,
    span,
)
from hookline.plugins.apis.anthropic.blocks import Blocks, event
from hookline.plugins.apis.anthropic.errors import ANTHROPIC_ERRORS
from hookline.plugins.apis.anthropic.request import CountRequest, MessagesRequest


async def messages(engine: ServedEngine, request: Request) -> Response:
    """Answer a conversation with a message.

    Raises: the errors that api_error converts to a response.
    """
    fields, headers = await read(request, MessagesRequest)
    make = partial(_Answer, fields)
    return await answer_turn(engine, request, fields, headers, "msg_", make, ANTHROPIC_ERRORS)


async def count_tokens(engine: ServedEngine, request: Request) -> Response:
    """Count the tokens of the prompt."""
    fields, headers = await read(request, CountRequest)
    engine.model_name(fields.model)
    size, tools = len(await request.body()), fields.chosen_tools()
    chat = await engine.in_time(size, lambda: fields.chat(tools))
    text = await engine.in_time(size, lambda: chat.render(engine.codec))
    (ids,) = await engine.encoded([text], add_special_tokens=False)
    told = also_ignored(headers, [*tools.ignored, *chat.ignored])
    return json_response({"input_tokens": len(ids)}, headers=told)


class _Answer:
    """The answer to one request, whole or as a stream of events."""

    def __init__(self, fields: MessagesRequest, turn: Turn, id: str, model: str) -> None:
        self._id, self._model = id, model
        self.span = span("chat", id)
        self._is_empty = fields.max_tokens == 0
        self._usage = Usage(len(turn.token_ids))
        self._reader, self._blocks = turn.reader(), Blocks()
        self._told: dict[str, list[Any]] = {}
        """Values of step extensions, one for each token so far, by the extensions' names."""

    async def whole(self, generation: Generation, headers: Mapping[str, str]) -> Response:
        """The message with all blocks."""
        last = None
        async for _, delta in generation:
            self._grown(delta)
            last = delta.output
        assert last is not None
        return json_response(self._message(last), headers=headers)

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        begun = False
        async for _, delta in generation:
            frames = [] if begun else [event("message_start", message=self._message(None))]
            begun = True
            frames += self._grown(delta)
            if delta.output is not None:
                ended = self._message(delta.output)
                end = {name: ended[name] for name in ("stop_reason", "stop_sequence")}
                told = {name: ended[name] for name in ("usage", "extensions") if name in ended}
                frames += [event("message_delta", delta=end, **told), event("message_stop")]
            if frames:
                yield b"".join(frames)

    def _grown(self, delta: Delta) -> list[bytes]:
        """The events of a Delta, whose text and calls are added to the blocks."""
        if self._is_empty:
            if delta.output is not None:
                self._usage.add_end(delta.output)
            return []
        self._usage.add(len(delta.token_ids))
        for name, further in (delta.extensions or {}).items():
            self._told.setdefault(name, []).extend(further)
        parts = list(self._reader.push(delta.text))
        if delta.output is not None:
            parts += self._reader.finish()
            self._usage.add_end(delta.output)
        frames = [frame for part in parts for frame in self._blocks.push(part)]
        return [*frames, *self._blocks.close()] if delta.output is not None else frames

    def _message(self, output: RequestOutput | None) -> dict[str, Any]:
        usage = self._usage
        reason, sequence = (None, None) if output is None else _stop(output, has_calls=self._blocks.has_calls)
        if output is not None and self._is_empty:
            reason, sequence = "max_tokens", None
        message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks.blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": {
                "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
                "output_tokens": usage.num_completion_tokens,
                "cache_read_input_tokens": usage.num_cached_tokens,
                "cache_creation_input_tokens": 0,
            },
        }
        return message | {"extensions": self._told} if output is not None and self._told else message


def _stop(output: RequestOutput, *, has_calls: bool) -> tuple[str, str | None]:
    """The stop_reason of a message, and the stop sequence that ended it."""
    if output.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    return ("tool_use" if has_calls else "end_turn"), None
