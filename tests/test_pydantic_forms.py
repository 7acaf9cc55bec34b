"""What pydantic's fields become in the shape that OpenAI's client sends: each has a grammar, which its values fit."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import pathlib
import uuid
from functools import cache
from typing import Annotated, Any, Literal

import pytest

from hookline.core.json_schemas import SchemaRules, written
from hookline.core.structured_outputs import StructuredOutputs
from hookline.core.testing.plain_grammar import small_vocabulary

openai_parsing = pytest.importorskip("openai.lib._parsing._completions")
pydantic = pytest.importorskip("pydantic")
pytest.importorskip("llguidance")

from pydantic import AnyUrl, BaseModel, Field, HttpUrl, SecretStr  # noqa: E402

from hookline.plugins.grammars import LLGuidanceConfig  # noqa: E402
from hookline.plugins.grammars.llguidance_backend import LLGuidance  # noqa: E402

VOCABULARY = small_vocabulary()


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int


class Node(BaseModel):
    value: int
    children: list[Node] = []
    next: Node | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tail: bool


FIELDS: dict[str, tuple[Any, str]] = {
    "datetime": (datetime.datetime, '"2026-01-02T03:04:05Z"'),
    "date": (datetime.date, '"2026-01-02"'),
    "time": (datetime.time, '"03:04:05Z"'),
    "timedelta": (datetime.timedelta, '"P1DT2H"'),
    "UUID": (uuid.UUID, '"12345678-1234-1234-1234-123456789abc"'),
    "Decimal": (decimal.Decimal, '"12.50"'),
    "IPv4Address": (ipaddress.IPv4Address, '"10.0.0.1"'),
    "IPv6Address": (ipaddress.IPv6Address, '"::1"'),
    "IPv4Network": (ipaddress.IPv4Network, '"10.0.0.0/8"'),
    "Path": (pathlib.Path, '"/tmp/x"'),
    "SecretStr": (SecretStr, '"s"'),
    "bytes": (bytes, '"s"'),
    "HttpUrl": (HttpUrl, '"http://a.example/b"'),
    "AnyUrl": (AnyUrl, '"s3://bucket/x"'),
    "list with bounds": (Annotated[list[int], Field(min_length=1, max_length=2)], "[1, 2]"),
    "set": (set[int], "[1, 2]"),
    "frozenset": (frozenset[str], '["a"]'),
    "tuple": (tuple[int, str], '[1, "a"]'),
    "tuple of any length": (tuple[int, ...], "[1, 2, 3]"),
    "dict of int": (dict[int, str], '{"1": "a"}'),
    "dict of enum": (dict[Color, int], '{"red": 1}'),
    "dict of patterns": (dict[Annotated[str, Field(pattern="^a")], int], '{"ab": 1}'),
    "Enum": (Color, '"blue"'),
    "Literal": (Literal["a", 1], "1"),
    "Optional": (int | None, "null"),
    "union": (int | str, '"x"'),
    "discriminated union": (Annotated[Cat | Dog, Field(discriminator="kind")], '{"kind": "dog", "tail": true}'),
    "nested": (Point, '{"x": 1}'),
    "recursive": (Node, '{"value": 1, "children": [{"value": 2, "children": [], "next": null}], "next": null}'),
    "number with bounds": (Annotated[int, Field(gt=3, le=9)], "4"),
    "text with bounds": (Annotated[str, Field(min_length=1, max_length=4)], '"abc"'),
    "text of a pattern": (Annotated[str, Field(pattern=r"^\d{3}$")], '"123"'),
    "text of a pattern with a boundary": (Annotated[str, Field(pattern=r"\bfoo\b")], '"a foo"'),
    "multiple": (Annotated[float, Field(multiple_of=0.5)], "1.5"),
    "any": (Any, "[1]"),
}


@cache
def back_end() -> LLGuidance:
    return LLGuidance(LLGuidanceConfig(num_threads=1), VOCABULARY)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_any_type_has_a_grammar_that_its_values_fit(name: str) -> None:
    field, value = FIELDS[name]
    model = pydantic.create_model("Answer", value=(field, ...))
    sent = openai_parsing.type_to_response_format_param(model)["json_schema"]
    assert sent["strict"] is True
    schema, _ = written(sent["schema"], SchemaRules(LLGuidance.cannot_hold), "s", strict=True)
    matcher = back_end().compile(StructuredOutputs(json=schema)).matcher()
    text = f'{{"value": {value}}}'
    assert model.model_validate_json(text) is not None
    assert matcher.advance(VOCABULARY.encode(text)) and matcher.is_accepting
