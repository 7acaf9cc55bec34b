"""Rewrites JSON schemas into the form that grammar back ends support, whatever dialect a client wrote them in.

References are resolved within the schema that contains them and become `#/$defs/NAME`, so that schemas can be joined.
Objects with properties are closed unless the schema says otherwise. Keywords that a back end does not support are left
out, and their places are reported.

The resulting grammar may allow fewer values than the schema does. It allows other values only where a keyword was left
out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from hookline.core.errors import RequestError, shown
from hookline.core.structured_outputs import MAX_SCHEMA_VALUES, StructuredOutputs, check_tree

MAX_STEPS = 4 * MAX_SCHEMA_VALUES
"""Most steps of the searches through a schema's parts and references; a schema may be referred to many times."""
MAX_COUNT = 2**31 - 1
"""Largest length or number of items or properties."""
MAX_TRIED = 256
"""Most patterns and formats of a schema that are tried, each counted once; further ones are left out. A trial takes up
to 1 ms."""
MAX_COUNTED = 64
"""Most properties of an object with `minProperties` or `maxProperties`; asking a back end takes longer with each."""
_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_LISTS, _MAPPINGS = ("allOf", "anyOf", "oneOf", "prefixItems"), ("properties", "patternProperties")
_VALUES = ("items", "additionalProperties", "unevaluatedItems")
_TAGS = ("structures", "format", "tags", "elements", "content")
"""Keys of structural tags that may contain further tags."""
_CONDITIONS = ("not", "if", "then", "else", "contains", "propertyNames")
"""Keywords whose schemas test a value. If objects in them were closed, the test would change and further values would
pass."""
_IN_PLACE = ("allOf", "anyOf", "oneOf", *_REFERENCES)
"""Keywords whose schemas apply to the same value as the schema that they stand in."""
_SAYS_OTHERWISE = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties"))
_NAMES = frozenset(
    "$id id $anchor $dynamicAnchor $recursiveAnchor $schema $vocabulary $comment $defs definitions".split()
)
"""Keywords that serve references only and do not constrain a value."""
_DEFINITIONS = ("$defs", "definitions")
_DATA = frozenset(("enum", "const", "default", "examples"))
_RELATIONS = frozenset(
    "not if then else contains minContains maxContains dependentRequired dependentSchemas dependencies "
    "unevaluatedItems unevaluatedProperties".split()
)
"""Keywords that a strict schema must not have if the back end does not support them; other servers' strict modes refuse
them as well. The remaining unsupported keywords narrow a single value (`format`, `pattern`, `uniqueItems`,
`propertyNames`). Clients that ask for strict schemas, such as pydantic's, send those and check the values
themselves."""
_ASKED = _RELATIONS - {"unevaluatedProperties"} | frozenset(
    "type enum const multipleOf minimum maximum exclusiveMinimum exclusiveMaximum minLength maxLength pattern format "
    "minItems maxItems uniqueItems minProperties maxProperties propertyNames required contentEncoding "
    "contentMediaType contentSchema".split()
)
"""Keywords whose support a back end is asked about. All others are supported, or do not constrain a value."""
_CONSTRAINTS = _ASKED | frozenset((*_LISTS, *_MAPPINGS, *_VALUES))
_NOT_HELD = "cannot be held by this server's grammars"
_LIMITS = ("Length", "Items", "Properties")
_ORDERS = (("minimum", "maximum"), *((f"min{one}", f"max{one}") for one in _LIMITS))


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= MAX_COUNT and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _are_types(value: Any) -> bool:
    given = value if isinstance(value, list) else [value]
    return bool(given) and all(isinstance(one, str) and one in _TYPES for one in given)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_are_types, f"one of {', '.join(sorted(_TYPES))}, or a list of them"),
    "required": (_are_texts, "a list of names"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list with a value in it"),
    "items": (lambda value: _is_schema(value) or _are_schemas(value), "a schema"),
    "exclusiveMinimum": (lambda value: _is_number(value) or isinstance(value, bool), "a number"),
    "exclusiveMaximum": (lambda value: _is_number(value) or isinstance(value, bool), "a number"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "a number")),
    **dict.fromkeys(("pattern", "format", *_REFERENCES), (_is_text, "a text")),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "unevaluatedItems"), (_is_schema, "a schema")),
    **dict.fromkeys(_MAPPINGS, (_are_named_schemas, "a mapping of names to schemas")),
    **dict.fromkeys(_LISTS, (_are_schemas, "a list with a schema in it")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, f"a whole number from 0 to {MAX_COUNT}"),
    ),
}
"""Keyword -> the check of its value, and the words of the error if the check fails."""


