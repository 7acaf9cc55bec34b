"""Schemas as grammars hold them: references resolved, objects closed, what cannot be held left out and named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hookline.core.json_schemas import MAX_TRIED, JoinedSchemas, SchemaError, SchemaRules, as_held, written
from hookline.core.structured_outputs import MAX_SCHEMA_VALUES, StructuredOutputs

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
UNHELD = ("uniqueItems", "propertyNames", "not", "if", "then", "contains", "dependentRequired", "unevaluatedItems")


def cannot_hold(keyword: str, value: Any) -> bool:
    return keyword in UNHELD or (keyword == "pattern" and "(?" in value) or (keyword == "format" and value != "date")


RULES = SchemaRules(cannot_hold)


def held(schema: Any, rules: SchemaRules = RULES, **options: Any) -> Any:
    return written(schema, rules, "s", **options)[0]


def left_out(schema: Any, **options: Any) -> list[str]:
    return [place.removeprefix("s.") for place in written(schema, RULES, "s", **options)[1]]


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/T"}}, "$defs": {"T": TEXT}},
        {"properties": {"a": {"$ref": "#/definitions/T"}}, "definitions": {"T": TEXT}},
        {"properties": {"a": {"$ref": "#/x-own/T"}}, "x-own": {"T": TEXT}},
        {"properties": {"a": {"$ref": "#/$defs/more/$defs/T"}}, "$defs": {"more": {"$defs": {"T": TEXT}}}},
        {"properties": {"a": {"$ref": "#/$defs/a~1b%20c"}}, "$defs": {"a/b c": TEXT}},
        {"properties": {"a": {"$ref": "#name"}}, "$defs": {"T": {"$anchor": "name", **TEXT}}},
        {"properties": {"a": {"$dynamicRef": "#name"}}, "$defs": {"T": {"$dynamicAnchor": "name", **TEXT}}},
        {"properties": {"a": {"$ref": "#old"}}, "definitions": {"T": {"$id": "#old", **TEXT}}},
        {"$id": "http://x/y", "properties": {"a": {"$ref": "http://x/y#/$defs/T"}}, "$defs": {"T": TEXT}},
        {"$id": "http://x/y", "properties": {"a": {"$ref": "z"}}, "$defs": {"T": {"$id": "z", **TEXT}}},
        {
            "properties": {"a": {"$id": "inner", "$ref": "#/$defs/T", "$defs": {"T": TEXT}}},
            "$defs": {"T": NUMBER},
        },
    ],
)
def test_a_reference_of_any_form_names_what_it_names_in_its_own_schema(schema: dict[str, Any]) -> None:
    found = held(schema)
    ((name, definition),) = found["$defs"].items()
    assert found["properties"]["a"] == {"$ref": f"#/$defs/{name}"} and definition["type"] == "string"
    assert not {"$id", "$anchor", "definitions"} & (set(found) | set(definition))


def test_the_root_is_what_it_was_before_it_was_joined() -> None:
    joined = JoinedSchemas()
    tree = {"properties": {"v": NUMBER, "children": {"type": "array", "items": {"$ref": "#"}}}}
    range_ = {"properties": {"start": TEXT, "end": {"$ref": "#/properties/start"}}}
    first, second = joined.add(tree, "tools[0]"), joined.add(range_, "tools[1]")
    whole = joined.whole({"anyOf": [first, second]})
    assert first["properties"]["children"]["items"] == {"$ref": "#/$defs/root"} and whole["$defs"]["root"] == first
    assert second["properties"]["end"] == {"$ref": "#/$defs/start"} and whole["$defs"]["start"] == TEXT


def test_equal_names_of_two_schemas_stay_apart() -> None:
    joined = JoinedSchemas()
    kinds = [joined.add({"$ref": "#/$defs/A", "$defs": {"A": kind}}, "s") for kind in (TEXT, NUMBER)]
    assert [joined.definitions[one["$ref"].rpartition("/")[2]] for one in kinds] == [TEXT, NUMBER]


@pytest.mark.parametrize("definitions", ["$defs", "definitions"])
def test_a_models_schema_under_a_property_keeps_its_own_definitions(definitions: str) -> None:
    """As `{"properties": {"user": User.model_json_schema()}}` has it: its references begin at its own root."""

    def model(kind: Any) -> dict[str, Any]:
        inner = {"A": {"properties": {"b": {"$ref": f"#/{definitions}/B"}}}, "B": kind}
        return {"properties": {"a": {"$ref": f"#/{definitions}/A"}}, definitions: inner}

    joined = JoinedSchemas()
    found = joined.add({"properties": {"x": model(TEXT), "list": {"items": model(NUMBER)}}}, "tools[0]")
    for place, kind in ((found["properties"]["x"], TEXT), (found["properties"]["list"]["items"], NUMBER)):
        of_a = joined.definitions[place["properties"]["a"]["$ref"].rpartition("/")[2]]
        assert joined.definitions[of_a["properties"]["b"]["$ref"].rpartition("/")[2]] == kind
    root_wins = {**model(TEXT), "properties": {"x": model(TEXT)}, definitions: {"A": NUMBER}}
    joined = JoinedSchemas()
    found = joined.add(root_wins, "tools[0]")["properties"]["x"]["properties"]["a"]
    assert joined.definitions[found["$ref"].rpartition("/")[2]] == NUMBER


@pytest.mark.parametrize("ref", ["#/$defs/nowhere", "http://elsewhere/x", "#gone", "#/properties/a/9", 5])
def test_a_reference_to_nothing_is_refused_by_its_place(ref: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": ref}}}
    with pytest.raises(SchemaError, match=r"^s\.properties\.a\.\$ref=") as error:
        held(schema)
    assert error.value.place == "s.properties.a.$ref"
    joined = JoinedSchemas()
    assert joined.add(schema, "s", mends=True) == closed(a={}) and joined.dropped == ["s.properties.a.$ref"]


def test_references_that_only_lead_to_each_other_are_refused() -> None:
    for schema in (
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#"}}},
        {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"allOf": [TEXT, {"$ref": "#/$defs/a"}]}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"allOf": [{"$ref": "#/$defs/b"}]}]}, "b": {"$ref": "#"}}},
    ):
        with pytest.raises(SchemaError, match="leads back to itself"):
            held(schema)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": TEXT}}, closed(a=TEXT)),
        ({"properties": {}}, closed()),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {"a": {"properties": {"b": TEXT}}}}, closed(a=closed(b=TEXT))),
        ({"type": ["object", "null"], "properties": {"a": TEXT}}, {**closed(a=TEXT), "type": ["object", "null"]}),
        (
            {"properties": {"a": TEXT}, "additionalProperties": True},
            {"properties": {"a": TEXT}, "additionalProperties": True},
        ),
        (
            {"properties": {"a": TEXT}, "unevaluatedProperties": True},
            {"properties": {"a": TEXT}, "additionalProperties": True},
        ),
        ({"properties": {"a": TEXT}, "unevaluatedProperties": False}, closed(a=TEXT)),
        (
            {"properties": {"a": TEXT}, "patternProperties": {"^x": TEXT}},
            {"properties": {"a": TEXT}, "patternProperties": {"^x": TEXT}},
        ),
        ({"anyOf": [{"properties": {"a": TEXT}}, {"type": "null"}]}, {"anyOf": [closed(a=TEXT), {"type": "null"}]}),
        ({"items": {"properties": {"a": TEXT}}}, {"items": closed(a=TEXT)}),
    ],
)
def test_an_object_with_properties_is_closed_unless_it_says_otherwise(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert held(schema) == expected and held(held(schema)) == expected


def test_a_property_that_is_required_and_not_declared_may_be_anything() -> None:
    assert held({"properties": {"a": TEXT}, "required": ["a", "b"]})["properties"] == {"a": TEXT, "b": True}


def test_what_stands_beside_a_recursive_reference_is_left_out_and_named() -> None:
    node = {"properties": {"next": {"$ref": "#", "description": "d", "type": "object", "minProperties": 1}}}
    found, dropped = written(node, RULES, "s")
    assert found["properties"]["next"] == {"$ref": "#/$defs/root", "description": "d"}
    assert dropped == ["s.properties.next.minProperties"]
    plain = {"properties": {"a": {"$ref": "#/$defs/T", "maxLength": 3}}, "$defs": {"T": TEXT}}
    assert held(plain)["properties"]["a"] == {"$ref": "#/$defs/T", "maxLength": 3}


def test_patterns_of_names_that_do_not_go_together_leave_names_free() -> None:
    schema = {"type": "object", "patternProperties": {"^a": TEXT, ".*": NUMBER}, "additionalProperties": False}
    rules = SchemaRules(lambda keyword, value: keyword == "patternProperties")
    expected = {"type": "object", "patternProperties": {}, "additionalProperties": True}
    assert written(schema, rules, "s") == (expected, ["s.patternProperties"])


def test_a_setting_leaves_objects_open() -> None:
    schema = {"properties": {"a": TEXT}}
    assert held(schema, SchemaRules(opens_objects=True)) == schema


def test_an_object_that_several_schemas_describe_is_closed_around_all_of_them() -> None:
    base, more = {"properties": {"a": TEXT}, "required": ["a"]}, {"properties": {"b": NUMBER}}
    found = held({"allOf": [{"$ref": "#/$defs/Base"}, more], "$defs": {"Base": base}})
    assert found["properties"] == {"a": True, "b": True} and found["additionalProperties"] is False
    assert found["allOf"] == [{"$ref": "#/$defs/Base"}, more] and found["$defs"]["Base"] == base
    plain = held(
        {"properties": {"x": {"$ref": "#/$defs/Base"}}, "allOf": [{"$ref": "#/$defs/Base"}], "$defs": {"Base": base}}
    )
    both = [plain["$defs"][one["$ref"].rpartition("/")[2]] for one in (plain["properties"]["x"], plain["allOf"][0])]
    assert both == [{**closed(a=TEXT), "required": ["a"]}, base]
    assert held({"allOf": [{**base, "additionalProperties": True}, more]}) == {
        "allOf": [{**base, "additionalProperties": True}, more]
    }


def test_a_test_of_a_value_closes_nothing() -> None:
    schema = {"not": {"properties": {"a": {"properties": {"b": TEXT}}}}}
    assert held(schema, SchemaRules()) == schema


@pytest.mark.parametrize(
    ("keyword", "value", "rest"),
    [
        ("uniqueItems", True, {}),
        ("propertyNames", TEXT, {}),
        ("pattern", r"^(?!\.)a", {}),
        ("format", "password", {}),
        ("not", {"const": 1}, {}),
        ("contains", TEXT, {}),
        ("dependentRequired", {"a": ["b"]}, {}),
        ("oneOf", [{"minLength": 1}, {"maxLength": 3}], {"anyOf": [{"minLength": 1}, {"maxLength": 3}]}),
    ],
)
def test_what_cannot_be_held_is_left_out_and_named(keyword: str, value: Any, rest: dict[str, Any]) -> None:
    schema = closed(a={"title": "A", keyword: value}, b=TEXT)
    assert held(schema) == closed(a={"title": "A", **rest}, b=TEXT)
    assert left_out(schema) == [f"properties.a.{keyword}"]
    assert left_out({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {keyword: value}}}) == [
        f"$defs.A.{keyword}"
    ]


def test_what_would_change_nothing_is_left_out_without_a_word() -> None:
    assert written({"uniqueItems": False}, RULES, "s") == ({}, [])


def test_a_strict_schema_may_narrow_single_values_but_not_relate_them() -> None:
    narrowed = closed(a={"uniqueItems": True, "format": "path", "pattern": "(?=a)", "propertyNames": TEXT})
    assert len(left_out(narrowed, strict=True)) == 4
    for keyword, value in (("not", TEXT), ("if", TEXT), ("contains", TEXT), ("dependentRequired", {"a": ["b"]})):
        with pytest.raises(
            SchemaError, match="cannot be held by this server's grammars; leave it out, or leave strict out"
        ):
            held(closed(a={keyword: value}), strict=True)


@pytest.mark.parametrize(
    "branches",
    [
        [TEXT, NUMBER],
        [{"const": 1}, {"const": 2}],
        [{"enum": ["a"]}, {"enum": ["b", "c"]}],
        [closed(k={"const": "a"}) | {"required": ["k"]}, closed(k={"const": "b"}) | {"required": ["k"]}],
    ],
)
def test_one_of_branches_that_exclude_each_other_is_any_of_them(branches: list[Any]) -> None:
    assert written({"oneOf": branches}, RULES, "s") == ({"anyOf": branches}, [])
    both = held({"oneOf": branches, "anyOf": [TEXT]})
    assert both == {"anyOf": [TEXT], "allOf": [{"anyOf": branches}]}


def test_a_name_s_pattern_that_cannot_be_held_leaves_the_name_free() -> None:
    schema = {"type": "object", "patternProperties": {"^(?=a)": NUMBER, "^b": TEXT}, "additionalProperties": False}
    expected = {"type": "object", "patternProperties": {"^b": TEXT}, "additionalProperties": NUMBER}
    assert written(schema, RULES, "s") == (expected, ["s.patternProperties"])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "any"}, "type"),
        ({"properties": []}, "properties"),
        ({"required": "a"}, "required"),
        ({"enum": []}, "enum"),
        ({"anyOf": []}, "anyOf"),
        ({"items": 5}, "items"),
        ({"minLength": -1}, "minLength"),
        ({"minimum": "3"}, "minimum"),
        ({"minItems": 3, "maxItems": 2}, "minItems"),
        ({"pattern": 5}, "pattern"),
    ],
)
def test_a_keyword_that_json_schema_does_not_know_is_refused_or_where_told_left_out(
    schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(SchemaError, match=rf"^s\.{place}="):
        held(schema)
    joined = JoinedSchemas()
    joined.add(schema, "s", mends=True)
    assert joined.dropped == [f"s.{place}"]
    with pytest.raises(SchemaError):
        JoinedSchemas().add(schema, "s", mends=True, strict=True)


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("anyOf", [{}, "string"], "s.anyOf.1='string' must be a schema"),
        ("required", ["a", None], "s.required.1=None must be a text"),
        ("patternProperties", {"^x$": {}, "y": 7}, "s.patternProperties.y=7 must be a schema"),
        ("allOf", [], "s.allOf=[] must be a list with a schema in it"),
    ],
)
def test_of_schemas_and_names_the_malformed_one_is_named(keyword: str, value: Any, message: str) -> None:
    with pytest.raises(SchemaError) as error:
        held({"type": "object", keyword: value})
    assert str(error.value) == message


@pytest.mark.parametrize("odd", ["string", None, ["integer"], 5])
def test_of_properties_the_malformed_one_alone_is_left_out(odd: Any) -> None:
    schema = {"type": "object", "properties": {"a": odd, "b": NUMBER}, "required": ["b"]}
    joined = JoinedSchemas()
    assert joined.add(schema, "s", mends=True) == {**closed(a=True, b=NUMBER), "required": ["b"]}
    assert joined.dropped == ["s.properties.a"]
    with pytest.raises(SchemaError, match=r"^s\.properties\.a=.* must be a schema$"):
        held(schema)


@pytest.mark.parametrize(
    ("schema", "expected", "left_out"),
    [
        ({"type": "string", "const": 5}, {"const": 5}, ["s.type"]),
        ({"type": ["object", "array"], "enum": ["a", 1.5, None]}, {"enum": ["a", 1.5, None]}, ["s.type"]),
        ({"type": "integer", "const": True}, {"const": True}, ["s.type"]),
        ({"type": "integer", "enum": ["a", 2.0]}, {"type": "integer", "enum": ["a", 2.0]}, []),
        ({"type": "number", "const": 1}, {"type": "number", "const": 1}, []),
        ({**closed(a=TEXT), "required": ["a", "b"]}, {**closed(a=TEXT), "required": ["a"]}, ["s.required"]),
        ({**closed(a=False), "required": ["a"]}, {**closed(a=False), "required": []}, ["s.required"]),
        (
            {"additionalProperties": False, "patternProperties": {"^b": TEXT}, "required": ["b"]},
            {"additionalProperties": False, "patternProperties": {"^b": TEXT}, "required": ["b"]},
            [],
        ),
    ],
)
def test_a_tool_s_schema_that_contradicts_itself_is_mended_unless_it_is_strict(
    schema: dict[str, Any], expected: dict[str, Any], left_out: list[str]
) -> None:
    joined = JoinedSchemas()
    assert joined.add(schema, "s", mends=True) == expected and joined.dropped == left_out
    for further in ({}, {"mends": True, "strict": True}):
        joined = JoinedSchemas()
        assert joined.add(schema, "s", **further) == schema and not joined.dropped


def test_earlier_drafts_mean_what_they_meant() -> None:
    tuple_ = {"type": "array", "items": [TEXT, NUMBER], "additionalItems": False}
    assert held(tuple_) == {"type": "array", "prefixItems": [TEXT, NUMBER], "items": False}
    assert held({"minimum": 3, "exclusiveMinimum": True}) == {"exclusiveMinimum": 3}
    assert held({"maxLength": 5.0, "required": None}) == {"maxLength": 5}


def test_what_references_unfold_to_has_a_bound() -> None:
    many = {f"p{number}": TEXT for number in range(2000)}
    parts = [{"allOf": [{"$ref": "#/$defs/many"}, {}]} for _ in range(2000)]
    with pytest.raises(SchemaError, match=f"more than {MAX_SCHEMA_VALUES} values"):
        held({"prefixItems": parts, "$defs": {"many": {"properties": many}}})
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(70):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="s is nested deeper than 64 levels") as error:
        held(deep)
    assert error.value.place == "s", "an answer names the field of the request"


def test_a_keyword_that_json_schema_does_not_know_says_nothing() -> None:
    schema = {"x-own": 1, "nullable": True, "discriminator": {"propertyName": "k"}}
    assert written(schema, SchemaRules(lambda keyword, value: True), "s") == (schema, [])


def test_only_so_many_patterns_are_tried() -> None:
    asked = []
    schema = {"prefixItems": [{"pattern": f"a{number}"} for number in range(MAX_TRIED + 2)]}
    _, dropped = written(schema, SchemaRules(lambda keyword, value: bool(asked.append(value))), "s")
    assert len(asked) == MAX_TRIED and dropped == ["s.prefixItems.256.pattern", "s.prefixItems.257.pattern"]


def test_schemas_of_structural_tags_are_written_too() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {**TEXT, "format": "path"}}}
    expected = {**closed(a={"$ref": "#/$defs/A"}), "$defs": {"A": TEXT}}
    old = StructuredOutputs(
        structural_tag={"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": "<"}
    )
    found, dropped = as_held(old, RULES, "s")
    assert json.loads(found.value)["structures"][0]["schema"] == expected
    assert dropped == ["s.structures[0].schema.$defs.A.format"]
    element = {"type": "json_schema", "json_schema": schema}
    new = StructuredOutputs(
        structural_tag={"format": {"type": "or", "elements": [{"type": "tag", "content": element}]}}
    )
    found, _ = as_held(new, RULES, "s")
    assert json.loads(found.value)["format"]["elements"][0]["content"]["json_schema"] == expected


def counts_only_what_must_be_there(keyword: str, value: Any) -> bool:
    counted = isinstance(value, dict) and {"minProperties", "maxProperties"} & set(value)
    return keyword == "properties" and bool(counted) and set(value["properties"]) != set(value["required"])


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"properties": {"a": TEXT, "b": TEXT}, "maxProperties": 1}, ["maxProperties"]),
        ({"properties": {"a": TEXT}, "minProperties": 1, "maxProperties": 3}, ["maxProperties", "minProperties"]),
        ({"properties": {"a": TEXT}, "required": ["a"], "minProperties": 1}, []),
        ({"allOf": [{"properties": {"a": TEXT}}, {"minProperties": 1}]}, ["allOf.1.minProperties"]),
        ({"properties": {"a": TEXT}, "anyOf": [{"minProperties": 1}, {"type": "null"}]}, ["anyOf.0.minProperties"]),
        ({"minProperties": 1, "$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": TEXT}}}}, ["minProperties"]),
        ({"anyOf": [{"additionalProperties": TEXT, "minProperties": 1}, {"type": "null"}]}, []),
        ({"properties": {str(one): TEXT for one in range(65)}, "maxProperties": 1}, ["maxProperties"]),
    ],
)
def test_a_number_of_properties_that_cannot_be_counted_is_left_out_and_named(
    schema: dict[str, Any], places: list[str]
) -> None:
    found, dropped = written(schema, SchemaRules(counts_only_what_must_be_there), "s", strict=True)
    assert dropped == [f"s.{place}" for place in places]
    assert ("Properties" in json.dumps(found).replace("additionalProperties", "")) == (not places)
