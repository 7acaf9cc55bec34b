"""Other people's clients, unmodified, against a running server: the SDKs of OpenAI and Anthropic, llm, Agents."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hookline.core.errors import QueueFullError
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.engine_client import FakeEngineClient
from tests.live_server import PARSERS, LiveServer, live_server

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
REPLY = "Four is the answer."
WEATHER = '{"city": "Paris"}'
CALL = f'Let me look.<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>'
MESSAGES: list[Any] = [{"role": "user", "content": "What is two and two?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def needed(name: str) -> Any:
    """A client's package, or a skip that says what is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")


def answer(prompt: list[int], index: int) -> str:
    """The text that a real model might write: a call where there is a question about the weather and no result yet."""
    text = CODEC.decode(prompt, skip_special_tokens=False)
    if "weather" in text and "sunny" not in text:
        return CALL
    return "It is sunny in Paris." if "sunny" in text else REPLY


CODEC = FakeEngineClient().facts.codec


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(lambda: FakeEngineClient(answer)) as started:
        yield started


@pytest.fixture
def serve() -> Iterator[Callable[..., LiveServer]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(live_server(lambda: FakeEngineClient(**options), PARSERS))


@pytest.fixture
def openai_of() -> Iterator[Callable[[LiveServer], Any]]:
    openai = needed("openai")
    with ExitStack() as stack:

        def make(server: LiveServer, **options: Any) -> Any:
            return stack.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", **options))

        yield make


@pytest.fixture
def client(server: LiveServer, openai_of: Callable[[LiveServer], Any]) -> Any:
    return openai_of(server)


def test_openai_lists_the_model(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "hookline"


def test_openai_chats(client: Any) -> None:
    found = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=64)
    assert found.choices[0].message.content == REPLY and found.choices[0].finish_reason == "stop"
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_openai_streams_a_chat(client: Any) -> None:
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, stream_options=options))
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == REPLY
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens > 0


def test_openai_completes_whole_and_streamed(client: Any) -> None:
    whole = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=64, logprobs=1, echo=True)
    assert [choice.text for choice in whole.choices] == [f"a{REPLY}", f"b{REPLY}"]
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    chunks = client.completions.create(model="fake", prompt="a", max_tokens=64, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY


def test_openai_calls_tools_whole_and_streamed(client: Any) -> None:
    asked = {"model": "fake", "messages": [{"role": "user", "content": "weather?"}], "tools": TOOLS}
    message = client.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls
    assert message.content == "Let me look." and json.loads(call.function.arguments) == {"city": "Paris"}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls
    assert final.finish_reason == "tool_calls"
    assert (streamed.function.name, streamed.function.arguments) == ("get_weather", WEATHER)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*asked["messages"], message.model_dump(exclude_none=True), result]
    assert (
        client.chat.completions.create(**{**asked, "messages": messages}).choices[0].message.content
        == "It is sunny in Paris."
    )


HAS_STRUCTURED = "structured_outputs" in SamplingParams.__dataclass_fields__
needs_structured = pytest.mark.skipif(not HAS_STRUCTURED, reason="the engine has no structured output")


@needs_structured
def test_openai_parses_an_answer_into_a_class(serve: Callable[..., LiveServer], openai_of: Callable[..., Any]) -> None:
    pydantic = needed("pydantic")

    class Answer(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        value: int

    server = serve(reply='{"value": 4}')
    client = openai_of(server)
    found = client.chat.completions.parse(model="fake", messages=MESSAGES, response_format=Answer)
    assert found.choices[0].message.parsed == Answer(value=4)
    response = client.responses.parse(model="fake", input="two and two?", text_format=Answer)
    assert response.output_parsed == Answer(value=4)
    asked = [one.params.structured_outputs for one in server.client.asked]
    assert all(one is not None and '"value"' in str(one.json) for one in asked)


@needs_structured
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_openai_forces_a_call(choice: Any, serve: Callable[..., LiveServer], openai_of: Callable[..., Any]) -> None:
    listed = f'[{{"name": "get_weather", "parameters": {WEATHER}}}, {{"name": "get_weather", "parameters": {WEATHER}}}]'
    server = serve(reply=listed if choice == "required" else WEATHER)
    asked = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    calls = openai_of(server).chat.completions.create(**asked).choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("get_weather", WEATHER)] * (
        2 if choice == "required" else 1
    )
    with openai_of(server).chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert [call.function.arguments for call in final.message.tool_calls] == [call.function.arguments for call in calls]
    assert all(one.params.structured_outputs is not None for one in server.client.asked)


def test_openai_responds_whole_and_streamed(client: Any) -> None:
    found = client.responses.create(model="fake", input="two and two?", instructions="Be brief.")
    assert found.output_text == REPLY and found.status == "completed" and found.usage.total_tokens > 0
    with client.responses.stream(model="fake", input="two and two?") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == REPLY
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"


