"""/v1/chat/completions: a conversation is answered with messages, whole or streamed; reasoning and tool calls are
apart.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.contracts import Arguments, ParsedPart, Reasoning, Text, ToolCall
from hookline.core.outputs import Delta, RequestOutput, joined_told
from hookline.core.serving import (
    REASONING_FIELDS,
    Generation,
    ServedEngine,
    SpeltText,
    Turn,
    Usage,
    answer_turn,
    json_response,
    now_s,
    read,
    span,
)
from hookline.plugins.apis.openai.chat_request import ChatRequest
from hookline.plugins.apis.openai.client_tools import CUSTOM, FUNCTION, InputText, text_reader
from hookline.plugins.apis.openai.errors import OPENAI_ERRORS
from hookline.plugins.apis.openai.frames import DONE, ChoiceFrames, Frames
from hookline.plugins.apis.openai.logprobs import chat_logprobs, prompt_logprobs
from hookline.plugins.apis.openai.usage import finish_reason, usage_of


def new_call_id() -> str:
    """A new id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


async def chat(engine: ServedEngine, request: Request) -> Response:
    """Answer a conversation with messages.

    Raises: the errors that api_error converts to a response.
    """
    fields, headers = await read(request, ChatRequest)
    make = partial(_Answer, engine, fields)
    return await answer_turn(engine, request, fields, headers, "chatcmpl-", make, OPENAI_ERRORS)


class _Answer:
    """The response of one request."""

    def __init__(self, engine: ServedEngine, fields: ChatRequest, turn: Turn, id: str, model: str) -> None:
        self._engine, self._fields, self._turn = engine, fields, turn
        self._id, self._created, self._model = id, now_s(), model
        self.span = span("chat", id)
        self._usage = Usage(len(turn.token_ids))
        self._texts: dict[int, SpeltText] = {}
        wants = fields.include_reasoning is not False
        self._reasoning = REASONING_FIELDS[engine.settings.reasoning_field] if wants else ()

    async def whole(self, generation: Generation, headers: Mapping[str, str]) -> Response:
        """The response with all choices."""
        (outputs,) = await generation.outputs()
        choices = [self._choice(output) for output in outputs]
        body: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage_of(self._usage),
        }
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = self._turn.token_ids
        if self._fields.prompt_logprobs is not None:
            texts = self._engine.spelling
            body["prompt_logprobs"] = prompt_logprobs(texts, outputs[0].prompt_logprobs or [])
        return json_response(body, headers=headers)

    def _choice(self, output: RequestOutput) -> dict[str, Any]:
        fields = self._fields
        self._usage.add(len(output.token_ids))
        self._usage.add_end(output)
        reader = self._turn.reader()
        message = self._message([*reader.push(output.text), *reader.finish()])
        choice = {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output.index, output.logprobs),
            "finish_reason": finish_reason(output, has_calls="tool_calls" in message),
            "stop_reason": output.stop_reason,
        }
        if output.extensions is not None:
            choice["extensions"] = output.extensions
        return choice | {"token_ids": output.token_ids} if fields.return_token_ids else choice

    def _message(self, parts: Sequence[ParsedPart]) -> dict[str, Any]:
        """A complete message made of its parts."""
        apart = _KeptApart()
        content = "".join(apart.text_of(part) for part in parts if isinstance(part, Text | ToolCall))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = calls_of(parts)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning:
            message |= dict.fromkeys(self._reasoning, reasoning)
        if calls:
            message["tool_calls"] = [self._call(*call) for call in calls]
        return message

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        text = text_reader(self._turn.tools.named(name))
        if text is None:
            return _begun(name, arguments, is_custom=False)
        return _begun(name, text.push(arguments) + text.finish(), is_custom=True)

    def _logprobs(self, index: int, logprobs: Any) -> dict[str, Any] | None:
        """Log-probabilities of a choice's next tokens."""
        if logprobs is None:
            return None
        if index not in self._texts:
            shows_special = not self._turn.params.skip_special_tokens
            self._texts[index] = self._engine.spelling.behind(self._turn.token_ids, shows_special=shows_special)
        return chat_logprobs(self._texts[index], logprobs, as_ids=bool(self._fields.return_tokens_as_token_ids))

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The frames of a stream."""
        fields, usage = self._fields, self._usage
        named = self._id, "chat.completion.chunk", self._created, self._model
        frames = Frames(*named, ends_with_usage=fields.includes_usage)
        choices: dict[int, _ChoiceStream] = {}
        is_simple = fields.logprobs is not True and not fields.return_token_ids and not fields.shows_usage_always
        async for _, delta in generation:
            choice = choices.get(delta.index)
            begins = choice is None
            if choice is None:
                made = ChoiceFrames(frames, delta.index, is_chat=True)
                choice = choices[delta.index] = _ChoiceStream(made, self._turn, self._reasoning)
            usage.add(len(delta.token_ids))
            if is_simple and delta.extensions is None:
                of_choice: dict[str, Any] = {}
                rest: dict[str, Any] = {}
            else:
                of_choice, rest = self._further(delta)
            yield (self._opening(choice, rest) if begins else b"") + choice.frames(delta, of_choice, rest)
            if delta.output is not None:
                usage.add_end(delta.output)
        if fields.includes_usage:
            yield frames.usage(usage_of(usage))
        yield DONE

    def _opening(self, choice: _ChoiceStream, rest: dict[str, Any]) -> bytes:
        told = {"prompt_token_ids": self._turn.token_ids} if self._fields.return_token_ids else {}
        return choice.opening({**told, **rest})

    def _further(self, delta: Delta) -> tuple[dict[str, Any], dict[str, Any]]:
        """Further fields of a choice and of its response."""
        choice: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        if self._fields.logprobs:
            choice["logprobs"] = self._logprobs(delta.index, delta.logprobs or [])
        if self._fields.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.extensions is not None:
            choice["extensions"] = delta.extensions
        if self._fields.shows_usage_always:
            rest["usage"] = usage_of(self._usage)
        return choice, rest


def _begun(name: str, text: str, *, is_custom: bool) -> dict[str, Any]:
    """A call with its arguments so far, or with its text if the tool is a custom one."""
    if is_custom:
        return {"id": new_call_id(), "type": CUSTOM, CUSTOM: {"name": name, "input": text}}
    return {"id": new_call_id(), "type": FUNCTION, FUNCTION: {"name": name, "arguments": text}}


def calls_of(parts: Sequence[ParsedPart]) -> list[tuple[str, str]]:
    """The function's name and its arguments, for each call."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append((part.name, ""))
        elif isinstance(part, Arguments):
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    return calls


