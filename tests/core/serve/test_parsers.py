"""Parsers as a server uses them: one after the other, asked no more once they are done, blamed when they fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hookline.core.contracts import Arguments, OutputParser, ParsedPart, ParserContext, Reasoning, Text, ToolCall
from hookline.core.errors import PluginError
from hookline.core.json_schemas import JoinedSchemas
from hookline.core.parsing import merged
from hookline.core.plugin.registry import Entry, Origin
from hookline.core.serve.chat.forced_calls import NamedCall, RequiredCalls, named_schema, required_schema
from hookline.core.serve.parsers import Parsers, PartsReader, chosen_parsers
from tests.core.faulty_parsers import PlainParser

CONTEXT = ParserContext()
ENTRY = Entry("tool_parser", "theirs", "nowhere:Parser", Origin("theirs", "m", "their-dist", "1"))


class FirstWord(OutputParser):
    """The first word is reasoning."""

    num_asked = 0

    def __init__(self, config: Any, context: ParserContext) -> None:
        pass

    def push(self, text: str) -> Sequence[ParsedPart]:
        self.num_asked += 1
        word, space, rest = text.partition(" ")
        self.is_done = bool(space)
        return [*[Reasoning(word)] * bool(word), *[Text(rest)] * bool(rest)]

    def finish(self) -> Sequence[ParsedPart]:
        return []


class Fails(PlainParser):
    def push(self, text: str) -> Sequence[ParsedPart]:
        raise ZeroDivisionError(text)


def read(reader: PartsReader, *texts: str) -> list[ParsedPart]:
    return merged([part for text in texts for part in reader.push(text)] + list(reader.finish()))


def test_a_parser_gets_the_text_that_the_one_before_left() -> None:
    reader = PartsReader([(FirstWord(None, CONTEXT), ENTRY), (PlainParser(None, CONTEXT), ENTRY)])
    assert read(reader, "CALL ", "Hi CALL f") == [Reasoning("CALL"), Text("Hi "), ToolCall("f"), Arguments("{}")]


def test_a_parser_that_is_done_is_not_asked_again() -> None:
    parser = FirstWord(None, CONTEXT)
    reader = PartsReader([(parser, ENTRY)])
    assert read(reader, "a b", "c d", "") == [Reasoning("a"), Text("bc d")]
    assert parser.num_asked == 1 and reader.is_plain


def test_a_parser_that_fails_is_named() -> None:
    reader = PartsReader([(Fails(None, CONTEXT), ENTRY)])
    with pytest.raises(PluginError, match=r"^tool_parser 'theirs' of plugin 'theirs' .* while it parses an answer"):
        reader.push("x")


def test_only_the_first_call_counts_where_one_is_wanted() -> None:
    reader = PartsReader([(RequiredCalls(), None)], calls_one=True)
    text = '[{"name": "f", "parameters": {"a": {}}}, {"name": "g", "parameters": {}}]'
    assert read(reader, *text) == [ToolCall("f"), Arguments('{"a": {}}')]


def test_forced_calls_are_read_in_any_pieces() -> None:
    text = '[ {"name": "f", "parameters": {"a": "}]"}} , {"name": "g", "parameters": {}}]'
    wanted = [ToolCall("f"), Arguments('{"a": "}]"}'), ToolCall("g"), Arguments("{}")]
    assert read(PartsReader([(RequiredCalls(), None)]), text) == wanted
    assert read(PartsReader([(RequiredCalls(), None)]), *text) == wanted
    assert read(PartsReader([(NamedCall("f"), None)]), *'{"a": 1}') == [ToolCall("f"), Arguments('{"a": 1}')]


@pytest.mark.parametrize(("answer", "parts"), [('[{"na', []), (" [", []), ("Well, I", [Text("Well, I")]), ("", [])])
def test_a_forced_call_that_was_cut_off_is_no_text(answer: str, parts: list[Text]) -> None:
    assert read(PartsReader([(RequiredCalls(), None)]), answer) == parts


def test_the_form_of_forced_calls_holds_each_function_s_parameters() -> None:
    definitions = {"T": {"type": "integer"}}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/T"}}, "$defs": definitions}
    functions = [{"name": "f", "parameters": parameters}, {"name": "g"}]
    schema = required_schema(functions, ["tools[0]", "tools[1]"], JoinedSchemas(), one_only=True)
    assert [one["properties"]["name"] for one in schema["items"]["anyOf"]] == [{"const": "f"}, {"const": "g"}]
    assert schema["$defs"] == definitions and (schema["minItems"], schema["maxItems"]) == (1, 1)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"properties": None}, {"title": "F"}])
def test_a_function_that_declares_nothing_is_called_with_nothing(parameters: Any) -> None:
    schema = named_schema({"name": "f", "parameters": parameters}, "tools[0]", JoinedSchemas())
    assert (schema["type"], schema["properties"], schema["additionalProperties"]) == ("object", {}, False)


@pytest.mark.parametrize("definitions", [3, [1], "x", None])
def test_definitions_of_no_known_form_are_left_out(definitions: object) -> None:
    joined = JoinedSchemas()
    schema = named_schema({"name": "f", "parameters": {"type": "object", "$defs": definitions}}, "tools[0]", joined)
    assert "$defs" not in schema and not joined.dropped


def test_a_parser_that_is_not_there_is_refused_and_none_is_none() -> None:
    assert chosen_parsers(None, None) == Parsers()
    with pytest.raises(PluginError, match="no tool_parser named 'nobody'"):
        chosen_parsers(None, "nobody")
