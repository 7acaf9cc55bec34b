"""/v1/responses, without stored responses: a conversation is answered with output items, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.contracts import ParsedPart, Reasoning, Text, ToolCall
from hookline.core.outputs import Delta, FinishReason
from hookline.core.serving import Generation, ServedEngine, Turn, Usage, answer_turn, json_response, now_s, read, span
from hookline.plugins.apis.openai.client_tools import APPLY_PATCH, CUSTOM, FUNCTION, LOCAL_SHELL, NAMESPACE, SHELL
from hookline.plugins.apis.openai.errors import OPENAI_ERRORS
from hookline.plugins.apis.openai.logprobs import WaitingLogprobs, chat_logprobs
from hookline.plugins.apis.openai.response_items import Events, ResponseItems
from hookline.plugins.apis.openai.responses_request import ResponsesRequest


async def responses(engine: ServedEngine, request: Request) -> Response:
    """Answer a conversation with output items.

    Raises: the errors that api_error converts to a response.
    """
    fields, headers = await read(request, ResponsesRequest)
    make = partial(_Answer, engine, fields)
    return await answer_turn(engine, request, fields, headers, "resp_", make, OPENAI_ERRORS)


class _Answer:
    """The response of one request."""

    def __init__(self, engine: ServedEngine, fields: ResponsesRequest, turn: Turn, id: str, model: str) -> None:
        self._engine, self._fields, self._turn = engine, fields, turn
        self._id, self._created, self._model = id, now_s(), model
        self.span = span("chat", id)
        self._usage = Usage(len(turn.token_ids))
        self._events = Events()
        self._items = ResponseItems(self._events, turn.tools)
        self._reader = turn.reader()
        shows_special = not turn.params.skip_special_tokens
        self._texts = engine.spelling.behind(turn.token_ids, shows_special=shows_special)
        self._logprobs = WaitingLogprobs()
        self._has_logprobs = turn.params.logprobs is not None
        self._told: dict[str, list[Any]] = {}
        """Values of step extensions, one for each token so far, by the extensions' names."""

    async def whole(self, generation: Generation, headers: Mapping[str, str]) -> Response:
        """The response with all items."""
        last = None
        async for _, delta in generation:
            for _ in self._grown(delta):
                pass
            last = delta
        assert last is not None and last.finish_reason is not None
        return json_response(self._response(_status(last.finish_reason)), headers=headers)

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        status, event = "in_progress", self._events.event
        begun = False
        async for _, delta in generation:
            frames: list[bytes] = []
            if not begun:
                begun = True
                started = self._response(status)
                frames += [event(f"response.{name}", response=started) for name in ("created", "in_progress")]
            frames += self._grown(delta)
            if delta.finish_reason is not None:
                status = _status(delta.finish_reason)
                frames.append(event(f"response.{status}", response=self._response(status)))
            if frames:
                yield b"".join(frames)

    def _grown(self, delta: Delta) -> list[bytes]:
        """The events of a Delta, whose parts are added to the items."""
        self._usage.add(len(delta.token_ids))
        for name, further in (delta.extensions or {}).items():
            self._told.setdefault(name, []).extend(further)
        if delta.logprobs:
            self._logprobs.add(chat_logprobs(self._texts, delta.logprobs)["content"])
        parts = self._parts(delta)
        if delta.output is not None:
            parts += [] if parts or self._items.items else [(Text(""), [])]  # clients expect an item
            self._usage.add_end(delta.output)
        if any(isinstance(part, Reasoning) for part, _ in parts):
            self._usage.add_reasoning(len(delta.token_ids))
        frames: list[bytes] = []
        for part, logprobs in parts:
            frames += self._items.push(part, logprobs)
        if delta.output is not None and self._items.is_text and (rest := self._logprobs.rest()):
            frames += self._items.push(Text(""), rest)  # tokens without text, or of a stop string
        if delta.finish_reason is not None:
            frames += self._items.close(_status(delta.finish_reason))
        return frames

    def _parts(self, delta: Delta) -> list[tuple[ParsedPart, list[Any]]]:
        """The parts of a Delta with the log-probabilities of their tokens. Tags between parts belong to no part.

        With log-probabilities the parser is given one character at a time, so that the last character of each part is
        known.
        """
        text, is_text, runs = delta.text, self._turn.is_plain or self._items.is_text, _Runs()
        pieces = text if self._has_logprobs and not self._turn.is_plain else [text]
        for piece in pieces:
            runs.add(self._reader.push(piece), len(piece))
        if delta.output is not None:
            runs.add(self._reader.finish(), 0)
        parts = []
        for part, end in runs.found:
            goes_on = is_text and isinstance(part, Text)
            parts.append((part, self._logprobs.take(_text_of(part), takes_before=goes_on, behind=text[end:])))
            is_text = isinstance(part, Text)
        return parts

    def _response(self, status: str) -> dict[str, Any]:
        """The response object. Keys without a value are null if OpenAI's schema requires them, and absent otherwise."""
        fields, params, usage = self._fields, self._turn.params, self._usage
        is_over, given = status != "in_progress", fields.metadata or {}
        effort = (fields.reasoning or {}).get("effort")
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": now_s() if is_over else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()},
            "model": self._model,
            "output": self._items.items if is_over else [],
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort if effort in _EFFORTS else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if params.temperature is None else params.temperature,
            "text": _repeated_text(fields.text or {}),
            "tool_choice": _repeated_choice(fields.tool_choice),
            "tools": [{"type": FUNCTION, **one} for one in fields.tools or [] if one.get("type", FUNCTION) in _TOOLS],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": 1.0 if params.top_p is None else params.top_p,
        }
        ends: dict[str, Any] = {"usage": _usage(usage)} if is_over else {}
        if is_over and self._told:
            ends["extensions"] = self._told
        return response | ends | ({} if fields.user is None else {"user": fields.user})