class _KeptApart:
    """Puts a newline between two texts of a message that are separated only by a call: parsers remove the white space
    around a call, and the two texts are one content here.
    """

    def __init__(self) -> None:
        self._last, self._has_called = "", False

    @property
    def waits(self) -> bool:
        """Whether the next text follows a call."""
        return self._has_called

    def text_of(self, part: Text | ToolCall) -> str:
        """The text that the next part adds to the content."""
        if isinstance(part, ToolCall):
            self._has_called = bool(self._last)
            return ""
        if not (text := part.text):
            return ""
        if self._has_called and not (self._last.isspace() or text[0].isspace()):
            text = f"\n{text}"
        self._last, self._has_called = text[-1], False
        return text


class _ChoiceStream:
    """The frames of one completion."""

    def __init__(self, frames: ChoiceFrames, turn: Turn, reasoning_fields: Sequence[str]) -> None:
        self._frames, self._reasoning, self._turn = frames, reasoning_fields, turn
        self._input: InputText | None = None
        """The text of the custom tool's call that is being generated."""
        self._reader = None if turn.is_plain else turn.reader()
        self._apart = _KeptApart()
        self._num_calls = 0
        self._waiting: dict[str, Any] = {}
        """Log-probabilities and token ids of tokens that were in no frame yet."""

    def opening(self, rest: dict[str, Any]) -> bytes:
        """The frame with the role, which is sent once."""
        return self._frames.delta({"role": "assistant", "content": ""}, {"logprobs": None, "finish_reason": None}, rest)

    def frames(self, delta: Delta, choice: dict[str, Any], rest: dict[str, Any]) -> bytes:
        """The frames of a Delta: one for each part, and the last frame of the choice.

        Tokens whose text a parser keeps back are in none of them yet.
        """
        is_simple = not choice and not rest and not self._waiting
        is_plain = self._reader is None or (self._reader.is_plain and not self._apart.waits)
        if is_simple and delta.output is None and is_plain and self._input is None:
            return self._frames.plain(delta.text)
        choice = self._with_waiting(choice)
        found = []
        for message in self._messages(delta):
            fields = {"logprobs": None, **choice, "finish_reason": None}
            choice = {}  # each token and its log-probability is sent once
            found.append(self._frames.delta(message, fields, rest))
        if delta.output is not None:
            reason = finish_reason(delta.output, has_calls=self._num_calls > 0)
            end = {"logprobs": None, **choice, "finish_reason": reason, "stop_reason": delta.output.stop_reason}
            found.append(self._frames.delta({}, end, rest))
        else:
            self._waiting = choice
        return b"".join(found)

    def _with_waiting(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A choice's fields, preceded by the fields of earlier tokens for which no frame was sent."""
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return choice
        found = dict(choice)
        if "extensions" in waiting:
            found["extensions"] = joined_told(waiting["extensions"], choice.get("extensions"))
        if "token_ids" in waiting:
            found["token_ids"] = waiting["token_ids"] + choice["token_ids"]
        if waiting.get("logprobs"):
            content = waiting["logprobs"]["content"] + choice["logprobs"]["content"]
            found["logprobs"] = {**choice["logprobs"], "content": content}
        return found

    def _messages(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The delta of the message for each part of a Delta."""
        for part in self._parts(delta):
            if not isinstance(part, Arguments):
                yield from self._end_of_input()
            yield from self._added(part)
        if delta.output is not None:
            yield from self._end_of_input()

    def _parts(self, delta: Delta) -> Iterator[ParsedPart]:
        if self._reader is None:
            yield from [Text(delta.text)] if delta.text else []
            return
        parts = self._reader.push(delta.text)
        for part in [*parts, *self._reader.finish()] if delta.output is not None else parts:
            if not isinstance(part, Reasoning) or self._reasoning:
                yield part

    def _added(self, part: ParsedPart) -> Iterator[dict[str, Any]]:
        if isinstance(part, Text):
            yield {"content": self._apart.text_of(part)}
        elif isinstance(part, Reasoning):
            yield dict.fromkeys(self._reasoning, part.text)
        elif isinstance(part, ToolCall):
            self._num_calls += 1
            self._apart.text_of(part)
            self._input = text_reader(self._turn.tools.named(part.name))
            yield self._of_call(_begun(part.name, "", is_custom=self._input is not None))
        elif self._input is None:
            yield self._of_call({FUNCTION: {"arguments": part.text}})
        elif text := self._input.push(part.text):
            yield self._of_call({CUSTOM: {"input": text}})

    def _end_of_input(self) -> Iterator[dict[str, Any]]:
        """The rest of the text of a custom tool's call."""
        given, self._input = self._input, None
        if given is not None and (text := given.finish()):
            yield self._of_call({CUSTOM: {"input": text}})

    def _of_call(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": self._num_calls - 1, **values}]}
