"""The form that an answer must have, from whichever field of a request asks for it.

Such a field is either obeyed or refused, never ignored: OpenAI's `response_format` with the variants of other servers,
our `structured_outputs`, and the fields that vLLM, SGLang, llama.cpp, TGI and Ollama have for the same purpose.
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
from hookline.core.util.text import joined, near_miss

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
"""The key with the content of a response_format of these types, beside OpenAI's json_schema.schema."""
ELSEWHERE = {
    "functions": "tools",
    "function_call": "tool_choice",
    "text": FORMAT,
    "output_format": FORMAT,
    "output_config": FORMAT,
    **dict.fromkeys(("response_schema", "response_json_schema", "output_schema", "schema", "text_format"), FORMAT),
    **dict.fromkeys(("json_mode", "json_object", "force_json", "response_mime_type", "response_model"), FORMAT),
    **dict.fromkeys(("guided_decoding", "json", "choice", "choices", "regexp", "lark", "gbnf"), "structured_outputs"),
}
"""Fields of other APIs that ask for a form -> the field of this endpoint for it."""
_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_COUNTS = (*_LENGTHS, "min_tokens")
_STOPS = ("stop", "stop_sequences")
SAME = {
    **dict.fromkeys((*_LENGTHS, "max_new_tokens", "max_tokens_to_sample", "n_predict", "num_predict"), _LENGTHS),
    **dict.fromkeys(("max_length", "max_gen_len", "max_gen_toks", "tokens_to_generate"), _LENGTHS),
    **dict.fromkeys((*_STOPS, "stop_strings", "stopping_strings", "custom_stopping_strings", "stop_words"), _STOPS),
    **dict.fromkeys(("stop_sequence", "stop_words_list", "until"), _STOPS),
    **dict.fromkeys(("stop_ids", "stop_token_id", "eos_token_id", "eos_token_ids", "end_id"), ("stop_token_ids",)),
    **dict.fromkeys(("min_new_tokens", "min_output_tokens", "min_length", "min_gen_len"), ("min_tokens",)),
    **dict.fromkeys(("banned_tokens", "banned_strings", "bad_words_ids", "custom_token_bans"), ("bad_words",)),
    **dict.fromkeys(("bad_words_list", "suppress_tokens"), ("bad_words",)),
    **dict.fromkeys(("allowed_tokens", "allowed_words"), ("allowed_token_ids",)),
    **dict.fromkeys(("ban_eos_token", "ignore_eos_token"), ("ignore_eos",)),
}
"""Other servers' fields that bound an answer -> fields with the same effect, of which an endpoint has at most one."""
_WORDS = {
    **dict.fromkeys(("grammar", "gbnf", "ebnf", "bnf", "lark"), "grammar"),
    **dict.fromkeys(("regex", "regexp"), "regex"),
    "schema": FORMAT,
    **dict.fromkeys(("guided", "guidance", "constraint", "constraints", "constrained"), "structured_outputs"),
}
"""Words in names of fields that ask for a form, whichever server has them -> the field for it."""
_NO_FORM = frozenset(("backend", "cache", "id", "lazy", "mode", "name", "scale", "strength", "triggers", "version"))
"""Last words of names of fields that ask for no form, but say something about one or about guidance of another kind."""
ANNOTATIONS = (
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "guided_decoding_disable_fallback",
    "guided_decoding_disable_any_whitespace",
    "guided_decoding_disable_additional_properties",
)
"""Fields that choose a server's grammar back end; they are ignored, and named in the header."""


MAX_UNKNOWN = 256
"""Most unknown fields of a request that are compared with known names."""
_UNPACKED = frozenset((FORMAT, "structured_outputs", *ALIASES)) - {"format"}
_LONG_NAMES = sorted(name for name in _UNPACKED if len(name) > len("grammar"))
"""Names that are long enough for a name that is almost the same to be a misspelling of it."""
_CHOICES = ("tools", "tool_choice", "parallel_tool_calls")
"""Fields that say which calls an answer may have."""
_NAMED_SCHEMA = dict.fromkeys(("name", "description", "schema", "strict"))
FORMAT_SHAPE = {
    **dict.fromkeys(("type", "structures", "triggers", "format", *_CONTENTS)),
    **_NAMED_SCHEMA,
    # without the key `schema`, the mapping is the schema itself
    "json_schema": lambda given: _NAMED_SCHEMA if "schema" in given else None,
}
"""The known fields of a response_format."""