def test_openai_responds_with_a_call_and_takes_its_result(client: Any) -> None:
    tools: list[Any] = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]
    found = client.responses.create(model="fake", input="weather?", tools=tools)
    message, call = found.output
    assert (message.type, call.type, call.name, call.arguments) == ("message", "function_call", "get_weather", WEATHER)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    conversation = [{"role": "user", "content": "weather?"}, *found.output, result]
    assert client.responses.create(model="fake", input=conversation, tools=tools).output_text == "It is sunny in Paris."


def test_openai_raises_its_own_errors_and_retries_a_full_queue(
    client: Any, serve: Callable[..., LiveServer], openai_of: Callable[..., Any]
) -> None:
    openai = needed("openai")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x " * 5000)
    assert caught.value.code == "context_length_exceeded"
    full = serve(error=QueueFullError("engine.max_queued_requests", 1, 1, 1))
    with pytest.raises(openai.RateLimitError):
        openai_of(full, max_retries=1).completions.create(model="fake", prompt="x")
    assert len(full.client.asked) == 2


def test_openai_raises_an_error_in_the_middle_of_a_stream(
    serve: Callable[..., LiveServer], openai_of: Callable[..., Any]
) -> None:
    openai = needed("openai")
    from hookline.core.errors import EngineError

    server = serve(error=EngineError("broken"), error_after=2, pause_s=0.01)
    for stream in (
        openai_of(server).chat.completions.create(model="fake", messages=MESSAGES, stream=True),
        openai_of(server).responses.create(model="fake", input="x", stream=True),
    ):
        with pytest.raises(openai.APIError, match="the engine broke off"):
            list(stream)


def test_anthropic_answers_streams_counts_and_calls(server: LiveServer) -> None:
    anthropic = needed("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 64}
        found = client.messages.create(**asked, messages=MESSAGES, system="Be brief.")
        assert found.content[0].text == REPLY and found.stop_reason == "end_turn"
        with client.messages.stream(**asked, messages=MESSAGES) as stream:
            assert "".join(stream.text_stream) == REPLY
        counted = client.messages.count_tokens(model="fake", messages=MESSAGES).input_tokens
        assert counted == stream.get_final_message().usage.input_tokens
        tools = [{"name": "get_weather", "input_schema": PARAMETERS}]
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        called = client.messages.create(**asked, messages=messages, tools=tools)
        assert called.stop_reason == "tool_use" and called.content[1].input == {"city": "Paris"}
        with client.messages.stream(**asked, messages=messages, tools=tools) as stream:
            assert stream.get_final_message().content[1].input == {"city": "Paris"}
        result = {"type": "tool_result", "tool_use_id": called.content[1].id, "content": "sunny"}
        messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        assert (
            client.messages.create(**asked, messages=messages, tools=tools).content[0].text == "It is sunny in Paris."
        )
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(**asked, messages=MESSAGES, extra_body={"temperature": -1})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**asked, "model": "claude"}, messages=MESSAGES)


def test_agents_answer_with_a_tool_by_responses_and_by_chat(server: LiveServer) -> None:
    agents, openai = needed("agents"), needed("openai")
    agents.set_tracing_disabled(True)

    @agents.function_tool  # type: ignore[misc]
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            texts = []
            for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
                agent = agents.Agent(name="A", tools=[get_weather], model=kind(model="fake", openai_client=client))
                texts.append((await agents.Runner.run(agent, "weather in Paris?")).final_output)
                streamed = agents.Runner.run_streamed(agent, "weather in Paris?")
                async for _ in streamed.stream_events():
                    pass
                texts.append(streamed.final_output)
            return texts

    assert asyncio.run(run()) == ["It is sunny in Paris."] * 4