@dataclass(frozen=True)
class SchemaRules:
    """How schemas are adapted to a back end.

    cannot_hold: see GrammarBackend. opens_objects: leave objects open that do not say whether they may have further
    properties.
    """

    cannot_hold: Callable[[str, Any], bool] = lambda keyword, value: False
    opens_objects: bool = False


class SchemaError(RequestError):
    """A schema that cannot be adapted. place: of the keyword, as in `tools[0].function.parameters.type`."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"{place}{message}")
        self.place = place


@dataclass
class JoinedSchemas:
    """Schemas that will be parts of one schema, and share its definitions.

    definitions: the schemas that their references name, for the root's $defs. dropped: places of the keywords that were
    left out.
    """

    rules: SchemaRules = SchemaRules()
    definitions: dict[str, Any] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    num_values: int = 0
    tried: set[str] = field(default_factory=set)
    num_steps: int = 0

    def add(self, schema: Any, place: str, *, strict: bool = False, mends: bool = False) -> Any:
        """Adapt a schema; its definitions go to `definitions`.

        strict: refuse keywords that the back end does not support, except those that narrow a single value. mends:
        leave out keywords with invalid values, such as {"type": "any"}, in place of an error.
        Raises: SchemaError naming the place, the value and the fix.
        """
        if not isinstance(schema, Mapping):
            if isinstance(schema, bool):
                return schema
            raise SchemaError(place, f"={shown(schema)} is not a JSON schema")
        try:
            check_tree(place, schema)
        except RequestError as error:
            raise SchemaError(place, str(error).removeprefix(place)) from None
        return _Document(self, schema, place, strict, mends).written()

    def leave_out(self, keyword: str, value: Any, place: str, why: str, *, strict: bool) -> None:
        """Report that a keyword is left out.

        Raises: SchemaError if `strict`.
        """
        place = f"{place}.{keyword}" if keyword else place
        if strict:
            raise SchemaError(place, f"={shown(value)} {why}")
        if place not in self.dropped:
            self.dropped.append(place)

    def whole(self, schema: Any) -> Any:
        """The schema as a root: with the definitions of all schemas that were added."""
        return {**schema, "$defs": self.definitions} if self.definitions else schema


def as_held(
    wanted: StructuredOutputs, rules: SchemaRules, place: str, *, strict: bool = False
) -> tuple[StructuredOutputs, list[str]]:
    """Adapt the schemas in structured outputs; returns these and the places of the keywords that were left out.

    place: of the structured outputs' value in the request.
    Raises: as JoinedSchemas.add.
    """
    if wanted.kind not in ("json", "structural_tag"):
        return wanted, []
    value, dropped = json.loads(wanted.value), list[str]()
    if wanted.kind == "json":
        value, dropped = written(value, rules, place, strict=strict)
    else:
        for holder, key, where in _schemas_of_tags(value, place):
            holder[key], left_out = written(holder[key], rules, where, strict=strict)
            dropped += left_out
    return replace(wanted, **{wanted.kind: value}), dropped


def _schemas_of_tags(tags: Any, place: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each schema of structural tags, as the mapping that contains it, its key there, and its place."""
    waiting = [(tags, place)]
    while waiting:
        node, place = waiting.pop()
        if isinstance(node, list):
            waiting += [(one, f"{place}[{number}]") for number, one in enumerate(node)]
        elif isinstance(node, dict):
            for key in ("schema", "json_schema"):
                if isinstance(node.get(key), dict):
                    yield node, key, f"{place}.{key}"
            waiting += [(node[key], f"{place}.{key}") for key in _TAGS if isinstance(node.get(key), dict | list)]


