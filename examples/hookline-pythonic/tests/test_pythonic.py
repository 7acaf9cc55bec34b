"""The parser against Hookline's conformance suite, and what is no call."""

from __future__ import annotations

import pytest
from hookline_pythonic.parser import Pythonic

from hookline.core.contracts import Arguments, ParserContext, Text, ToolCall
from hookline.core.testing.parser_suite import ParserSuite

CONTEXT = ParserContext(tools=[{"name": "weather"}, {"name": "add"}])


class TestPythonic(ParserSuite):
    parser, context = Pythonic, CONTEXT
    examples = {  # noqa: RUF012
        '[weather(city="Paris")]': [ToolCall("weather"), Arguments('{"city": "Paris"}')],
        ' [add(a=1, b=[2, {"c": None}]), weather()]\n': [
            ToolCall("add"),
            Arguments('{"a": 1, "b": [2, {"c": null}]}'),
            ToolCall("weather"),
            Arguments("{}"),
        ],
        "No call [here]": [Text("No call [here]")],
        "": [],
    }


@pytest.mark.parametrize(
    "text", ["[]", "[1, 2]", "[open('x')]", "[weather(x())]", "[weather('Paris')]", "[add(**{})]", "["]
)
def test_what_is_no_call_of_a_tool_stays_text(text: str) -> None:
    parser = Pythonic(None, CONTEXT)
    assert [*parser.push(text), *parser.finish()] == [Text(text)]
