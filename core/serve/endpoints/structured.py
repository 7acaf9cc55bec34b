"""What an answer must look like, by whatever field a request says it, as the engine takes it.

A field that says so is obeyed or refused: OpenAI's `response_format` in the forms that servers know, our
`structured_outputs`, and the fields that vLLM, SGLang, llama.cpp, TGI and Ollama have for the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hookline.core.errors import shown
from hookline.core.json_schemas import SchemaError, SchemaRules, as_held
from hookline.core.serve.errors import Naming, invalid, top_field
from hookline.core.structured_outputs import KINDS, StructuredOutputs
from hookline.core.util.text import near_miss

FORMAT, SCHEMA = "response_format", "response_format.json_schema.schema"
ALIASES = {
    "guided_json": "json",
    "guided_json_object": "json",
    "guided_choice": "choice",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "format": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields of other servers -> the key of structured_outputs that means the same."""
_FORMATS = {
    "json_object": "json",
    "json_schema": "json",
    "json": "json",
    "regex": "regex",
    "regex_schema": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
"""Types of response_format -> the key of structured_outputs that means the same."""
_CONTENTS = ("value", "schema", "pattern", "regex", "regex_schema", "grammar", "json_schema")
"""Where a response_format of one of these types has its content, beside OpenAI's json_schema.schema."""
ELSEWHERE = {
    "functions": "tools",
    "function_call": "tool_choice",
    "text": FORMAT,
    "output_format": FORMAT,
    "output_config": FORMAT,
    "response_schema": FORMAT,
    "json_mode": FORMAT,
}
"""Fields of other APIs that say what is answered -> the one that an endpoint without them has for it."""
ANNOTATIONS = (
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "guided_decoding_disable_fallback",
    "guided_decoding_disable_any_whitespace",
    "guided_decoding_disable_additional_properties",
)
"""Fields that say how a server makes its grammars; they are ignored and named."""


MAX_UNKNOWN = 256
"""Most unknown fields of a request that are looked at for what they may have meant."""
_UNPACKED = frozenset((FORMAT, "structured_outputs", *ALIASES)) - {"format"}
_LONG_NAMES = sorted(name for name in _UNPACKED if len(name) > len("grammar"))
"""Names of which one that is almost the same can hardly mean something else."""
_NAMED_SCHEMA = dict.fromkeys(("name", "description", "schema", "strict"))
FORMAT_SHAPE = {
    **dict.fromkeys(("type", "structures", "triggers", "format", *_CONTENTS)),
    **_NAMED_SCHEMA,
    "json_schema": lambda given: _NAMED_SCHEMA if "schema" in given else None,  # else it is a schema itself
}
"""What has an effect in a response_format."""


@dataclass(frozen=True)
class AnswerForm:
    """What an answer must look like.

    name: the request's field that says it. place: where in it. is_strict: whether the answer must be so exactly.
    """

    wanted: StructuredOutputs
    name: str
    place: str
    is_strict: bool = False

    def held(self, rules: SchemaRules) -> tuple[StructuredOutputs, list[str]]:
        """The form as grammars hold it, and the places of what they leave out.

        Raises: ApiError with status 400 for a schema that is none, or that is strict and cannot be held.
        """
        try:
            return as_held(self.wanted, rules, self.place, strict=self.is_strict)
        except SchemaError as error:
            raise invalid(str(error), top_field(error.place)) from None


def answer_form(
    response_format: Mapping[str, Any] | None,
    structured: Mapping[str, Any] | None,
    aliases: Mapping[str, Any],
    names: Mapping[str, str],
) -> AnswerForm | None:
    """The form that a request asks for; None if the answer is free.

    aliases: the fields of ALIASES that are set. names: what the request calls FORMAT and SCHEMA, if not so.
    Raises: ApiError with status 400 for what is none, or is more than one.
    """
    found: list[_Given] = []
    if response_format is not None and (by_format := _of_format(response_format, names)) is not None:
        found.append(by_format)
    found += [_of_alias(name, value) for name, value in aliases.items() if value is not False]
    if structured is not None:
        found.append(_Given("structured_outputs", _of_structured(structured), "structured_outputs"))
    if len(found) > 1:
        raise invalid(f"{found[0].name} and {found[1].name} are both set; give one", top_field(found[1].name))
    if not found:
        return None
    given = found[0]
    is_own = given.name == "structured_outputs"
    with Naming({} if is_own else {"structured_outputs": given.place}):
        wanted = StructuredOutputs.of(given.values)
    assert wanted is not None
    return AnswerForm(wanted, given.name, f"{given.place}.{wanted.kind}" if is_own else given.place, given.is_strict)


def flat_format(given: Any, name: str) -> dict[str, Any] | None:
    """response_format from a form that has the schema beside its type, as /v1/responses and /v1/messages do.

    name: the field that it is in. Raises: ApiError for what is no object.
    """
    if given is not None and not isinstance(given, dict):
        raise invalid(f"{name}={shown(given)} is not an object with a type", top_field(name))
    return given


@dataclass(frozen=True)
class _Given:
    """A field that says what the answer must be, as arguments of StructuredOutputs. place: where its content is."""

    name: str
    values: dict[str, Any]
    place: str
    is_strict: bool = False


def _of_format(given: Mapping[str, Any], names: Mapping[str, str]) -> _Given | None:
    name, kind = names.get(FORMAT, FORMAT), given.get("type")
    if kind == "text":
        return None
    key = _FORMATS.get(kind) if isinstance(kind, str) else None
    if key is None:
        known = ", ".join(("text", *_FORMATS))
        raise invalid(f"{name}.type={shown(kind)} is not one of {known}", top_field(name))
    if key == "structural_tag":
        return _Given(name, {key: {inner: value for inner, value in given.items() if inner != "type"}}, name)
    content = next((one for one in _CONTENTS if given.get(one) is not None), None)
    if content is None and kind == "json_object":
        return _Given(name, {"json": True}, name)
    place = names.get(SCHEMA, SCHEMA) if content in (None, "json_schema") else f"{name}.{content}"
    value, is_strict = given.get(content or ""), given.get("strict") is True
    if isinstance(value, Mapping) and content == "json_schema" and {"name", "schema"} & set(value):
        is_strict = value.get("strict") is True
        value = value.get("schema")
    if key == "json" and not isinstance(value, Mapping) and not _is_json_text(value):
        raise invalid(f"{place} must be a JSON schema", top_field(name))
    return _Given(name, {key: value}, place, is_strict)


def _of_alias(name: str, value: Any) -> _Given:
    if name == "grammar" and isinstance(value, Mapping):  # as TGI has it
        if (found := _of_format(value, {FORMAT: name, SCHEMA: name})) is not None:
            return found
    if name == "json_schema" and isinstance(value, Mapping) and {"name", "schema"} <= set(value):
        return _Given(name, {"json": value["schema"]}, f"{name}.schema", value.get("strict") is True)
    if (name, value) in (("format", "json"), ("guided_json_object", True)):
        return _Given(name, {"json": True}, name)
    if ALIASES[name] == "json" and not isinstance(value, Mapping) and not _is_json_text(value):
        raise invalid(f"{name}={shown(value)} is not a JSON schema", name)
    return _Given(name, {ALIASES[name]: value}, name)


def _is_json_text(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("{")


def _of_structured(given: Mapping[str, Any]) -> dict[str, Any]:
    # vLLM's flags are unset where they are false; that of `whitespace` is true unless it is set.
    found = {
        name: value
        for name, value in given.items()
        if value is not None and (value is not False or name == "whitespace")
    }
    if found.pop("json_object", None):
        found["json"] = True
    if found.pop("disable_any_whitespace", None):
        found["whitespace"] = False
    if not any(name in found for name in KINDS):
        raise invalid(f"structured_outputs must have one of {', '.join(KINDS)}", "structured_outputs")
    return found


def check_unknown(values: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse fields that an endpoint does not know and that say what the answer must be: by another API's name, by
    a name that is almost right, or in a mapping that only a client library unpacks.

    Raises: ApiError with status 400 and the right spelling.
    """
    known = frozenset(known)
    if FORMAT not in known:
        return
    unknown = (name for name, value in values.items() if name not in known and value is not None)
    for name in islice(unknown, MAX_UNKNOWN):
        value = values[name]
        if name in ANNOTATIONS:
            continue
        if name in ELSEWHERE:
            right = ELSEWHERE[name]
            if right in known or right == FORMAT:
                raise invalid(f"{name} is not a field of this endpoint; use {right}", name)
        if close := near_miss(_snake(name), _LONG_NAMES, cutoff=0.85):
            raise invalid(f"{name} is not a field of this endpoint.{close}", name)
        if isinstance(value, Mapping):
            for inner in _UNPACKED.intersection(value):
                raise invalid(f"{name}.{inner} has no effect there; send {inner} as a field of the body", name)


def _snake(name: str) -> str:
    return "".join(f"_{one.lower()}" if one.isupper() else one for one in name[:64])


def as_element(wanted: StructuredOutputs) -> dict[str, Any]:
    """A form as an element of a structural tag's `format`."""
    value = wanted.value
    if wanted.kind == "json":
        return {"type": "json_schema", "json_schema": json.loads(value)}
    if wanted.kind == "regex":
        return {"type": "regex", "pattern": value}
    if wanted.kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}
    if wanted.kind == "grammar":
        return {"type": "grammar", "grammar": value}
    tags = json.loads(value)
    if "format" in tags:
        found: dict[str, Any] = tags["format"]
        return found
    return {"type": "triggered_tags", "triggers": tags.get("triggers"), "tags": tags.get("structures")}
