"""What a completion must look like: response_format and structured_outputs as the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.core.errors import shown
from hookline.core.serve.errors import invalid, top_field

FORMAT, SCHEMA = "response_format", "response_format.json_schema.schema"
_FORMS = ("json", "regex", "choice", "grammar", "structural_tag")


def structured_outputs(
    response_format: Mapping[str, Any] | None,
    structured: Mapping[str, Any] | None,
    names: Mapping[str, str],
) -> dict[str, Any] | None:
    """A value for SamplingParams.structured_outputs; None if the completion is free.

    names: what the request calls FORMAT and SCHEMA, if not so.
    Raises: ApiError with status 400 for what is none, or is more than one.
    """
    by_format = _of_format(response_format, names) if response_format is not None else None
    given = None if structured is None else _of_structured(structured)
    if by_format is not None and given is not None:
        name = names.get(FORMAT, FORMAT)
        raise invalid(f"{name} and structured_outputs are both set; give one", "structured_outputs")
    return by_format or given


def flat_format(given: Any, name: str) -> dict[str, Any] | None:
    """response_format from a form that has the schema beside its type, as /v1/responses and /v1/messages do.

    name: the field that it is in. Raises: ApiError for what is no object.
    """
    if given is not None and not isinstance(given, dict):
        raise invalid(f"{name}={shown(given)} is not an object with a type", top_field(name))
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": given}


def _of_format(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any] | None:
    name = names.get(FORMAT, FORMAT)
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": True}
    if kind == "json_schema":
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise invalid(f"{names.get(SCHEMA, SCHEMA)} must be a JSON schema", top_field(name))
        return {"json": dict(schema)}
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in given.items() if name != "type"}}
    known = "text, json_object, json_schema, structural_tag"
    raise invalid(f"{name}.type={shown(kind)} is not one of {known}", top_field(name))


def _of_structured(given: Mapping[str, Any]) -> dict[str, Any] | None:
    # vLLM's flags are unset where they are false; that of `whitespace` is true unless it is set.
    found = {
        name: value
        for name, value in given.items()
        if value is not None and (value is not False or name == "whitespace")
    }
    if found.pop("json_object", None):
        found["json"] = True
    if not any(name in found for name in _FORMS):
        raise invalid(f"structured_outputs must have one of {', '.join(_FORMS)}", "structured_outputs")
    return found