@dataclass(frozen=True)
class AnswerForm:
    """The form that an answer must have. name: of the request's field. place: within the request. is_strict: whether
    every keyword must be enforced.
    """

    wanted: StructuredOutputs
    name: str
    place: str
    is_strict: bool = False

    def held(self, rules: SchemaRules) -> tuple[StructuredOutputs, list[str]]:
        """The structured outputs for the engine, and the places of the keywords that were left out.

        Raises: ApiError with status 400 for an invalid schema, or for a strict schema with unsupported keywords.
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

    aliases: the fields of ALIASES that are set. names: the request's names of FORMAT and SCHEMA, where they differ.
    Raises: ApiError with status 400 for an invalid form, or for more than one.
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


def only_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The response_format from the fields of an API that ask for it, of which at most one is set; None without any.

    given: name of the field in the request -> its value, a mapping whose schema may stand beside its type.
    Raises: ApiError if two of them ask for different forms, or if the value is not an object.
    """
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        first = next(iter(found))
        if value != found[first]:
            raise invalid(f"{first} and {name} are both set; give one", top_field(name))
        if not isinstance(value, dict):
            raise invalid(f"{name}={shown(value)} is not an object with a type", top_field(name))
    return next(iter(found.values()), None)


def format_within(given: Mapping[str, Any] | None, place: str) -> Any:
    """`format` of a field that has the form of the answer among others, such as `text` or `output_config`; None if it
    is not set.

    Raises: ApiError for a key that would say the form, were it spelt or placed rightly.
    """
    for name in (given or {}).keys() - {"format"}:
        if name in FORMAT_SHAPE or near_miss(name, ["format"], cutoff=0.7):
            raise invalid(f"{place}.{name} has no effect; the form of the answer is {place}.format", place)
    return (given or {}).get("format")


