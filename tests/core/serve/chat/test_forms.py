"""What an answer must look like, by every field that says so: with tools and without, obeyed or refused, and named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hookline.core.serve.errors import aborted
from hookline.core.serve.settings import ServeConfig
from hookline.core.testing.engine_client import FakeEngineClient, tiny_model
from tests.core.serve.conftest import Ask

CHAT, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
USER = {"role": "user", "content": "x"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [USER], "max_tokens": 64},
    COMPLETIONS: {"prompt": "x", "max_tokens": 64},
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**SCHEMA, "additionalProperties": False}
HERMES = ServeConfig(tool_parser="hermes")
IGNORED = "x-hookline-ignored"


def tools_of(path: str, parameters: Any = CITY, **further: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "parameters": parameters, **further}
    if path == CHAT:
        return [{"type": "function", "function": function}]
    if path == RESPONSES:
        return [{"type": "function", **function}]
    return [{"name": "get_weather", "input_schema": parameters, **further}]


def format_of(path: str, schema: Any = SCHEMA, **further: Any) -> dict[str, Any]:
    flat = {"type": "json_schema", "name": "s", "schema": schema, **further}
    if path == RESPONSES:
        return {"text": {"format": flat}}
    if path == MESSAGES:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **further}}}


def choice_of(path: str, kind: str) -> Any:
    if path == MESSAGES:
        return {"required": {"type": "any"}, "auto": {"type": "auto"}, "none": {"type": "none"}}[kind]
    return kind


def sent(ask: Ask, path: str, *, reply: str = "x", grammars: str | None = None, **fields: Any) -> tuple[Any, Any]:
    """The response, and the form that the engine was asked for."""
    client = FakeEngineClient(reply=reply, facts=replace(tiny_model(), grammars=grammars))
    response = ask(client, "POST", path, HERMES, json={**BASE[path], **fields})
    return response, client.asked[0].params.structured_outputs if client.asked else None


def form(ask: Ask, path: str, **fields: Any) -> Any:
    response, wanted = sent(ask, path, **fields)
    assert response.status_code == 200, response.text
    return wanted


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_with_tools_and_a_schema_the_answer_is_calls_or_the_schema_s_json(ask: Ask, path: str) -> None:
    wanted = form(ask, path, tools=tools_of(path), **format_of(path))
    calls, answer = json.loads(wanted.structural_tag)["format"]["elements"]
    assert answer == {"type": "json_schema", "json_schema": CLOSED}
    (tag,) = calls["tags"]
    assert calls["type"] == "tags_with_separator" and calls["at_least_one"] and not calls["stop_after_first"]
    assert tag["begin"] + '{"city": "Paris"}' + tag["end"] == CALL
    assert tag["content"]["json_schema"] == {**CITY, "additionalProperties": False}


def answer_of(path: str, body: dict[str, Any]) -> tuple[str | None, str | None]:
    """The text of an answer, and the tool that it calls."""
    if path == CHAT:
        message = body["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        return message["content"], calls[0]["function"]["name"] if calls else None
    (item,) = body["output" if path == RESPONSES else "content"]
    if "name" in item:
        return None, item["name"]
    return (item["content"][0] if path == RESPONSES else item)["text"], None


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_both_kinds_of_answer_are_read(ask: Ask, path: str) -> None:
    fields = {"tools": tools_of(path), **format_of(path)}
    called, _ = sent(ask, path, reply=CALL, **fields)
    answered, _ = sent(ask, path, reply='{"a": 4}', **fields)
    assert answer_of(path, called.json()) == (None, "get_weather")
    assert answer_of(path, answered.json()) == ('{"a": 4}', None)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_forced_call_wins_and_the_schema_waits(ask: Ask, path: str) -> None:
    response, wanted = sent(ask, path, tools=tools_of(path), tool_choice=choice_of(path, "required"), **format_of(path))
    assert response.status_code == 200 and json.loads(wanted.json)["type"] == "array"
    names = {CHAT: "response_format", RESPONSES: "text.format", MESSAGES: "output_config.format"}
    assert response.headers[IGNORED] == names[path]
    assert form(ask, path, tools=tools_of(path), tool_choice=choice_of(path, "none"), **format_of(path)).json


def test_one_call_is_all_where_calls_are_not_parallel(ask: Ask) -> None:
    wanted = form(ask, CHAT, tools=tools_of(CHAT), parallel_tool_calls=False, **format_of(CHAT))
    assert json.loads(wanted.structural_tag)["format"]["elements"][0]["stop_after_first"] is True


@pytest.mark.parametrize(
    ("given", "element"),
    [
        ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        ({"choice": ["a"]}, {"type": "or", "elements": [{"type": "const_string", "value": "a"}]}),
        ({"grammar": "start: x"}, {"type": "grammar", "grammar": "start: x"}),
    ],
)
def test_any_form_goes_together_with_tools(ask: Ask, given: dict[str, Any], element: dict[str, Any]) -> None:
    wanted = form(ask, CHAT, tools=tools_of(CHAT), structured_outputs={**given, "after": "!"})
    assert json.loads(wanted.structural_tag)["format"]["elements"][1] == element and wanted.after == "!"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_calls_of_strict_functions_follow_their_schemas_in_free_text(ask: Ask, path: str) -> None:
    tools = [*tools_of(path, strict=True), *json.loads(json.dumps(tools_of(path)).replace("get_weather", "other"))]
    wanted = form(ask, path, tools=tools, grammars="llguidance")
    found = json.loads(wanted.structural_tag)["format"]
    assert found["type"] == "triggered_tags" and found["triggers"] == ["<tool_call>"]
    schemas = [tag["content"]["json_schema"] for tag in found["tags"]]
    assert schemas == [{**CITY, "additionalProperties": False}, {"type": "object", "additionalProperties": True}]
    response, wanted = sent(ask, path, tools=tools)
    assert wanted is None and ".strict" in response.headers[IGNORED]


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json", CLOSED),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json", CLOSED),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "json", CLOSED),
        ({"response_format": {"type": "json", "value": SCHEMA}}, "json", CLOSED),
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, "regex", "a+"),
        ({"response_format": {"type": "grammar", "grammar": "start: x"}}, "grammar", "start: x"),
        ({"guided_json": SCHEMA}, "json", CLOSED),
        ({"guided_json": json.dumps(SCHEMA)}, "json", CLOSED),
        ({"guided_json_object": True}, "json", {"type": "object"}),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": "start: x"}, "grammar", "start: x"),
        ({"json_schema": json.dumps(SCHEMA)}, "json", CLOSED),
        ({"json_schema": {"name": "s", "schema": SCHEMA}}, "json", CLOSED),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"grammar": {"type": "json", "value": SCHEMA}}, "json", CLOSED),
        ({"format": "json"}, "json", {"type": "object"}),
        ({"format": SCHEMA}, "json", CLOSED),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "structural_tag", {"format": {"type": "any_text"}}),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_a_field_of_another_server_says_the_same(
    ask: Ask, path: str, fields: dict[str, Any], kind: str, value: Any
) -> None:
    response, wanted = sent(ask, path, **fields)
    assert response.status_code == 200 and wanted.kind == kind, response.text
    assert (json.loads(wanted.value) if kind in ("json", "structural_tag") else wanted.value) == value
    assert IGNORED not in response.headers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_formats": {"type": "json_object"}}, "Did you mean 'response_format'?"),
        ({"responseFormat": {"type": "json_object"}}, "Did you mean 'response_format'?"),
        ({"structured_output": {"regex": "a"}}, "Did you mean 'structured_outputs'?"),
        ({"guided_choices": ["a"]}, "Did you mean 'guided_choice'?"),
        ({"extra_body": {"guided_json": SCHEMA}}, "send guided_json as a field of the body"),
        ({"nvext": {"guided_regex": "a"}}, "send guided_regex as a field of the body"),
        ({"text": {"format": {"type": "json_object"}}}, "text is not a field of this endpoint; use response_format"),
        ({"functions": [{"name": "f"}]}, "functions is not a field of this endpoint; use tools"),
        ({"function_call": {"name": "f"}}, "function_call is not a field of this endpoint; use tool_choice"),
        ({"guided_decoding": {"json": SCHEMA}}, "use structured_outputs"),
        ({"choice": ["a"]}, "use structured_outputs"),
        ({"outputSchema": SCHEMA}, "outputSchema is not a field of this endpoint; use response_format"),
        ({"json_object": True}, "use response_format"),
        ({"tool_choise": "required"}, "Did you mean 'tool_choice'?"),
        ({"toolChoice": "required"}, "Did you mean 'tool_choice'?"),
        (
            {"response_format": {"type": "json_object", "scheme": SCHEMA}},
            "response_format.scheme is not known. Did you mean 'response_format.schema'?",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strct": True}}},
            "Did you mean 'response_format.json_schema.strict'?",
        ),
        (
            {"response_format": {"type": "text", "schema": SCHEMA}},
            "response_format.schema has no effect with response_format.type='text'",
        ),
        ({"guided_json": 5}, "guided_json=5 is not a JSON schema"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "are both set; give one"),
        (
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "response_format and regex are both set; give one",
        ),
        ({"guided_choice": []}, "guided_choice=[] must be a list of texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]='' must be a text that is not empty"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]=5 must be a text that is not"),
        ({"guided_regex": "a" * 9000}, "guided_regex has more than 8192 characters"),
    ],
)
def test_a_field_that_would_say_so_is_refused_with_the_right_spelling(
    ask: Ask, fields: dict[str, Any], message: str
) -> None:
    response, _ = sent(ask, CHAT, **fields)
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] in fields


@pytest.mark.parametrize("key", ["schema", "type", "fromat"])
@pytest.mark.parametrize(("path", "field"), [(RESPONSES, "text"), (MESSAGES, "output_config")])
def test_a_form_beside_its_own_key_is_refused(ask: Ask, path: str, field: str, key: str) -> None:
    response, _ = sent(ask, path, **{field: {key: "json_schema"}})
    assert response.status_code == 400 and f"the form of the answer is {field}.format" in response.text


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("path", "tool", "message"),
    [
        (CHAT, {"type": "function", "function": {"name": "f", "input_schema": CITY}}, "function.input_schema is not"),
        (CHAT, {"name": "f", "input_schema": CITY}, "tools[0].input_schema is not known; use parameters"),
        (CHAT, {"name": "f", "inputSchema": CITY}, "tools[0].inputSchema is not known; use parameters"),
        (MESSAGES, {"name": "f", "schema": CITY}, "tools[0] has its parameters where this endpoint has input_schema"),
        (CHAT, {"type": "function", "function": {"name": "f", "parametres": CITY}}, "[0].function.parameters'?"),
        (RESPONSES, {"type": "function", "name": "f", "parameter": CITY}, "Did you mean 'tools[0].parameters'?"),
        (MESSAGES, {"name": "f", "parameters": CITY}, "where this endpoint has input_schema"),
        (MESSAGES, {"name": "f", "inputSchema": CITY}, "Did you mean 'tools[0].input_schema'?"),
        (MESSAGES, {"type": "function", "function": {"name": "f"}}, "where this endpoint has input_schema"),
    ],
)
def test_a_tool_whose_parameters_stand_elsewhere_is_refused(
    ask: Ask, path: str, tool: Any, message: str, choice: str
) -> None:
    response, _ = sent(ask, path, tools=[tool], tool_choice=choice_of(path, choice))
    assert response.status_code == 400 and message in response.json()["error"]["message"]


STRANGERS: list[tuple[dict[str, Any], str]] = [
    ({"grammar_string": 'root ::= "a"'}, "use grammar"),
    ({"gbnf_grammar": 'root ::= "a"'}, "use grammar"),
    ({"regex_pattern": "a+"}, "use regex"),
    ({"response_regex": "a+"}, "use regex"),
    ({"json_schema_constraint": SCHEMA}, "use response_format"),
    ({"constrained_decoding": {"type": "json"}}, "use structured_outputs"),
    ({"guided_lark": "start: x"}, "use grammar"),
    ({"parameters": {"grammar": {"type": "json", "value": SCHEMA}}}, "send grammar as a field of the body"),
    ({"sampling_params": {"json_schema": "{}"}}, "send json_schema as a field of the body"),
    ({"generationConfig": {"responseSchema": SCHEMA}}, "send response_format as a field of the body"),
    ({"nvext": {"guided_whitespace": "a", "guidedRegexp": "a"}}, "send structured_outputs as a field of the body"),
    ({"stopping_strings": ["a"]}, "use stop"),
    ({"banned_strings": ["a"]}, "use bad_words"),
    ({"options": {"stop": ["a"]}}, "send stop as a field of the body"),
    ({"until": ["a"]}, "use stop"),
    ({"eos_token_id": 0}, "use stop_token_ids"),
    ({"suppress_tokens": [5]}, "use bad_words"),
    ({"min_length": 5}, "use min_tokens"),
]


@pytest.mark.parametrize(("fields", "message"), STRANGERS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_a_stranger_s_field_that_constrains_the_answer_is_refused_with_the_one_that_works(
    ask: Ask, path: str, fields: dict[str, Any], message: str
) -> None:
    for stream in (False, True):
        response, _ = sent(ask, path, stream=stream, **fields)
        assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


@pytest.mark.parametrize(
    ("path", "field", "right"),
    [
        (CHAT, "max_new_tokens", "max_completion_tokens"),
        (COMPLETIONS, "n_predict", "max_tokens"),
        (RESPONSES, "max_completion_tokens", "max_output_tokens"),
        (CHAT, "stop_sequences", "stop"),
        (CHAT, "max_length", "max_completion_tokens"),
    ],
)
def test_a_bound_of_another_name_is_refused_unless_the_endpoint_s_own_is_set_too(
    ask: Ask, path: str, field: str, right: str
) -> None:
    response, _ = sent(ask, path, **{"max_tokens": None, field: 5})
    assert response.status_code == 400 and f"use {right}" in response.json()["error"]["message"]
    value: Any = ["a"] if right == "stop" else 5
    response, _ = sent(ask, path, **{field: value, right: value})
    assert response.status_code == 200 and response.headers[IGNORED] == field


def test_fields_that_clients_send_without_a_value_and_those_about_back_ends_are_named(ask: Ask) -> None:
    fields = {"grammar_string": "", "stopping_strings": [], "guidance_scale": 1.5, "schema_version": 2, "seed": 1}
    response, _ = sent(ask, CHAT, **fields)
    assert response.status_code == 200
    assert response.headers[IGNORED] == "grammar_string, stopping_strings, guidance_scale, schema_version"


def test_a_grammar_that_others_held_up_is_named_as_the_request_names_it(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "{}: all threads are held up by grammars that take longer than 2 s; try again later"
    monkeypatch.setattr(
        "hookline.core.serve.endpoints.generation.check_end",
        lambda output: (_ for _ in ()).throw(aborted(told.format("sampling.structured_outputs.regex"))),
    )
    response, _ = sent(ask, CHAT, guided_regex="a+")
    error = response.json()["error"]
    assert (response.status_code, error["message"]) == (503, told.format("guided_regex"))
    assert (error["param"], error["code"]) == ("guided_regex", "aborted") and "retry-after" in response.headers


def test_a_number_of_another_name_that_bounds_nothing_is_named(ask: Ask) -> None:
    response, _ = sent(ask, CHAT, n_predict=-1, min_length=0)
    assert response.status_code == 200 and response.headers[IGNORED] == "n_predict, min_length"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_tool_that_is_too_deep_among_others_is_named(ask: Ask, choice: str, strict: bool) -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(30):
        deep = {"type": "object", "properties": {"a": deep}}
    tools = [*tools_of(CHAT), *tools_of(CHAT, deep, strict=strict)]
    tools[1]["function"]["name"] = "deep"
    response, _ = sent(ask, CHAT, tools=tools, tool_choice=choice, grammars="llguidance")
    if choice == "auto" and not strict:
        assert response.status_code == 200
    else:
        told = "tools[1].function.parameters is nested deeper than 64 levels; make it flatter: a grammar of calls has 6"
        assert response.status_code == 400 and response.json()["error"]["message"].startswith(told), response.text


def test_a_field_of_another_name_that_is_false_asks_for_nothing(ask: Ask) -> None:
    response, _ = sent(ask, CHAT, json_mode=False)
    assert response.status_code == 200 and response.headers[IGNORED] == "json_mode"


def test_what_only_says_how_a_grammar_is_made_is_named(ask: Ask) -> None:
    fields = {"guided_regex": "a", "guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": " "}
    response, _ = sent(ask, CHAT, **fields)
    assert response.headers[IGNORED] == "guided_decoding_backend, guided_whitespace_pattern"


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (CHAT, {"messages": [USER, {**USER, "baz": 1}]}, "messages[1].baz"),
        (CHAT, {"messages": [{**USER, "tool_calls": None, "audio": {}}]}, "messages[0].audio"),
        (CHAT, {"tools": tools_of(CHAT, bar=1)}, "tools[0].function.bar"),
        (
            CHAT,
            {"stream": True, "stream_options": {"include_obfuscation": True, "include_usage": True}},
            "stream_options.include_obfuscation",
        ),
        (CHAT, {"response_format": {"type": "text", "foo": 1}}, "response_format.foo"),
        (CHAT, format_of(CHAT, foo=1), "response_format.json_schema.foo"),
        (COMPLETIONS, format_of(COMPLETIONS, foo=1), "response_format.json_schema.foo"),
        (RESPONSES, format_of(RESPONSES, foo=1), "text.format.foo"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
        (RESPONSES, {"tools": tools_of(RESPONSES, bar=1)}, "tools[0].bar"),
        (MESSAGES, {"tools": tools_of(MESSAGES, bar=1)}, "tools[0].bar"),
        (MESSAGES, {"messages": [{**USER, "baz": 1}]}, "messages[0].baz"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ],
)
def test_a_field_within_a_field_that_has_no_effect_is_named(
    ask: Ask, path: str, fields: dict[str, Any], names: str
) -> None:
    response, _ = sent(ask, path, **fields)
    assert response.status_code == 200 and response.headers[IGNORED] == names, response.text


ODD = {"type": "object", "properties": {"when": {"type": "date", "pattern": 5}}}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_one_odd_tool_does_not_fail_its_neighbours(ask: Ask, path: str) -> None:
    odd = json.loads(json.dumps(tools_of(path, ODD)).replace("get_weather", "odd"))
    key = {CHAT: "function.parameters", RESPONSES: "parameters", MESSAGES: "input_schema"}[path]
    choice = choice_of(path, "required")
    response, wanted = sent(ask, path, tools=[*tools_of(path), *odd], tool_choice=choice)
    place = f"tools[1].{key}.properties.when"
    assert response.status_code == 200 and response.headers[IGNORED] == f"{place}.type, {place}.pattern"
    calls = json.loads(wanted.json)["items"]["anyOf"]
    assert [one["properties"]["parameters"]["properties"] for one in calls] == [CITY["properties"], {"when": {}}]
    strict = json.loads(json.dumps(tools_of(path, ODD, strict=True)))
    response, _ = sent(ask, path, tools=strict, tool_choice=choice)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"tools[0].{key}.properties.when.type='date' must be one of array, boolean,")


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_function_without_parameters_is_called_with_an_empty_object(ask: Ask, parameters: Any, choice: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    wanted = form(ask, CHAT, tools=tools_of(CHAT, parameters), tool_choice=named if choice == "named" else choice)
    schema = json.loads(wanted.json)
    schema = schema if choice == "named" else schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert schema == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_setting_of_the_grammars_leaves_objects_open(ask: Ask) -> None:
    client = FakeEngineClient(facts=replace(tiny_model(), grammars="llguidance", opens_objects=True))
    ask(client, "POST", CHAT, json={**BASE[CHAT], **format_of(CHAT)})
    wanted = client.asked[0].params.structured_outputs
    assert wanted is not None and json.loads(str(wanted.json)) == SCHEMA


def test_a_parser_that_does_not_say_how_calls_are_written_is_told_with_the_fix(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hookline.core.contracts import OutputParser
    from hookline.plugins.parsers.hermes import Hermes

    monkeypatch.setattr(Hermes, "call_form", OutputParser.call_form)
    response, _ = sent(ask, CHAT, tools=tools_of(CHAT), **format_of(CHAT))
    assert response.status_code == 400
    assert "does not say how the model writes calls; leave one out, or force a call" in response.text


def texts_of(answer: Any, key: str = "") -> Iterator[str]:
    """The texts of an answer, or of the events of one, in their order."""
    if isinstance(answer, str) and key in ("name", "text", "content", "thinking", "reasoning_content", "delta"):
        yield answer
    for name, value in answer.items() if isinstance(answer, dict) else ():
        yield from texts_of(value, name)
    for value in answer if isinstance(answer, list) else ():
        yield from texts_of(value, key)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
def test_behind_reasoning_the_answer_is_calls_or_the_form(ask: Ask, path: str, stream: bool) -> None:
    facts = tiny_model()
    facts.codec.tokenizer.chat_template += "{# </think> #}"
    settings = ServeConfig(tool_parser="hermes", reasoning_parser="think")
    body = {**BASE[path], "tools": tools_of(path), **format_of(path), "stream": stream}
    for reply, mark in ((CALL, "get_weather"), ('{"a": 5}', '{"a": 5}')):
        client = FakeEngineClient(facts=facts, reply=f"<think>Hm.</think>{reply}")
        response = ask(client, "POST", path, settings, json=body)
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(texts_of([json.loads(one) for one in events] if stream else response.json()))
        assert "Hm." in text and mark in text and "<think>" not in text and "<tool_call>" not in text
        wanted = client.asked[0].params.structured_outputs
        assert wanted is not None and wanted.after == "</think>" and wanted.kind == "structural_tag"


@pytest.mark.parametrize(
    ("begun", "after"),
    [("Well, ", None), ("<think>Hm.</think>Well, ", None), ("<think>Hm", "</think>")],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_answer_that_is_begun_is_held_from_its_first_token_unless_it_reasons(
    ask: Ask, path: str, begun: str, after: str | None
) -> None:
    facts = tiny_model()
    facts.codec.tokenizer.chat_template += "{# </think> #}"
    settings = ServeConfig(tool_parser="hermes", reasoning_parser="think")
    body = {**BASE[path], "tools": tools_of(path), "tool_choice": choice_of(path, "required")}
    body |= {"messages": [USER, {"role": "assistant", "content": begun}]}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False} if path == CHAT else {}
    client = FakeEngineClient(facts=facts, reply="[]")
    response = ask(client, "POST", path, settings, json={**body, **goes_on})
    assert response.status_code == 200, response.text
    wanted = client.asked[0].params.structured_outputs
    assert wanted is not None and wanted.kind == "json" and wanted.after == after


def test_without_its_reasoning_the_answer_is_held_from_its_first_token(ask: Ask) -> None:
    facts = tiny_model()
    facts.codec.tokenizer.chat_template += "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    settings = ServeConfig(tool_parser="hermes", reasoning_parser="think")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for path, fields in ((CHAT, off), (RESPONSES, off), (MESSAGES, {"thinking": {"type": "disabled"}})):
        client = FakeEngineClient(facts=facts, reply='{"a": 5}')
        ask(client, "POST", path, settings, json={**BASE[path], "tools": tools_of(path), **format_of(path), **fields})
        wanted = client.asked[0].params.structured_outputs
        assert wanted is not None and wanted.after is None and wanted.kind == "structural_tag", path


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": "?"}}}, None),
        (CHAT, {"response_format": {"type": "json_object", "schema": "?"}}, "response_format.schema"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "s", "schema": "?"}}}, "text.format.schema"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": "?"}}},
            "output_config.format.schema",
        ),
        (CHAT, {"json_schema": {"name": "s", "schema": "?"}}, "json_schema.schema"),
    ],
)
def test_a_schema_of_true_is_one_of_any_value_and_of_false_one_of_none(
    ask: Ask, path: str, fields: dict[str, Any], place: str | None
) -> None:
    def of(schema: bool) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(json.dumps(fields).replace('"?"', json.dumps(schema)))
        return made

    response, held = sent(ask, path, **of(True))
    assert response.status_code == 200 and held.json == "{}", response.text
    response, _ = sent(ask, path, **of(False))
    place = place or "response_format.json_schema.schema"
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"{place}=false is a schema that no value fits"


def test_a_schema_of_true_in_the_field_of_another_server_is_one_of_any_value(ask: Ask) -> None:
    response, held = sent(ask, CHAT, guided_json=True)
    assert response.status_code == 200 and held.json == "{}"


@pytest.mark.parametrize("schema", [True, False])
def test_the_parameters_of_a_function_are_a_schema_of_objects(ask: Ask, schema: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    response, _ = sent(ask, CHAT, tools=[tool])
    told = f"tools[0].function.parameters={schema} is not a JSON schema of objects"
    assert response.status_code == 400 and response.json()["error"]["message"] == told