@needs_structured
def test_agents_call_a_tool_and_answer_with_a_class(serve: Callable[..., LiveServer]) -> None:
    agents, openai, pydantic = needed("agents"), needed("openai"), needed("pydantic")
    agents.set_tracing_disabled(True)

    class Weather(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        city: str
        is_sunny: bool

    @agents.function_tool  # type: ignore[misc]
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    def reply(prompt: list[int], index: int) -> str:
        is_told = "sunny<|im_end|>" in CODEC.decode(prompt, skip_special_tokens=False)
        return '{"city": "Paris", "is_sunny": true}' if is_told else CALL.removeprefix("Let me look.")

    server = serve(reply=reply)

    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            found = []
            for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
                model = kind(model="fake", openai_client=client)
                agent = agents.Agent(name="A", tools=[get_weather], output_type=Weather, model=model)
                found.append((await agents.Runner.run(agent, "Paris?")).final_output)
                streamed = agents.Runner.run_streamed(agent, "Paris?")
                async for _ in streamed.stream_events():
                    pass
                found.append(streamed.final_output)
            return found

    assert asyncio.run(run()) == [Weather(city="Paris", is_sunny=True)] * 4
    assert all(one.params.structured_outputs is not None for one in server.client.asked)


@needs_structured
def test_anthropic_parses_a_message_into_a_class(serve: Callable[..., LiveServer]) -> None:
    anthropic, pydantic = needed("anthropic"), needed("pydantic")

    class Answer(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        value: int

    server = serve(reply='{"value": 4}')
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        asked = {"model": "fake", "max_tokens": 64, "messages": MESSAGES}
        assert client.messages.parse(**asked, output_format=Answer).parsed_output == Answer(value=4)
        assert [model.id for model in client.models.list()] == ["fake"]
    held = server.client.asked[0].params.structured_outputs
    assert held is not None and '"value"' in str(held.json)


PATCH = '*** Begin Patch\n*** Update File: a.py\n+x = "1"\n*** End Patch'
AGENT_TOOLS: list[Any] = [
    {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": PARAMETERS},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)+/'},
    },
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "Pages.",
        "tools": [{"type": "function", "name": "search", "parameters": PARAMETERS, "strict": False}],
    },
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
]
AGENT_HISTORY: list[Any] = [
    {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "<permissions>all</permissions>"}],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "patch it"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
    {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin", "status": "completed"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "it does not apply"},
    {"type": "function_call", "call_id": "c2", "namespace": "mcp__docs", "name": "search", "arguments": WEATHER},
    {"type": "function_call_output", "call_id": "c2", "output": "nothing"},
    {
        "type": "local_shell_call",
        "call_id": "c3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "function_call_output", "call_id": "c3", "output": "a.py"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
]
AGENT_CALLS: list[tuple[str, Any, str, Any]] = [
    ("exec_command", {"city": "Paris"}, "function_call", {"name": "exec_command", "arguments": WEATHER}),
    ("apply_patch", {"input": PATCH}, "custom_tool_call", {"name": "apply_patch", "input": PATCH}),
    (
        "mcp__docs__search",
        {"city": "Paris"},
        "function_call",
        {"namespace": "mcp__docs", "name": "search", "arguments": WEATHER},
    ),
    ("local_shell", {"command": ["ls", "-l"]}, "local_shell_call", {}),
]


def test_a_coding_agents_request_is_answered_by_a_stream_of_openais_own_types(
    serve: Callable[..., LiveServer], openai_of: Callable[..., Any]
) -> None:
    pydantic, responses = needed("pydantic"), needed("openai.types.responses")
    calls = [json.dumps({"name": name, "arguments": given}) for name, given, _, _ in AGENT_CALLS]
    reply = "<think>\nHm.\n</think>\n\nI patch." + "".join(f"\n<tool_call>\n{one}\n</tool_call>" for one in calls)
    asked: dict[str, Any] = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "input": AGENT_HISTORY,
        "tools": AGENT_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "5f2c",
        "text": {"verbosity": "low"},
    }
    client = openai_of(serve(reply=reply))
    check = pydantic.TypeAdapter(responses.ResponseStreamEvent)
    told = list(client.responses.create(**asked, stream=True))
    for event in told:
        check.validate_python(event.model_dump(warnings=False, exclude_unset=True))
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert [event.type for event in told[:2]] == ["response.created", "response.in_progress"]
    final = told[-1].response
    assert (told[-1].type, final.status) == ("response.completed", "completed")
    assert [item.type for item in final.output] == ["reasoning", "message", *(kind for _, _, kind, _ in AGENT_CALLS)]
    assert (final.output[0].content[0].text.strip(), final.output_text.strip()) == ("Hm.", "I patch.")
    for item, (_, _, _, fields) in zip(final.output[2:], AGENT_CALLS, strict=True):
        assert {name: getattr(item, name) for name in fields} == fields and item.call_id and item.status == "completed"
    assert final.output[-1].action.command == ["ls", "-l"]
    for index, item in enumerate(final.output):
        own = [event for event in told if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[0].item.type == item.type
        assert own[-1].type == "response.output_item.done" and own[-1].item == item
        if (text := getattr(item, "input", getattr(item, "arguments", None))) is not None:
            deltas = [event.delta for event in own if event.type.endswith(".delta")]
            (done,) = [event for event in own if event.type.endswith(("_input.done", "_arguments.done"))]
            assert "".join(deltas) == text == getattr(done, "input", getattr(done, "arguments", None))
    with client.responses.stream(**asked) as stream:
        assert [event.type for event in stream] == [event.type for event in told]
        assert [item.type for item in stream.get_final_response().output] == [item.type for item in final.output]
    again = [*AGENT_HISTORY, *(item.model_dump(exclude_none=True) for item in final.output)]
    assert client.responses.create(**{**asked, "input": again}).status == "completed"


def test_the_llm_command_chats_and_counts_tokens(server: LiveServer, tmp_path: Path) -> None:
    needed("llm")
    model = f"- model_id: served\n  model_name: fake\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none", "LLM_LOAD_PLUGINS": ""}
    command = [sys.executable, "-m", "llm", "-m", "served", "--usage", "two and two?"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, REPLY), done.stderr
    assert "Token usage" in done.stderr
