"""The parsers against their conformance suite; what else they promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.contracts import Arguments, ParserContext, Reasoning, Text, ToolCall
from hookline.core.parsing import merged
from hookline.core.testing.parser_suite import ParserSuite
from hookline.plugins.parsers.hermes import Hermes
from hookline.plugins.parsers.think import Think
from tests.fuzzing import examples

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "at": {"day": "}\\""}}}\n</tool_call>'
ARGUMENTS = '{"city": "Paris", "at": {"day": "}\\""}}'


class TestHermes(ParserSuite):
    parser = Hermes
    examples = {  # noqa: RUF012
        "Hello <tool>": [Text("Hello <tool>")],
        WEATHER: [ToolCall("weather"), Arguments(ARGUMENTS)],
        f"Let me look.\n{WEATHER}\n{WEATHER}": [
            Text("Let me look."),
            *[ToolCall("weather"), Arguments(ARGUMENTS)] * 2,
        ],
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> done': [
            ToolCall("f"),
            Arguments('{"a": 1}'),
            Text("done"),
        ],
        '<tool_call>{"name": "f"}</tool_call>': [ToolCall("f"), Arguments("{}")],
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>': [ToolCall("f"), Arguments("{}")],
        '<tool_call>{"name": "f", "arguments": {"a"': [ToolCall("f"), Arguments('{"a"')],
        '<tool_call>{"name": "f"}': [ToolCall("f"), Arguments("{}")],
        "<tool_call>no JSON</tool_call>": [Text("<tool_call>no JSON</tool_call>")],
        "Hi <tool_call>no JSON</tool_call> bye": [Text("Hi <tool_call>no JSON</tool_call> bye")],
        # what is cut off in a call is shown as a call, if at all
        'Hi <tool_call>{"na': [Text("Hi")],
        '<tool_call>\n{"name": "weath': [],
        '<tool_call>\n{"name" : "weather"': [ToolCall("weather")],
        'Hi\n<tool_call>\n{"name": "weather", "argum': [Text("Hi"), ToolCall("weather")],
        '<tool_call>{"name": "weather", "arguments": ["a"': [
            Text('<tool_call>{"name": "weather", "arguments": ["a"'),
        ],
        '<tool_call>{"city"': [Text('<tool_call>{"city"')],
        "<tool_call>": [],
        "\n<tool_c": [],
        "\n<": [Text("\n<")],
        f"{WEATHER}\n<to": [ToolCall("weather"), Arguments(ARGUMENTS)],
        "a <to": [Text("a <to")],
        "<": [Text("<")],
        "white space stays \n": [Text("white space stays \n")],
    }


class TestThink(ParserSuite):
    parser = Think
    examples = {  # noqa: RUF012
        "<think>\nWell.\n\nYes.\n</think>\n\nHello\n": [Reasoning("Well.\n\nYes."), Text("Hello\n")],
        "Hello <think>not</think>": [Text("Hello <think>not</think>")],
        "<think>never ends </thi": [Reasoning("never ends </thi")],
        "<think></think>Hello": [Text("Hello")],
        " <thin": [Text(" <thin")],
        "": [],
    }


class TestThinkThatThePromptOpened(ParserSuite):
    parser = Think
    context = ParserContext(prompt_end="<|im_start|>assistant\n<think>\n")
    examples = {  # noqa: RUF012
        "Well.\n</think>\n\nHello": [Reasoning("Well."), Text("Hello")],
        "<think>\nWell.</think>Hello": [Reasoning("Well."), Text("Hello")],
        "never ends": [Reasoning("never ends")],
    }


def test_a_prompt_that_closed_its_reasoning_opens_none() -> None:
    parser = Think(None, ParserContext(prompt_end="<think>\n\n</think>\n\n"))
    assert merged([*parser.push("Hello"), *parser.finish()]) == [Text("Hello")]


def test_arguments_are_given_before_the_call_ends() -> None:
    parser = Hermes(None, ParserContext())
    parts = parser.push('<tool_call>{"name": "f", "arguments": {"text": "a long')
    assert parts == [ToolCall("f"), Arguments('{"text": "a long')]


@pytest.mark.parametrize("parser_class", [Hermes, Think])
@settings(max_examples=examples(60), deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', "{", "}", '"']
        )
        | st.text('<>/tkhin{}" \n\\:,', max_size=6),
        max_size=12,
    )
)
def test_any_text_in_any_pieces_says_the_same_as_the_whole(parser_class: type, pieces: list[str]) -> None:
    def parsed(texts: list[str]) -> list[object]:
        parser = parser_class(None, ParserContext())
        return merged([part for text in texts for part in parser.push(text)] + list(parser.finish()))

    assert parsed(pieces) == parsed(["".join(pieces)]) == parsed(list("".join(pieces)))
