"""Ollama's endpoints: their routes, and answers as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hookline.core.contracts import ApiError, ApiRoute, ApiSurface, Arguments, ErrorForm, ParsedPart, Reasoning, Text
from hookline.core.contracts import ToolCall as Call
from hookline.core.outputs import Delta, FinishReason
from hookline.core.serving import Generation, ServedEngine, Turn, Usage, answer_turn, json_response, read, span
from hookline_ollama.fields import ChatRequest, GenerateRequest, OllamaRequest

VERSION = "0.12.0"
"""The version of Ollama whose API this is; clients ask for it."""
Fields = Callable[[list[ParsedPart]], dict[str, Any]]
Headers = Mapping[str, str]


class OllamaErrors(ErrorForm):
    """`{"error": message}`, also as the last line of a stream."""

    stream_type: ClassVar[str] = "application/x-ndjson"
    schema: ClassVar[dict[str, Any]] = {"type": "object", "properties": {"error": {"type": "string"}}}

    def body(self, error: ApiError) -> dict[str, object]:
        """See ErrorForm."""
        return {"error": error.message}

    def frames(self, error: ApiError) -> bytes:
        """See ErrorForm."""
        return _line(self.body(error))


class Ollama(ApiSurface):
    """Ollama's API for the served model."""

    errors = OllamaErrors()

    def __init__(self, config: None, engine: ServedEngine) -> None:
        self._engine = engine

    def routes(self) -> Sequence[ApiRoute]:
        """See ApiSurface."""
        return [
            ApiRoute("POST", "/api/chat", self._chat, "Answer messages, in Ollama's form", ChatRequest, streams=True),
            ApiRoute(
                "POST",
                "/api/generate",
                self._generate,
                "Answer a text, in Ollama's form",
                GenerateRequest,
                streams=True,
            ),
            ApiRoute("POST", "/api/show", self._show, "Facts of a model, in Ollama's form", OllamaRequest),
            ApiRoute("GET", "/api/tags", self._tags, "The served model, in Ollama's form"),
            ApiRoute("GET", "/api/ps", self._tags, "As /api/tags: the served model is always loaded"),
            ApiRoute("GET", "/api/version", self._version, "The version of Ollama's API"),
        ]

    async def _chat(self, request: Request) -> Response:
        fields, headers = await read(request, ChatRequest)
        if not fields.messages:
            return self._loaded(fields, headers, {"message": {"role": "assistant", "content": ""}})
        return await self._answer(request, fields, headers, _message)

    async def _generate(self, request: Request) -> Response:
        fields, headers = await read(request, GenerateRequest)
        fields.check()
        if not fields.prompt:
            return self._loaded(fields, headers, {"response": ""})
        return await self._answer(request, fields, headers, _response)

    async def _answer(self, request: Request, fields: OllamaRequest, headers: Headers, parts: Fields) -> Response:
        fields = msgspec.structs.replace(fields, stream=fields.stream is not False, model=self._name(fields.model))
        make = partial(_Answer, parts)
        return await answer_turn(self._engine, request, fields, headers, "ollama-", make, self.errors)

    def _name(self, asked: str | None) -> str:
        """A name of the served model; Ollama's clients put `:latest` behind names.

        Raises: ApiError with status 404 for an unknown name.
        """
        names = self._engine.facts.names
        plain = (asked or "").removesuffix(":latest")
        return self._engine.model_name(plain if plain in names else asked)

    def _loaded(self, fields: OllamaRequest, headers: Headers, content: dict[str, Any]) -> Response:
        """The answer to a request that only wants the model to be loaded, as it is."""
        named = {"model": self._name(fields.model), "created_at": _time(time.time())}
        return json_response({**named, **content, "done": True, "done_reason": "load"}, headers)

    async def _show(self, request: Request) -> Response:
        fields, headers = await read(request, OllamaRequest)
        name, facts = self._name(fields.model), self._engine.facts
        template = getattr(self._engine.codec.tokenizer, "chat_template", None)
        capabilities = ["completion", *(["tools"] if self._engine.parsers.tools is not None else [])]
        values = {
            "modelfile": f"FROM {name}",
            "parameters": f"num_ctx {facts.max_model_len}",
            "template": template if isinstance(template, str) else "",
            "details": _details(),
            "model_info": {"general.architecture": "hookline", "hookline.context_length": facts.max_model_len},
            "capabilities": capabilities,
            "modified_at": _time(facts.created_s),
        }
        return json_response(values, headers)

    async def _tags(self, request: Request) -> Response:
        at = _time(self._engine.facts.created_s)
        names = self._engine.facts.names
        facts = {"modified_at": at, "size": 0, "digest": "", "details": _details()}
        return json_response({"models": [{"name": name, "model": name, **facts} for name in names]})

    async def _version(self, request: Request) -> Response:
        return json_response({"version": VERSION})