# A response repeats fields of its request. What OpenAI's own types do not know is left out, since clients that check
# their answers would refuse them.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_FORMATS = ("text", "json_object", "json_schema")
_TOOLS = (
    *(FUNCTION, CUSTOM, NAMESPACE, LOCAL_SHELL, SHELL, APPLY_PATCH, "mcp", "file_search", "tool_search"),
    *("code_interpreter", "image_generation", "computer", "computer_use_preview", "web_search", "web_search_preview"),
    *("web_search_2025_08_26", "web_search_preview_2025_03_11"),
)


def _repeated_text(given: Mapping[str, Any]) -> dict[str, Any]:
    form = given.get("format") or {}
    if form.get("type") not in _FORMATS:
        return {**given, "format": {"type": "text"}}
    return {**given, "format": {"name": "answer", **form} if form["type"] == "json_schema" else form}


def _repeated_choice(given: Any) -> Any:
    is_unknown = isinstance(given, Mapping) and given.get("type") == LOCAL_SHELL
    return {"type": FUNCTION, "name": LOCAL_SHELL} if is_unknown else given or "auto"


class _Runs:
    """Parts and the position in the text after each; consecutive parts of one kind are merged."""

    def __init__(self) -> None:
        self.found: list[tuple[ParsedPart, int]] = []
        self._end = 0

    def add(self, parts: Sequence[ParsedPart], num_characters: int) -> None:
        """The parts that the parser returned after each further character, with the number of characters."""
        self._end += num_characters
        for part in parts:
            last = self.found[-1][0] if self.found else None
            if last is not None and type(last) is type(part) and not isinstance(part, ToolCall):
                self.found.pop()
                part = type(part)(_text_of(last) + _text_of(part))
            self.found.append((part, self._end))


def _text_of(part: ParsedPart) -> str:
    return part.name if isinstance(part, ToolCall) else part.text


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _status(reason: FinishReason) -> str:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"