def written(schema: Any, rules: SchemaRules, place: str, *, strict: bool = False) -> tuple[Any, list[str]]:
    """Adapt a single schema; returns it and the places of the keywords that were left out.

    Raises: as JoinedSchemas.add.
    """
    joined = JoinedSchemas(rules)
    return joined.whole(joined.add(schema, place, strict=strict)), joined.dropped


class _Objects(Enum):
    """Whether an object schema forbids properties that it does not name."""

    CLOSED = auto()
    IN_PLACE = auto()
    """It stands in a keyword such as `allOf`; the schema around it decides for the whole object."""
    OPEN = auto()
    """Neither this schema nor any schema inside it forbids them."""


@dataclass(frozen=True)
class _Spot:
    """A schema's place in the request, and whether its objects are closed."""

    place: str
    objects: _Objects = _Objects.CLOSED

    def under(self, *keys: str | int, objects: _Objects = _Objects.CLOSED) -> _Spot:
        objects = _Objects.OPEN if self.objects is _Objects.OPEN else objects
        return _Spot(".".join((self.place, *map(_segment, keys))), objects)


def _segment(key: str | int) -> str:
    return str(key) if re.fullmatch(r"[\w.$-]{1,64}", str(key), re.ASCII) else "?"


class _Document:
    """One root schema, and everything that its references can reach."""

    def __init__(self, joined: JoinedSchemas, root: Mapping[str, Any], place: str, strict: bool, mends: bool) -> None:
        self._joined, self._root, self._place = joined, root, place
        self._strict, self._mends = strict, mends
        self._bases: dict[int, str] = {}
        """id() of each mapping -> the base URI of references in it."""
        self._embedded: dict[int, Mapping[str, Any]] = {}
        """id() of each mapping -> the innermost schema around it, below the root, that has definitions of its own."""
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: dict[str, Any] = {}
        self._targets: dict[tuple[str, str, str, int], Any] = {}
        self._names: dict[tuple[int, _Objects], str] = {}
        self._waiting: list[tuple[Any, str, _Spot]] = []
        self._index(root)

    def written(self) -> Any:
        """The adapted root; every schema that it refers to is among the definitions by then."""
        found = self._schema(self._root, _Spot(self._place))
        while self._waiting:
            target, name, spot = self._waiting.pop()
            self._joined.definitions[name] = self._schema(target, spot)
        return found

    def _index(self, root: Any) -> None:
        """Collect the ids and anchors that references may use."""
        waiting: list[tuple[Any, str, Any]] = [(root, "", None)]
        while waiting:
            node, base, embedded = waiting.pop()
            if isinstance(node, list):
                waiting += [(one, base, embedded) for one in reversed(node)]
                continue
            if not isinstance(node, Mapping):
                continue
            if node is not root and not node.keys().isdisjoint(_DEFINITIONS):
                embedded = node
            if embedded is not None:
                self._embedded[id(node)] = embedded
            id_ = node.get("$id", node.get("id"))
            if isinstance(id_, str):
                base = _joined_uri(base, id_.rstrip("#"))
                self._resources.setdefault(base, node)
            self._bases[id(node)] = base
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := node.get(keyword), str):
                    self._anchors.setdefault((base, name), node)
                    if keyword == "$dynamicAnchor":
                        self._dynamic.setdefault(name, node)
            if isinstance(id_, str) and id_.startswith("#"):  # how drafts before 2019-09 write $anchor
                self._anchors.setdefault((base, id_[1:]), node)
            waiting += [(value, base, embedded) for key, value in reversed(list(node.items())) if key not in _DATA]

    # ------------------------------------------------------------------------------------------------------ references

    def _target(self, keyword: str, ref: str, holder: Mapping[str, Any]) -> Any:
        """The schema that a reference names; None if it is not in this document.

        A schema that was written as a root and put into another one, as programs put a model's schema under a property,
        still names its own definitions as a root does: these count where the root has none of the name.
        """
        base, embedded = self._bases.get(id(holder), ""), self._embedded.get(id(holder))
        key = keyword, base, ref, id(embedded)
        if key not in self._targets:
            found = self._found(keyword, base, ref)
            if found is None and ref.startswith(tuple(f"#/{one}/" for one in _DEFINITIONS)):
                found = _at(embedded, unquote(ref[1:]))
            self._targets[key] = found
        return self._targets[key]

    def _found(self, keyword: str, base: str, ref: str) -> Any:
        uri, fragment = urldefrag(ref)
        uri, fragment = _joined_uri(base, uri) if uri else base, unquote(fragment)
        resource = self._resources.get(uri)
        if keyword == "$dynamicRef" and fragment in self._dynamic and (uri, fragment) in self._anchors:
            return self._dynamic[fragment]
        if resource is None or not fragment:
            return resource
        return _at(resource, fragment) if fragment.startswith("/") else self._anchors.get((uri, fragment))

    def _references(self, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for keyword in _REFERENCES:
            if isinstance(ref := node.get(keyword), str):
                yield keyword, self._target(keyword, ref, node)

    def _name(self, target: Any, ref: str, spot: _Spot) -> str:
        """The name of a definition. The definition is adapted later, once for each way of closing its objects."""
        key = id(target), spot.objects
        if key not in self._names:
            stem = re.sub(r"\W+", "_", ref.rpartition("/")[2].strip("#"), flags=re.ASCII) or "root"
            name, number = stem, len(self._joined.definitions)
            while name in self._joined.definitions:
                number += 1
                name = f"{stem}_{number}"
            self._names[key], self._joined.definitions[name] = name, None
            self._waiting.append((target, name, self._spot_of(ref, spot.objects)))
        return self._names[key]

    def _spot_of(self, ref: str, objects: _Objects) -> _Spot:
        keys = unquote(ref[1:]).split("/")[1:] if ref.startswith("#/") else [ref] * (ref != "#")
        return _Spot(self._place).under(*keys, objects=objects) if keys else _Spot(self._place, objects)

    def _is_circular(self, target: Any) -> bool:
        """Whether references lead from one to the next without an end, also through `allOf`: all of them apply."""
        above: set[int] = set()
        done: set[int] = set()
        waiting = [(target, False)]
        while waiting:
            node, is_left = waiting.pop()
            if is_left:
                above.discard(id(node))
                done.add(id(node))
            elif isinstance(node, Mapping) and id(node) not in done:
                if id(node) in above:
                    return True
                above.add(id(node))
                self._count(num_steps=1)
                parts = node.get("allOf")
                further = [*(named for _, named in self._references(node)), *(parts if isinstance(parts, list) else ())]
                self._count(num_steps=len(further))
                waiting += [(node, True), *((one, False) for one in further)]
        return False

    # --------------------------------------------------------------------------------------------------------- schemas

    def _schema(self, node: Any, spot: _Spot) -> Any:
        self._count(len(node) + 1 if isinstance(node, Mapping) else 1)
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            self._drop("", node, spot.place, "is not a JSON schema", malformed=True)
            return True
        given = self._well_formed(node, spot)
        closed = self._closed(given, node, spot)
        # A schema that only chooses between others, or refers to another, has no object of its own to close.
        inner = spot.objects if closed is None else _Objects.IN_PLACE
        self._leave_out_siblings(given, node, spot)
        found: dict[str, Any] = {}
        further: list[Any] = []
        for keyword, value in given.items():
            if keyword == "oneOf" or (keyword in _REFERENCES and "$ref" in found):
                further.append(self._in_place(keyword, value, node, spot, inner))
            elif keyword in _IN_PLACE:
                found |= self._in_place(keyword, value, node, spot, inner)
            elif keyword not in _NAMES:
                found[keyword] = self._within(keyword, value, spot)
        if len(further) == 1 and found.keys().isdisjoint(further[0]):
            found |= further.pop()
        if further:
            found["allOf"] = [*found.get("allOf", []), *further]
        if closed:
            others = {
                name: True for name in self._property_names(node, set()) if name not in found.get("properties", {})
            }
            self._count(len(others))
            found |= {"properties": {**found.get("properties", {}), **others}, "additionalProperties": False}
            if "properties" in given and not {"enum", "const"} & set(given):
                found.setdefault("type", "object")
        self._leave_out_counts(found, node, spot)
        return found

    def _leave_out_counts(self, found: dict[str, Any], node: Mapping[str, Any], spot: _Spot) -> None:
        """Leave out how many properties an object has, if the back end cannot count those that it may lack."""
        counts = [keyword for keyword in ("maxProperties", "minProperties") if keyword in found]
        if not counts or spot.objects is _Objects.OPEN:
            return
        names = dict.fromkeys(self._property_names(node, set()), True)
        if spot.objects is _Objects.IN_PLACE:  # the schema around it has properties of its own
            names[""] = True
        object_: dict[str, Any] = {"type": "object", "properties": names, "required": found.get("required", [])}
        if found.get("additionalProperties") is False:
            object_["additionalProperties"] = False
        for keyword in counts if names else ():
            asked = object_ | {one: found[one] for one in counts if one in found}
            if len(names) <= MAX_COUNTED and not self._joined.rules.cannot_hold("properties", asked):
                return
            self._drop(keyword, found.pop(keyword), spot.place, f"with properties that may be left out {_NOT_HELD}")

    def _leave_out_siblings(self, given: dict[str, Any], node: Mapping[str, Any], spot: _Spot) -> None:
        """Leave out the constraints beside a reference to a recursive schema, because no back end can merge the two."""
        beside = [keyword for keyword in given if keyword in _CONSTRAINTS]
        target = next((found for keyword, found in self._references(node) if keyword in given), None)
        if beside and target is not None and self._is_recursive(target):
            for keyword in beside:
                value = given.pop(keyword)
                if keyword != "type" or value != _type_of(target):
                    self._drop(keyword, value, spot.place, f"beside a reference that is recursive {_NOT_HELD}")

    def _is_recursive(self, target: Any) -> bool:
        """Whether a schema's references lead back to it."""
        seen: set[int] = set()
        waiting = [target]
        while waiting:
            node = waiting.pop()
            self._count(num_steps=1)
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, Mapping) and id(node) not in seen:
                seen.add(id(node))
                for _, named in self._references(node):
                    if named is target:
                        return True
                    waiting.append(named)
                waiting += [value for keyword, value in node.items() if keyword not in _DATA]
        return False

    def _count(self, num_values: int = 0, num_steps: int = 0) -> None:
        joined = self._joined
        joined.num_values, joined.num_steps = joined.num_values + num_values, joined.num_steps + num_steps
        if joined.num_values > MAX_SCHEMA_VALUES or joined.num_steps > MAX_STEPS:
            limit = f"more than {MAX_SCHEMA_VALUES} values, which is the most it may have"
            raise SchemaError(self._place, f" has, with all that its references name, {limit}")

    def _in_place(
        self, keyword: str, value: Any, node: Mapping[str, Any], spot: _Spot, objects: _Objects
    ) -> dict[str, Any]:
        """Adapt a keyword whose schemas apply to the same value as the schema that it stands in."""
        if keyword in _REFERENCES:
            target = self._target(keyword, value, node)
            return {"$ref": f"#/$defs/{self._name(target, value, spot.under(keyword, objects=objects))}"}
        if keyword == "oneOf" and not self._exclude_each_other(value):
            self._drop(keyword, value, spot.place, "has branches that may overlap; it is held as anyOf")
        branches = [self._schema(one, spot.under(keyword, place, objects=objects)) for place, one in enumerate(value)]
        return {"anyOf" if keyword == "oneOf" else keyword: branches}

    def _within(self, keyword: str, value: Any, spot: _Spot) -> Any:
        """The value of a keyword, with the schemas in it."""
        if keyword in _MAPPINGS:
            return {name: self._schema(one, spot.under(keyword, name)) for name, one in value.items()}
        if keyword == "prefixItems":
            return [self._schema(one, spot.under(keyword, place)) for place, one in enumerate(value)]
        if keyword in _VALUES:
            return self._schema(value, spot.under(keyword))
        if keyword in _CONDITIONS:
            return self._schema(value, spot.under(keyword, objects=_Objects.OPEN))
        if keyword == "dependentSchemas" and isinstance(value, Mapping):
            one_more = _Objects.IN_PLACE
            return {name: self._schema(one, spot.under(keyword, name, objects=one_more)) for name, one in value.items()}
        return value

    def _exclude_each_other(self, branches: list[Any]) -> bool:
        """Whether no value can fit two of the branches: their types differ, or a required property has other constants
        in each.
        """
        seen = [self._through(one) for one in branches]
        self._count(num_steps=sum(len(_listed(one.get("required"))) + 1 for one in seen))
        types = [_listed(one.get("type")) for one in seen]
        if _are_disjoint([{"number" if type_ == "integer" else type_ for type_ in one} for one in types]):
            return True
        if _are_disjoint([_constants(one) for one in seen]):
            return True
        tags = set.intersection(*(set(_listed(one.get("required"))) for one in seen)) if seen else set()
        for name in tags:
            values = [_constants(self._through(one.get("properties", {}).get(name))) for one in seen]
            if _are_disjoint(values):
                return True
        return False

    def _through(self, node: Any) -> Mapping[str, Any]:
        """The schema itself, or the schema that it is a reference to."""
        for _ in range(8):
            if not isinstance(node, Mapping) or "$ref" not in node or not isinstance(node["$ref"], str):
                break
            node = self._target("$ref", node["$ref"], node)
        return node if isinstance(node, Mapping) else {}

    # --------------------------------------------------------------------------------------------------------- closing

    def _closed(self, given: dict[str, Any], node: Mapping[str, Any], spot: _Spot) -> bool | None:
        """Whether to forbid properties that neither this schema nor its parts name.

        None: the schema consists of other schemas, which decide. Removes `unevaluatedProperties` from `given`.
        """
        parts = [keyword for keyword in _IN_PLACE if keyword in given]
        is_outermost = spot.objects is _Objects.CLOSED
        rest = given.pop("unevaluatedProperties", None)
        if rest is False and is_outermost and _SAYS_OTHERWISE.isdisjoint(given):
            return True
        if rest is not None:
            if not parts:
                given.setdefault("additionalProperties", rest)
            elif rest is not True:
                self._drop("unevaluatedProperties", rest, spot.place, _NOT_HELD)
            return False
        if len(parts) == 1 and "properties" not in given and (parts[0] != "allOf" or len(given["allOf"]) == 1):
            return None
        if not is_outermost or self._joined.rules.opens_objects or self._says_otherwise(node, set()):
            return False
        return "properties" in given or any(True for _ in self._property_names(node, set()))

    def _property_names(self, node: Any, seen: set[int]) -> Iterator[str]:
        """Names of the properties of a schema and of its parts, such as the branches of `anyOf`."""
        if isinstance(node, Mapping) and id(node) not in seen:
            seen.add(id(node))
            properties, required = node.get("properties"), node.get("required")
            yield from properties if isinstance(properties, Mapping) else ()
            if isinstance(required, list):  # a property may be required without being declared
                yield from filter(_is_text, required)
            for part in self._parts(node):
                yield from self._property_names(part, seen)

    def _says_otherwise(self, node: Any, seen: set[int]) -> bool:
        if not isinstance(node, Mapping) or id(node) in seen:
            return False
        seen.add(id(node))
        return not _SAYS_OTHERWISE.isdisjoint(node) or any(self._says_otherwise(one, seen) for one in self._parts(node))

    def _parts(self, node: Mapping[str, Any]) -> Iterator[Any]:
        self._count(num_steps=len(node))
        for keyword in ("allOf", "anyOf", "oneOf"):
            value = node.get(keyword)
            parts = value if isinstance(value, list) else []
            self._count(num_steps=len(parts))
            yield from parts
        for _, target in self._references(node):
            yield target

    # ----------------------------------------------------------------------------------------------- keywords left out

    def _well_formed(self, node: Mapping[str, Any], spot: _Spot) -> dict[str, Any]:
        """The valid and supported keywords of a schema, in the form of JSON Schema 2020-12."""
        found = _modern(node)
        for keyword, value in list(found.items()):
            if (kept := self._kept(keyword, value, node, spot.place)) is None:
                del found[keyword]
            else:
                found[keyword] = kept[0]
        if "patternProperties" in found:
            self._without_patterns(found, spot.place)
        for low, high in _ORDERS:
            if low in found and high in found and found[low] > found[high]:
                self._drop(low, found.pop(low), spot.place, f"is above {high}={found[high]}", malformed=True)
        if self._mends and not self._strict:
            self._mend_contradictions(found, spot.place)
        return found

    def _mend_contradictions(self, found: dict[str, Any], place: str) -> None:
        """Leave out a type that no constant beside it has, and required properties that must not be there: no value
        fits such a schema, and all calls would be refused because of it.
        """
        constants = [found["const"]] if "const" in found else found.get("enum", [])
        if constants and "type" in found and not any(_has_type(one, found["type"]) for one in constants):
            self._drop("type", found.pop("type"), place, "is that of no constant beside it", malformed=True)
        if found.get("additionalProperties") is False and not {*_IN_PLACE, "patternProperties"} & found.keys():
            named = {name: schema for name, schema in found.get("properties", {}).items() if schema is not False}
            if not all(name in named for name in found.get("required", [])):
                self._drop("required", found["required"], place, "has a property that is forbidden", malformed=True)
                found["required"] = [name for name in found["required"] if name in named]

    def _kept(self, keyword: str, value: Any, node: Mapping[str, Any], place: str) -> tuple[Any] | None:
        """The keyword's value in a tuple if the keyword is kept, else None."""
        if keyword in _NAMES:
            return (value,)
        is_formed, form = _FORMS.get(keyword, (None, ""))
        if keyword in _MAPPINGS and isinstance(value, Mapping) and self._mends and not self._strict:
            odd = [name for name, one in value.items() if not _is_schema(one)]
            for name in odd:
                self._drop(name, value[name], f"{place}.{keyword}", "must be a schema", malformed=True)
            value = {**value, **dict.fromkeys(odd, True)}
        if is_formed is not None and not is_formed(value):
            item = None if self._mends and not self._strict else _odd_item(keyword, value)
            if item is not None:
                self._drop(f"{keyword}.{_segment(item[0])}", item[1], place, f"must be {item[2]}", malformed=True)
            self._drop(keyword, value, place, f"must be {form}", malformed=True)
            return None
        if keyword in _REFERENCES:
            target = self._target(keyword, value, node)
            if target is None or self._is_circular(target):
                why = "names nothing in this schema; put it in $defs" if target is None else "leads back to itself"
                self._drop(keyword, value, place, why, malformed=True)
                return None
            return (value,)
        if keyword in _ASKED and self._cannot_hold(keyword, value):
            if not (keyword == "uniqueItems" and value is False):
                self._drop(keyword, value, place, _NOT_HELD)
            return None
        return (int(value) if is_formed is _is_count else value,)

    def _cannot_hold(self, keyword: str, value: Any) -> bool:
        tried = self._joined.tried
        if keyword in ("pattern", "format"):
            tried.add(value)
        return len(tried) > MAX_TRIED or self._joined.rules.cannot_hold(keyword, value)

    def _without_patterns(self, given: dict[str, Any], place: str) -> None:
        """Leave out patterns of property names that are not supported; the properties may then have any name."""
        kept, others = {}, given.get("additionalProperties")
        for pattern, schema in given["patternProperties"].items():
            if self._cannot_hold("pattern", pattern):
                self._drop("patternProperties", pattern, place, _NOT_HELD)
                others = schema if others is False else None if others is None else True
            else:
                kept[pattern] = schema
        if len(kept) > 1 and self._cannot_hold("patternProperties", dict.fromkeys(kept, True)):
            self._drop("patternProperties", list(kept), place, _NOT_HELD)
            kept, others = {}, None if others is None else True
        given["patternProperties"] = kept
        if others is not None:
            given["additionalProperties"] = others

    def _drop(self, keyword: str, value: Any, place: str, why: str, *, malformed: bool = False) -> None:
        """Report that a keyword is left out, or refuse the schema because of it."""
        refuses = malformed and not (self._mends and not self._strict)
        if not malformed and self._strict and keyword in _RELATIONS:
            refuses, why = True, f"{why}; leave it out, or leave strict out"
        self._joined.leave_out(keyword, value, place, why, strict=refuses)