def check_names(given: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    """Refuse keys that are misspelt names of a field's known ones.

    Raises: ApiError with status 400 and the right spelling.
    """
    known = frozenset(known)
    for name in islice((one for one in given if one not in known and given[one] is not None), MAX_UNKNOWN):
        if close := near_miss(_snake(name), sorted(known), cutoff=0.8, prefix=place):
            raise invalid(f"{joined(place, name)} is not known.{close}", top_field(place))


def is_strict_at(given: Mapping[str, Any], place: str) -> bool:
    """Whether a schema or function asks for `strict`. place: in the request.

    Raises: ApiError for a value that is neither true nor false.
    """
    if not isinstance(strict := given.get("strict"), bool | None):
        raise invalid(f"{place}.strict={shown(strict)} is neither true nor false", top_field(place))
    return strict is True


@dataclass(frozen=True)
class _Given:
    """The arguments of StructuredOutputs for a response_format. place: of the field."""

    name: str
    values: dict[str, Any]
    place: str
    is_strict: bool = False


def _of_format(given: Mapping[str, Any], names: Mapping[str, str]) -> _Given | None:
    name, kind = names.get(FORMAT, FORMAT), given.get("type")
    check_names(given, FORMAT_SHAPE, name)
    if kind == "text":
        if (content := next((one for one in _CONTENTS if given.get(one) is not None), None)) is not None:
            raise invalid(
                f"{name}.{content} has no effect with {name}.type='text'; give the type of form", top_field(name)
            )
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
    value, is_strict = given.get(content or ""), is_strict_at(given, name)
    if isinstance(value, Mapping) and content == "json_schema" and {"name", "schema"} & set(value):
        check_names(value, _NAMED_SCHEMA, f"{name}.{content}")
        is_strict = is_strict_at(value, f"{name}.{content}")
        value = value.get("schema")
    if key == "json":
        value = _schema(value, place, f"{place} must be a JSON schema")
    return _Given(name, {key: value}, place, is_strict)


def _of_alias(name: str, value: Any) -> _Given:
    if name == "grammar" and isinstance(value, Mapping):  # TGI's form
        if (found := _of_format(value, {FORMAT: name, SCHEMA: name})) is not None:
            return found
    if name == "json_schema" and isinstance(value, Mapping) and {"name", "schema"} <= set(value):
        place, inner = f"{name}.schema", value["schema"]
        schema = _schema(inner, place, f"{place}={shown(inner)} is not a JSON schema")
        return _Given(name, {"json": schema}, place, is_strict_at(value, name))
    if (name, value) in (("format", "json"), ("guided_json_object", True)):
        return _Given(name, {"json": True}, name)
    if ALIASES[name] == "json":
        value = _schema(value, name, f"{name}={shown(value)} is not a JSON schema")
    return _Given(name, {ALIASES[name]: value}, name)


def _schema(value: Any, place: str, otherwise: str) -> Any:
    """A schema as a mapping or as JSON text; `true` is one of any JSON value. otherwise: the error of no schema."""
    if isinstance(value, bool):
        if value:
            return {}
        raise invalid(f"{place}=false is a schema that no value fits", top_field(place))
    if isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    raise invalid(otherwise, top_field(place))


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
    """Refuse unknown fields that probably ask for a form: names of other APIs, misspelt names, or a mapping like
    `extra_body`, which only a client library unpacks.

    Raises: ApiError with status 400 and the right spelling.
    """
    known = frozenset(known)
    if FORMAT not in known:
        return
    if values.keys() <= known:
        return
    unknown = (name for name, value in values.items() if name not in known and not _is_unset(value))
    for name in islice(unknown, MAX_UNKNOWN):
        value = values[name]
        if name in ANNOTATIONS:
            continue
        right = _same_field(name, known)
        if right is not None and _is_unset(values.get(right)) and not (_bounds_nothing(value) and right in _COUNTS):
            raise invalid(f"{name} is not a field of this endpoint; use {right}", name)
        names = [*_LONG_NAMES, *known.intersection((*_CHOICES, *ELSEWHERE))]
        if close := near_miss(_snake(name), names, cutoff=0.85):
            raise invalid(f"{name} is not a field of this endpoint.{close}", name)
        if (right := _field_by_words(name)) is not None:
            raise invalid(f"{name} is not a field of this endpoint; use {right}", name)
        if isinstance(value, Mapping):
            _check_within(value, name, known)


def _is_unset(value: Any) -> bool:
    """Whether a value means "unset": some clients send all fields they know, with such values in unused ones."""
    return value is None or value is False or value in ("", [], {})


def _bounds_nothing(value: Any) -> bool:
    """Whether a number of tokens means "unset", as llama.cpp's n_predict of -1 does."""
    return value in (0, -1)


def _same_field(name: str, known: frozenset[str]) -> str | None:
    """The endpoint's field that means the same as another server's of this name; None if none is known to."""
    snake = _snake(name)
    return next((one for one in (ELSEWHERE.get(snake, ""), *SAME.get(snake, ())) if one in known), None)


def _field_by_words(name: str) -> str | None:
    """The field for a form of the answer, if a name's words say that it asks for one."""
    words = _snake(name).split("_")
    return None if words[-1] in _NO_FORM else next((right for word, right in _WORDS.items() if word in words), None)


def _check_within(value: Mapping[Any, Any], name: str, known: frozenset[str]) -> None:
    """Refuse what asks for a form within an unknown field, as other servers have it in `parameters` or `options`."""
    for inner in islice((one for one in value if isinstance(one, str) and not _is_unset(value[one])), MAX_UNKNOWN):
        is_ours = inner in _UNPACKED or (inner in SAME and inner in known)
        if (right := inner if is_ours else _same_field(inner, known) or _field_by_words(inner)) is not None:
            raise invalid(f"{name}.{inner} has no effect there; send {right} as a field of the body", name)


def _snake(name: str) -> str:
    return "".join(f"_{one.lower()}" if one.isupper() else one for one in name[:64])


def as_element(wanted: StructuredOutputs) -> dict[str, Any]:
    """Structured outputs as an element of a structural tag's `format`."""
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
