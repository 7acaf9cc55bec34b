"""Ollama's API against Hookline's conformance suite, and Ollama's own package against a server of it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import uvicorn
from hookline_ollama.surface import Ollama

from hookline.core.errors import EngineError
from hookline.core.testing.api_suite import ApiSuite
from hookline.core.testing.engine_client import FakeEngineClient

ollama = pytest.importorskip("ollama", reason="the package ollama is not installed: pip install ollama")
MESSAGES = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "x", "parameters": WEATHER}}]
CALL = 'Let me look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class TestOllama(ApiSuite):
    surface = Ollama
    requests: ClassVar[dict[str, Any]] = {"/api/chat": {"messages": MESSAGES}, "/api/generate": {"prompt": "Hello"}}

    def test_options_are_the_sampling_parameters_that_they_mean(self) -> None:
        client = FakeEngineClient()
        options = {"num_predict": 5, "top_k": 3, "seed": 7, "repeat_penalty": 1.5, "stop": ["x"], "num_ctx": 100}
        answer = self.ask("POST", "/api/chat", {"messages": MESSAGES, "options": options}, client=client)
        params = client.asked[0].params
        told = (params.max_tokens, params.top_k, params.seed, params.repetition_penalty, list(params.stop))
        assert told == (5, 3, 7, 1.5, ["x"])
        assert answer.headers["x-hookline-ignored"] == "options.num_ctx"

    @pytest.mark.parametrize(
        ("path", "body", "words"),
        [
            ("/api/chat", {"messages": MESSAGES, "options": {"top_k": "many"}}, "options.top_k"),
            ("/api/chat", {"messages": MESSAGES, "options": {"temperature": -1}}, "options.temperature=-1"),
            (
                "/api/chat",
                {"messages": [{"role": "user", "images": ["x"]}]},
                "messages[0].images: this",
            ),
            ("/api/chat", {"messages": MESSAGES, "tools": [3]}, "tools[0]=3 has no function"),
            ("/api/chat", {"messages": MESSAGES, "format": "xml"}, "format='xml' is not a JSON schema"),
            ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix is not supported; leave it out"),
            ("/api/generate", {"prompt": "x", "context": [1]}, "context is not supported; send messages to /api/chat"),
        ],
    )
    def test_what_cannot_be_done_is_told_with_its_field(self, path: str, body: dict[str, Any], words: str) -> None:
        answer = self.ask("POST", path, body)
        assert (answer.status, list(answer.json)) == (400, ["error"]) and words in answer.json["error"], answer

    def test_a_failure_within_a_stream_is_its_last_line(self) -> None:
        client = FakeEngineClient(error=EngineError("a secret"), error_after=2)
        answer = self.ask("POST", "/api/chat", {"messages": MESSAGES}, client=client)
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert lines[0]["message"]["content"] and list(lines[-1]) == ["error"] and "secret" not in lines[-1]["error"]


class Server:
    """A server of the surface on a port of its own, in a thread; `client` is its engine."""

    def __init__(self) -> None:
        self.client, self._suite = FakeEngineClient(), TestOllama()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(self._app, log_level="error", lifespan="off", interface="asgi3")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await self._suite.served(self.client).app(scope, receive, send)

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._listener]))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    server.client = FakeEngineClient(" Hello world")
    with ollama.Client(server.url) as made:
        yield made


def test_the_package_chats_whole_and_streamed(client: Any) -> None:
    whole = client.chat(model="fake", messages=MESSAGES)
    parts = list(client.chat(model="fake:latest", messages=MESSAGES, stream=True))
    assert whole.message.content == "".join(part.message.content for part in parts) == " Hello world"
    assert (whole.done, whole.done_reason, parts[-1].done, parts[0].done) == (True, "stop", True, False)
    assert whole.eval_count == parts[-1].eval_count > 0 and whole.prompt_eval_count > 0 and whole.total_duration > 0


def test_the_package_generates_and_continues_raw_texts(client: Any, server: Server) -> None:
    assert client.generate(model="fake", prompt="Hello", system="Be brief.").response == " Hello world"
    assert "".join(one.response for one in client.generate("fake", "Hello", raw=True, stream=True)) == " Hello world"
    plain, raw = (one.prompt_token_ids for one in server.client.asked)
    assert len(raw) < len(plain)


def test_the_package_gets_calls_of_tools_as_objects_and_gives_their_results(client: Any, server: Server) -> None:
    server.client = FakeEngineClient(CALL)
    whole = client.chat("fake", MESSAGES, tools=TOOLS)
    for parts in ([whole], client.chat("fake", MESSAGES, tools=TOOLS, stream=True)):
        messages = [part.message for part in parts]
        [call] = [call for message in messages for call in message.tool_calls or []]
        assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        assert "".join(message.content for message in messages).strip() == "Let me look."
    server.client = FakeEngineClient("It is sunny.")
    asked = [*MESSAGES, messages[0], {"role": "tool", "content": "sunny", "tool_name": "get_weather"}]
    assert client.chat("fake", asked, tools=TOOLS).message.content == "It is sunny."


def test_the_package_s_reasoning_stands_apart(client: Any, server: Server) -> None:
    server.client = FakeEngineClient("<think>So.</think>Four")
    message = client.chat("fake", MESSAGES, think=True).message
    assert (message.thinking, message.content) == ("So.", "Four")


@pytest.mark.parametrize("form", ["json", WEATHER])
def test_the_package_s_format_is_the_grammar_of_the_answer(client: Any, server: Server, form: Any) -> None:
    client.chat("fake", MESSAGES, format=form)
    wanted = server.client.asked[-1].params.structured_outputs
    assert wanted.kind == "json" and ("city" in wanted.value) == (form is WEATHER)


def test_the_package_lists_and_shows_the_model_and_loads_it(client: Any) -> None:
    assert [one.model for one in client.list().models] == [one.model for one in client.ps().models] == ["fake"]
    shown = client.show("fake")
    assert shown.capabilities == ["completion", "tools"] and shown.modelinfo["hookline.context_length"] == 4096
    assert client.chat("fake", []).done_reason == client.generate("fake").done_reason == "load"


def test_the_package_is_told_what_is_wrong(client: Any, server: Server) -> None:
    with pytest.raises(ollama.ResponseError, match=r"The model `other` does not exist. Served: fake") as error:
        client.chat("other", MESSAGES)
    assert error.value.status_code == 404
    server.client = FakeEngineClient(error=EngineError("broken"), error_after=1)
    with pytest.raises(ollama.ResponseError, match="the engine broke off"):
        list(client.chat("fake", MESSAGES, stream=True))