def _modern(node: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keywords of earlier drafts into those of 2020-12, and remove those that are null."""
    found = {keyword: value for keyword, value in node.items() if value is not None or keyword not in _FORMS}
    if isinstance(found.get("items"), list) and found["items"] and "prefixItems" not in found:
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found.pop("additionalItems")
    found.pop("additionalItems", None)
    if "unevaluatedItems" in found and not any(keyword in found for keyword in ("items", *_IN_PLACE)):
        found["items"] = found.pop("unevaluatedItems")
    for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and limit in found:
            found[exclusive] = found.pop(limit)
    return found


def _odd_item(keyword: str, value: Any) -> tuple[str | int, Any, str] | None:
    """Key or index, value and right form of what is malformed within a keyword's value; None if all of that is."""
    items: Any = ()
    if keyword in _MAPPINGS and isinstance(value, Mapping):
        items = value.items()
    elif keyword in (*_LISTS, "required") and isinstance(value, list):
        items = enumerate(value)
    fits, form = (_is_text, "a text") if keyword == "required" else (_is_schema, "a schema")
    return next(((key, one, form) for key, one in items if not fits(one)), None)


def _has_type(value: Any, types: Any) -> bool:
    """Whether a value is of a JSON type, or of one of a list of them."""
    return any(one in _types_of(value) for one in _listed(types))


def _types_of(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool) or value is None:
        return ("null",) if value is None else ("boolean",)
    if isinstance(value, int | float):
        return ("number", "integer") if isinstance(value, int) or value.is_integer() else ("number",)
    return ("string",) if isinstance(value, str) else ("object",) if isinstance(value, Mapping) else ("array",)


def _type_of(schema: Mapping[str, Any]) -> Any:
    """The type that a schema names, or implies by having `properties`."""
    return schema.get("type", "object" if "properties" in schema else None)


def _joined_uri(base: str, uri: str) -> str:
    try:
        return urldefrag(urljoin(base, uri))[0]
    except ValueError:  # not a valid URI
        return uri


def _at(resource: Any, pointer: str) -> Any:
    """The value that a JSON pointer leads to; None if there is none."""
    for key in pointer.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(resource, list) and key.isdecimal() and key.isascii() and len(key) < 9:
            resource = resource[int(key)] if int(key) < len(resource) else None
        else:
            resource = resource.get(key) if isinstance(resource, Mapping) else None
    return resource


def _listed(value: Any) -> list[Any]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def _constants(schema: Mapping[str, Any]) -> set[Any]:
    """The reprs of the values in `const` or `enum`; empty if the schema has neither."""
    if "const" in schema:
        return {repr(schema["const"])}
    values = schema.get("enum")
    return {repr(one) for one in values} if isinstance(values, list) else set()


def _are_disjoint(sets: list[set[Any]]) -> bool:
    """Whether no set is empty and no two of them have a common element."""
    return all(sets) and len(set().union(*sets)) == sum(map(len, sets))
