"""Tools and items of every kind: what a client runs is called in its own form, the rest is ignored and named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from hookline.core.errors import RequestError
from hookline.core.serve.endpoints.body import IGNORED_HEADER
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient
from hookline.plugins.apis.openai.client_tools import InputText
from tests.core.serve.conftest import Ask

PARSERS = ServeConfig(reasoning_parser="think", tool_parser="hermes")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = [{"role": "user", "content": "x"}]
PATCH = '*** Begin Patch\n*** Add File: ä.txt\n+"x" \\ 🙂\n*** End Patch'
NESTED = {"type": "function", "name": "search", "description": "Searches.", "parameters": CITY, "strict": False}
RESPONSES_TOOLS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [NESTED]},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}},
    {"type": "local_shell"},
    {"type": "web_search"},
    {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False},
]


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TEMPLATE = (
    "{{ tools | tojson if tools else '' }}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def client_of(reply: str = " Hello world") -> FakeEngineClient:
    """A client whose chat template writes tools and their calls."""
    client = FakeEngineClient(reply)
    client.facts.codec.tokenizer.chat_template = TEMPLATE
    return client


def prompt_of(client: FakeEngineClient) -> str:
    return client.facts.codec.decode(client.asked[-1].prompt_token_ids, skip_special_tokens=False)


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def responded(
    ask: Ask, reply: str, **fields: Any
) -> tuple[dict[str, Any], list[Any], FakeEngineClient, httpx.Response]:
    """The one item of an answer, the events of a stream that has it as well, the client, and the whole response."""
    client = client_of(reply)
    body = {"input": "x", "tools": RESPONSES_TOOLS, **fields}
    whole = ask(client, "POST", "/v1/responses", PARSERS, json=body)
    assert whole.status_code == 200, whole.text
    told = events(ask(FakeEngineClient(reply), "POST", "/v1/responses", PARSERS, json={**body, "stream": True}))
    (item,) = whole.json()["output"]
    (streamed,) = told[-1]["response"]["output"]
    ids = {"id": item["id"], "call_id": item["call_id"]}
    assert {**streamed, **ids} == item
    return item, told, client, whole


CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        call("crm__search", {"city": "Rome"}),
        {"type": "function_call", "namespace": "crm", "name": "search", "arguments": '{"city": "Rome"}'},
        {"type": "response.function_call_arguments.done", "name": "search", "arguments": '{"city": "Rome"}'},
    ),
    (
        call("apply_patch", {"input": PATCH}),
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
        {"type": "response.custom_tool_call_input.done", "input": PATCH},
    ),
    (
        call("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}),
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5},
        },
        {},
    ),
]


@pytest.mark.parametrize("kind", ["local_shell", "shell", "apply_patch"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("own", ["custom", "function"])
def test_a_tool_of_ones_own_may_be_called_like_a_built_in_one_and_each_can_be_forced(
    ask: Ask, kind: str, is_first: bool, own: str
) -> None:
    mine: dict[str, Any] = {"type": own, "name": kind, **({"parameters": CITY} if own == "function" else {})}
    tools = [mine, {"type": kind}] if is_first else [{"type": kind}, mine]
    forms = {"custom": "custom_tool_call", "function": "function_call"}
    for choice, form in (({"type": own, "name": kind}, forms[own]), ({"type": kind}, f"{kind}_call")):
        item, *_ = responded(ask, "{}", tools=tools, tool_choice=choice)
        assert item["type"] == form
    item, *_ = responded(ask, "{}", tools=[mine, mine], tool_choice={"type": own, "name": kind})
    assert item["type"] == forms[own]


def test_an_earlier_call_has_the_name_that_its_tool_has_beside_a_function_of_that_name(ask: Ask) -> None:
    mine = {"type": "function", "name": "shell", "parameters": CITY}
    history = [
        {"role": "user", "content": "go on"},
        {"type": "shell_call", "call_id": "a", "action": {"commands": ["date"]}},
        {"type": "shell_call_output", "call_id": "a", "output": []},
    ]
    searched = [{"type": "tool_search_output", "tools": [mine]}]
    for items, tools, name in (
        (history, [mine, {"type": "shell"}], "shell_tool"),
        (history + searched, [{"type": "shell"}], "shell_tool"),
        (history, [mine], "shell_tool"),
        (history, [{"type": "shell"}], "shell"),
    ):
        client = client_of("Done.")
        response = ask(client, "POST", "/v1/responses", PARSERS, json={"input": items, "tools": tools})
        assert response.status_code == 200, response.text
        assert f'>assistant\n{name}{{"commands": ["date"]}}' in prompt_of(client)


@pytest.mark.parametrize(("reply", "item", "done"), CALLS, ids=["namespace", "custom", "local_shell"])
def test_a_coding_agent_gets_each_call_in_its_own_form(
    ask: Ask, reply: str, item: dict[str, Any], done: dict[str, Any]
) -> None:
    found, told, _, response = responded(ask, reply)
    assert {name: found[name] for name in item} == item and found["status"] == "completed"
    assert response.headers[IGNORED_HEADER] == "tools.web_search"
    deltas = [event for event in told if event["type"].endswith(".delta")]
    ended = [event for event in told if event["type"].endswith(("_arguments.done", "_input.done"))]
    if done:
        (last,) = ended
        assert {name: last[name] for name in done} == done
        assert {event["type"] for event in deltas} == {done["type"].replace(".done", ".delta")}
        assert "".join(event["delta"] for event in deltas) == done.get("input", done.get("arguments"))
    else:
        assert not deltas and not ended
    added, over = (next(e for e in told if e["type"] == f"response.output_item.{name}") for name in ("added", "done"))
    assert added["item"]["type"] == over["item"]["type"] == item["type"]
    assert added["item"]["status"] == "in_progress" and over["item"]["status"] == "completed"


def test_the_model_reads_the_history_of_a_coding_agent(ask: Ask) -> None:
    output = {"output": "done", "status": "completed"}
    history = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "abc"},
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "+patched", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "patch is in"},
        {
            "type": "function_call",
            "call_id": "b",
            "namespace": "crm",
            "name": "search",
            "arguments": '{"city": "Oslo"}',
        },
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "found Oslo"}]},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["pwd"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c", "output": '{"output": "/home"}'},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["date"], "timeout_ms": None}},
        {
            "type": "shell_call_output",
            "call_id": "d",
            "output": [{"stdout": "Monday", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        {"type": "apply_patch_call", "call_id": "e", "operation": {"type": "delete_file", "path": "old.txt"}},
        {"type": "apply_patch_call_output", "call_id": "e", **output},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
        {"type": "mcp_call", "id": "m2", "server_label": "s", "name": "n", "arguments": "{}", "output": "o"},
        {"role": "user", "content": "and now?"},
    ]
    client = client_of("Done.")
    body = {"input": history, "tools": RESPONSES_TOOLS, "stream": True}
    response = ask(client, "POST", "/v1/responses", PARSERS, json=body)
    assert response.status_code == 200, response.text
    kinds = ("item_reference", "web_search_call", "mcp_list_tools", "mcp_call")
    assert response.headers[IGNORED_HEADER].split(", ") == [*(f"input.{kind}" for kind in kinds), "tools.web_search"]
    prompt = prompt_of(client)
    told = ("+patched", "patch is in", "crm__search", "Oslo", "found Oslo", "pwd", "/home", "date", "Monday", "old.txt")
    assert [one for one in (*told, "done", "and now?") if one not in prompt] == []


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "web_search_preview",
        "image_generation",
        "mcp",
        "file_search",
        "code_interpreter",
        "computer_use_preview",
        "tool_search",
        "a_kind_of_tomorrow",
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_a_tool_that_is_not_run_here_is_ignored_and_named(ask: Ask, path: str, kind: str) -> None:
    body = {"input": "x"} if path == "/v1/responses" else {"messages": USER}
    response = ask(FakeEngineClient(), "POST", path, json={**body, "tools": [{"type": kind}], "tool_choice": "auto"})
    assert response.status_code == 200 and response.headers[IGNORED_HEADER] == f"tools.{kind}"


@pytest.mark.parametrize(
    "kind",
    ["web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "tool_search_tool_bm25_20251119"],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_tool_that_anthropic_runs_is_ignored_and_named(ask: Ask, path: str, kind: str) -> None:
    body = {"messages": USER, "max_tokens": 9, "tools": [{"type": kind, "name": "a"}]}
    response = ask(FakeEngineClient(), "POST", path, json=body)
    assert response.status_code == 200 and f"tools.{kind}" in response.headers[IGNORED_HEADER].split(", ")


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("bash_20250124", "bash", {"command": "ls"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "view", "path": "/a"}),
        ("memory_20250818", "memory", {"command": "view", "path": "/memories"}),
    ],
)
def test_a_tool_of_anthropic_that_the_client_runs_is_called(
    ask: Ask, kind: str, name: str, arguments: dict[str, Any]
) -> None:
    client = client_of(call(name, arguments))
    body = {"messages": USER, "max_tokens": 99, "tools": [{"type": kind, "name": name}]}
    response = ask(client, "POST", "/v1/messages", PARSERS, json=body)
    (block,) = response.json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", name, arguments)
    assert IGNORED_HEADER not in response.headers and '"command"' in prompt_of(client)


def test_a_chat_calls_a_custom_tool_with_its_text(ask: Ask) -> None:
    tool = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits files."}}
    reply = call("apply_patch", {"input": PATCH})
    body = {"messages": USER, "tools": [tool]}
    answer = ask(FakeEngineClient(reply), "POST", "/v1/chat/completions", PARSERS, json=body).json()
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert (made["type"], made["custom"]) == ("custom", {"name": "apply_patch", "input": PATCH})
    streamed = ask(FakeEngineClient(reply), "POST", "/v1/chat/completions", PARSERS, json={**body, "stream": True})
    deltas = [one for event in events(streamed) for one in event["choices"][0]["delta"].get("tool_calls", ())]
    assert (deltas[0]["type"], deltas[0]["custom"]) == ("custom", {"name": "apply_patch", "input": ""})
    assert "".join(one["custom"]["input"] for one in deltas) == PATCH
    client = client_of()
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [made]}]
    history += [{"role": "tool", "tool_call_id": made["id"], "content": "patch is in"}]
    assert ask(client, "POST", "/v1/chat/completions", PARSERS, json={**body, "messages": history}).status_code == 200
    assert "*** Add File" in prompt_of(client) and "patch is in" in prompt_of(client)


FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("first", "second", "third")
]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered_and_called(ask: Ask, mode: str) -> None:
    for path, body, listed in (
        (
            "/v1/chat/completions",
            {"messages": USER, "tools": FUNCTIONS},
            {"allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "second"}}]}},
        ),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "function", **one["function"]} for one in FUNCTIONS]},
            {"mode": mode, "tools": [{"type": "function", "name": "second"}, {"type": "image_generation"}]},
        ),
    ):
        client = client_of()
        choice = {"type": "allowed_tools", **listed}
        response = ask(client, "POST", path, PARSERS, json={**body, "tool_choice": choice})
        assert response.status_code == 200, response.text
        assert "second" in prompt_of(client) and "first" not in prompt_of(client)
        schema = str(client.asked[-1].params.structured_outputs)
        assert ("second" in schema, "third" in schema) == (mode == "required", False)


@pytest.mark.parametrize(
    ("choice", "reply", "kind"),
    [
        ({"type": "custom", "name": "apply_patch"}, json.dumps({"input": PATCH}), "custom_tool_call"),
        ({"type": "function", "name": "search"}, '{"city": "Rome"}', "function_call"),
        ({"type": "function", "name": "search", "namespace": "crm"}, '{"city": "Rome"}', "function_call"),
        ({"type": "local_shell"}, '{"command": ["ls"]}', "local_shell_call"),
    ],
)
def test_a_tool_of_any_kind_can_be_forced(ask: Ask, choice: dict[str, Any], reply: str, kind: str) -> None:
    item, _, client, _ = responded(ask, reply, tool_choice=choice)
    assert item["type"] == kind and client.asked[0].params.structured_outputs is not None
    assert item.get("input", PATCH) == PATCH and item.get("namespace", "crm") == "crm"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0]="),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0]="),
        ({"tools": [{"type": "custom"}]}, "tools[0]={'type': 'custom'} is not a function with a name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f"}]}]},
            "tools[0]={'functionDeclarations': [{'name': 'f'}]} is",
        ),
        ({"tools": RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "nobody"}}, "'nobody'"),
        ({"tools": RESPONSES_TOOLS, "tool_choice": {"type": "web_search"}}, "that only a provider runs; choose auto"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "no tools that can be called here; of type web_search none",
        ),
        ({"tools": RESPONSES_TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "none"}}, "needs a mode"),
        ({"input": [{"type": "custom_tool_call", "input": "x"}]}, "input[0]="),
        ({"input": [{"type": 5}]}, "input[0]="),
    ],
)
def test_a_tool_of_no_known_form_is_named_by_its_place(ask: Ask, fields: dict[str, Any], message: str) -> None:
    response = ask(FakeEngineClient(), "POST", "/v1/responses", PARSERS, json={"input": "x", **fields})
    assert response.status_code == 400 and message in response.json()["error"]["message"]


LARK = 'start: "*** Begin" /[^"]+/'


@pytest.mark.parametrize("text", ["*** Begin x", '{"input": "x"}'])
def test_a_custom_tools_grammar_holds_a_call_that_is_forced(ask: Ask, text: str) -> None:
    form = {"syntax": "lark", "definition": LARK}
    tool = {"type": "custom", "name": "edit", "format": {"type": "grammar", **form}}
    choice = {"type": "custom", "name": "edit"}
    item, told, client, response = responded(ask, text, tools=[tool], tool_choice=choice)
    held = client.asked[0].params.structured_outputs
    assert held is not None and held.grammar == LARK and item["input"] == text
    assert "".join(event["delta"] for event in told if event["type"].endswith("_input.delta")) == text
    assert IGNORED_HEADER not in response.headers
    nested = {"type": "custom", "custom": {"name": "edit", "format": {"type": "grammar", "grammar": form}}}
    body = {"messages": USER, "tools": [nested], "tool_choice": {"type": "custom", "custom": {"name": "edit"}}}
    client = client_of(text)
    answer = ask(client, "POST", "/v1/chat/completions", PARSERS, json=body).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == text
    held = client.asked[0].params.structured_outputs
    assert held is not None and held.grammar == LARK


@pytest.mark.parametrize(
    "form",
    [
        {"type": "grammar", "syntax": "ebnf", "definition": "root ::= a"},
        {"type": "grammar", "definition": LARK},
        {"type": "grammar", "syntax": "lark"},
        {"type": "grammar", "grammar": "x"},
        {"type": "gbnf", "definition": "x"},
        "text",
    ],
)
def test_a_custom_tool_with_a_grammar_of_no_known_syntax_is_told_the_syntaxes(ask: Ask, form: Any) -> None:
    tool = {"type": "custom", "name": "edit", "format": form}
    response = ask(FakeEngineClient(), "POST", "/v1/responses", PARSERS, json={"input": "x", "tools": [tool]})
    told = response.json()["error"]["message"]
    assert response.status_code == 400 and told.startswith("tools[0].format=") and "grammar" in told


def test_a_custom_tools_grammar_is_told_to_a_model_that_may_choose(ask: Ask) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": LARK}
    tools = [{"type": "custom", "name": "edit", "description": "Edits.", "format": form}]
    item, _, client, response = responded(ask, call("edit", {"input": "x"}), tools=tools)
    assert item["input"] == "x" and response.headers[IGNORED_HEADER] == "tools[0].format"
    assert "Edits." in prompt_of(client) and "*** Begin" in prompt_of(client)


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "edit"}, "required"])
@pytest.mark.parametrize(("syntax", "definition"), [("lark", LARK), ("regex", "[a-z]+")])
def test_the_grammar_of_the_only_tool_that_can_be_called_holds_its_text(
    ask: Ask, syntax: str, definition: str, choice: Any
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools = [{"type": "custom", "name": "edit", "format": form}]
    item, _, client, response = responded(ask, "xyz", tools=tools, tool_choice=choice)
    held = client.asked[0].params.structured_outputs
    assert held is not None and held.value == definition and item["input"] == "xyz"
    assert IGNORED_HEADER not in response.headers
    error = RequestError(f"sampling.structured_outputs.{held.kind}: unclosed")
    body = {"input": "x", "tools": tools, "tool_choice": choice}
    answer = ask(FakeEngineClient(error=error), "POST", "/v1/responses", PARSERS, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "tools[0].format.definition: unclosed"
    assert answer.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_regex_that_no_grammar_holds_is_refused_by_its_place(ask: Ask, choice: str) -> None:
    pytest.importorskip("llguidance")
    form = {"syntax": "regex", "definition": "(["}
    other = {"type": "custom", "custom": {"name": "other"}}
    tool = {"type": "custom", "custom": {"name": "edit", "format": {"type": "grammar", "grammar": form}}}
    flat = {"type": "custom", "name": "edit", "format": {"type": "grammar", **form}}
    client = FakeEngineClient(facts=replace(FakeEngineClient().facts, grammars="llguidance"))
    for path, body, place in (
        ("/v1/chat/completions", {"messages": USER, "tools": [other, tool]}, "tools[1].custom.format.grammar"),
        ("/v1/responses", {"input": "x", "tools": [flat, {"type": "custom", "name": "other"}]}, "tools[0].format"),
    ):
        answer = ask(client, "POST", path, PARSERS, json={**body, "tool_choice": choice})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["message"].startswith(f"{place}.definition='([' is malformed") and error["param"] == "tools"


def test_a_call_that_is_cut_off_is_an_item_of_its_kind(ask: Ask) -> None:
    for reply, expected in (
        ('<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin', ("custom_tool_call", "incomplete")),
        ('<tool_call>\n{"name": "local_shell", "arguments": {"command": ["l', ("local_shell_call", "incomplete")),
    ):
        size = len(FakeEngineClient().facts.codec.tokenizer.encode(reply, add_special_tokens=False))
        body = {"input": "x", "tools": RESPONSES_TOOLS, "max_output_tokens": size}
        response = ask(FakeEngineClient(reply), "POST", "/v1/responses", PARSERS, json=body)
        (item,) = response.json()["output"]
        assert (item["type"], item["status"]) == expected
        assert item.get("input", "*** Begin") == "*** Begin"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        (' { "input" : "\\ud83d\\ude42 \\u00e4 \\\\ \\" /" }', '🙂 ä \\ " /'),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ('{"patch": "other key"}', "other key"),
        ("no JSON", "no JSON"),
        ('{"input": "a\\d+ \\\\ \\n."}', "a\\d+ \\ \n."),
        ('{"input": "cut off \\', "cut off "),
        ('{"input": ""}', ""),
        ("", ""),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_a_custom_tools_text_is_the_same_however_it_comes(arguments: str, text: str) -> None:
    for size in (1, 2, 3, 7, 100):
        reader = InputText()
        pieces = [reader.push(arguments[start : start + size]) for start in range(0, len(arguments), size)]
        assert "".join([*pieces, reader.finish()]) == reader.text == text


BEGUN = [{"type": "text", "text": "Sure,"}]
BEGINS: dict[str, Any] = {"messages": [*USER, {"role": "assistant", "content": BEGUN}]}
FORM = {"type": "json_schema", "schema": CITY}
CALLED = [{"type": "tool_use", "id": "t", "name": "find", "input": {}}]


@pytest.mark.parametrize(
    ("last", "is_continued"),
    [
        ("Sure,", True),
        (BEGUN, True),
        ([{"type": "thinking", "thinking": "so"}, *BEGUN], True),
        ("", False),
        (" ", False),
        ([*BEGUN, *CALLED], False),
    ],
)
def test_messages_go_on_behind_the_begin_of_an_answer(ask: Ask, last: Any, is_continued: bool) -> None:
    client = client_of(" here")
    body = {"max_tokens": 8, "messages": [*USER, {"role": "assistant", "content": last}]}
    answer = ask(client, "POST", "/v1/messages", PARSERS, json=body)
    assert answer.json()["content"] == [{"type": "text", "text": " here"}]
    assert prompt_of(client).endswith("assistant\nSure,") == is_continued
    counted = ask(client, "POST", "/v1/messages/count_tokens", PARSERS, json={"messages": body["messages"]}).json()
    assert counted["input_tokens"] == len(client.asked[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"thinking": {"type": "on"}}, "thinking.type='on' must be one of enabled, adaptive, disabled"),
        ({"tools": [{"input_schema": CITY}]}, "tools[0]={'input_schema': {"),
        (BEGINS | {"output_config": {"format": FORM}}, "messages[1] begins the answer, which output_config.format "),
        (BEGINS | {"output_format": FORM}, "messages[1] begins the answer, which output_format then"),
        (BEGINS | {"guided_regex": "a"}, "messages[1] begins the answer, which guided_regex then"),
    ],
)
def test_messages_refuse_what_cannot_be_read_in_the_words_that_were_sent(
    ask: Ask, fields: dict[str, Any], told: str
) -> None:
    body = {"max_tokens": 8, "messages": USER, **fields}
    response = ask(client_of("no"), "POST", "/v1/messages", PARSERS, json=body)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(told)


@pytest.mark.parametrize("kind", ["function_cal", "item_reference"])
def test_a_conversation_of_nothing_that_is_read_is_told_what_it_holds(ask: Ask, kind: str) -> None:
    response = ask(FakeEngineClient(), "POST", "/v1/responses", PARSERS, json={"input": [{"type": kind, "id": "a"}]})
    told = f"input holds no message that is read here; it holds input.{kind}: add a message"
    assert response.status_code == 400 and response.json()["error"]["message"] == told
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": []}]}
    response = ask(FakeEngineClient(), "POST", "/v1/messages", PARSERS, json=body)
    assert response.status_code == 400 and "no message with content" in response.json()["error"]["message"]


def test_messages_read_documents_of_text_and_name_blocks_of_other_servers(ask: Ask) -> None:
    content: list[dict[str, Any]] = [
        {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "alpha"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "beta"}]}},
        {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "Z2FtbWE="}},
        {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "delta"}]},
        {"type": "text", "text": "read it"},
    ]
    history = [
        {"role": "user", "content": content},
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "tool_use", "id": "t", "name": "find", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "tool_reference", "tool_name": "epsilon"}, content[0]],
                }
            ],
        },
    ]
    client = client_of()
    response = ask(client, "POST", "/v1/messages", json={"messages": history, "max_tokens": 9})
    assert response.status_code == 200, response.text
    names = ["messages.server_tool_use", "messages.web_search_tool_result"]
    assert response.headers[IGNORED_HEADER].split(", ") == names
    prompt = prompt_of(client)
    assert [one for one in ("alpha", "beta", "gamma", "delta", "epsilon", "read it") if one not in prompt] == []
    assert prompt.count("alpha") == 2


@pytest.mark.parametrize(
    ("data", "status"),
    [
        ("data:text/plain;base64,YWxwaGE=", 200),
        ("data:text/markdown;charset=utf-8;base64,YWxwaGE=", 200),
        ("data:text/plain;base64,/w==", 400),
        ("data:application/pdf;base64,YWxwaGE=", 400),
        (None, 400),
    ],
)
def test_files_of_text_are_read_and_others_refused_by_their_place(ask: Ask, data: Any, status: int) -> None:
    file = {"filename": "a.txt", "file_data": data}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "file", "file": file}]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file", **file}]}]}),
    ):
        client = client_of()
        response = ask(client, "POST", path, json=body)
        assert response.status_code == status, response.text
        if status == 200:
            assert "alpha" in prompt_of(client)
        else:
            assert response.json()["error"]["message"].startswith(f"{next(iter(body))}[0].content[0]")


@pytest.mark.parametrize(
    "source",
    [{"type": "base64", "media_type": "application/pdf", "data": "AAAA"}, {"type": "url", "url": "http://a"}, None],
)
def test_a_document_that_is_no_text_is_refused_by_its_place(ask: Ask, source: Any) -> None:
    content = [{"type": "document", "source": source}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 9}
    response = ask(FakeEngineClient(), "POST", "/v1/messages", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("messages[0].content[0].source: this model reads text only")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_messages_answer_in_the_form_that_is_asked_for(ask: Ask, fields: dict[str, Any]) -> None:
    client = client_of('{"a": 1}')
    response = ask(client, "POST", "/v1/messages", json={"messages": USER, "max_tokens": 9, **fields})
    assert response.status_code == 200 and IGNORED_HEADER not in response.headers
    form = client.asked[0].params.structured_outputs
    assert form is not None and '"a"' in str(form.json)


def test_messages_hand_their_effort_to_the_template_and_name_the_rest(ask: Ask) -> None:
    config = {"effort": "low", "task_budget": {"type": "tokens", "total": 5}}
    body = {"messages": USER, "max_tokens": 9, "output_config": config}
    response = ask(FakeEngineClient(), "POST", "/v1/messages", json=body)
    assert response.status_code == 200 and response.headers[IGNORED_HEADER] == "output_config.task_budget"
    body["output_config"] = {"format": {"type": "json_schema", "schema": 5}}
    error = ask(FakeEngineClient(), "POST", "/v1/messages", json=body).json()["error"]
    assert error["message"] == "output_config.format.schema must be a JSON schema"


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"return_token_ids": True}])
def test_a_stream_has_no_frame_without_text_while_a_call_is_read(ask: Ask, fields: dict[str, Any]) -> None:
    client = FakeEngineClient(call("first", {"city": "Rome"}), one_by_one=True)
    body = {"messages": USER, "tools": FUNCTIONS, "stream": True, **fields}
    told = [event["choices"][0] for event in events(ask(client, "POST", "/v1/chat/completions", PARSERS, json=body))]
    assert [one["delta"] for one in told[1:] if one["delta"] == {"content": ""}] == []
    ids = client.facts.codec.tokenizer.encode(client.reply, add_special_tokens=False)
    if "return_token_ids" in fields:
        assert [id_ for one in told for id_ in one.get("token_ids", ())] == [*ids, client.facts.eos_token_ids[0]]
    if "logprobs" in fields:
        assert sum(len(one["logprobs"]["content"]) for one in told if one["logprobs"]) == len(ids) + 1