class _Answer:
    """One request's answer. parts: the fields of a line that hold parts of the answer."""

    def __init__(self, parts: Fields, turn: Turn, id: str, model: str) -> None:
        self._parts, self._model, self._reader = parts, model, turn.reader()
        self.span = span("chat", id)
        self._usage = Usage(len(turn.token_ids))
        self._begun_ns = time.monotonic_ns()
        self._first_ns = 0
        self._call: tuple[str, str] | None = None

    async def whole(self, generation: Generation, headers: Headers) -> Response:
        """The answer in one object."""
        found: list[ParsedPart] = []
        last: Delta | None = None
        async for _, delta in generation:
            found += self._whole_calls(delta)
            last = delta
        assert last is not None
        return json_response(self._line(found) | self._end(last), headers)

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """A line for each Delta that brings something, and the last one."""
        async for _, delta in generation:
            parts = self._whole_calls(delta)
            lines = [_line(self._line(parts) | {"done": False})] if parts else []
            if delta.output is not None:
                lines.append(_line(self._line([]) | self._end(delta)))
            if lines:
                yield b"".join(lines)

    def _whole_calls(self, delta: Delta) -> list[ParsedPart]:
        """The parts of a Delta. A call is one part with all its arguments: Ollama's clients know no pieces of calls."""
        self._first_ns = self._first_ns or time.monotonic_ns()
        self._usage.add(len(delta.token_ids))
        parts = list(self._reader.push(delta.text))
        if delta.output is not None:
            parts += self._reader.finish()
        found: list[ParsedPart] = []
        for part in parts:
            if isinstance(part, Arguments):
                assert self._call is not None
                self._call = (self._call[0], self._call[1] + part.text)
                continue
            found += self._ended_call()
            if isinstance(part, Call):
                self._call = (part.name, "")
            else:
                found.append(part)
        return found + self._ended_call() if delta.output is not None else found

    def _ended_call(self) -> list[ParsedPart]:
        call, self._call = self._call, None
        return [] if call is None else [Call(call[0]), Arguments(call[1])]

    def _line(self, parts: list[ParsedPart]) -> dict[str, Any]:
        return {"model": self._model, "created_at": _time(time.time()), **self._parts(parts)}

    def _end(self, delta: Delta) -> dict[str, Any]:
        assert delta.output is not None
        now_ns, usage = time.monotonic_ns(), self._usage
        return {
            "done": True,
            "done_reason": "length" if delta.output.finish_reason is FinishReason.LENGTH else "stop",
            "total_duration": now_ns - self._begun_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": self._first_ns - self._begun_ns,
            "eval_count": usage.num_completion_tokens,
            "eval_duration": now_ns - self._first_ns,
        }


def _message(parts: list[ParsedPart]) -> dict[str, Any]:
    """The fields of a line of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(parts, Text)}
    if thinking := _text(parts, Reasoning):
        message["thinking"] = thinking
    names = [part.name for part in parts if isinstance(part, Call)]
    arguments = [_object(part.text) for part in parts if isinstance(part, Arguments)]
    if names:
        calls = zip(names, arguments, strict=True)
        message["tool_calls"] = [{"function": {"name": name, "arguments": one}} for name, one in calls]
    return {"message": message}


def _response(parts: list[ParsedPart]) -> dict[str, Any]:
    """The fields of a line of /api/generate."""
    thinking = _text(parts, Reasoning)
    return {"response": _text(parts, Text)} | ({"thinking": thinking} if thinking else {})


def _text(parts: list[ParsedPart], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _object(text: str) -> dict[str, Any]:
    """A call's arguments; a call that was cut off has none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _details() -> dict[str, Any]:
    return {"format": "safetensors", "family": "hookline", "families": ["hookline"], "parameter_size": ""}


def _line(values: dict[str, Any]) -> bytes:
    return msgspec.json.encode(values) + b"\n"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
