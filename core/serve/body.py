"""From the bytes of a request to a checked struct. A field that is null is unset; one that nobody knows is reported.

Structs declare every optional field as `T | None = None`. Knows no endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from hookline.core.errors import clipped
from hookline.core.serve.errors import ApiError, invalid

IGNORED_HEADER = "X-Hookline-Ignored"
"""Names the fields of a request that had no effect."""
MAX_IGNORED = 20
"""Most names in it."""
_PLACE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.S)
_PRINTABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Struct = TypeVar("Struct", bound=msgspec.Struct)


async def read(request: Request, kind: type[Struct]) -> tuple[Struct, dict[str, str]]:
    """A request's body, and headers for the response that name the fields which were ignored.

    Raises: ApiError with status 400 for what is no JSON object, and for a field of a wrong type.
    """
    data = await request.body()
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise invalid(f"the body is not valid JSON: {clipped(str(error))}") from None
    if not isinstance(values, dict):
        raise invalid(f"the body is a JSON {type(values).__name__}, not an object")
    return checked(values, kind), ignored_header(name for name in values if name not in _effective(kind))


def checked(values: Any, kind: type[Struct], param: str | None = None) -> Struct:
    """Plain values as a struct.

    Raises: ApiError with status 400 that names the field.
    """
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError, ValueError, OverflowError) as error:
        found = _PLACE.fullmatch(str(error))
        place = ".".join(part for part in (param, found[2] if found else None) if part)
        message = found[1] if found else str(error)
        raise invalid(clipped(f"{place}: {message}" if place else message), place or None) from None


@cache
def _effective(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Names of fields that do something; a struct lists those that are taken and ignored in IGNORED."""
    ignored: Iterable[str] = getattr(kind, "IGNORED", ())
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind)) - frozenset(ignored)


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that names ignored fields; none if there are none. Names come from a client and may be anything."""
    shown = [name if _PRINTABLE.fullmatch(name) else "?" for name in names]
    return {IGNORED_HEADER: ", ".join(shown[:MAX_IGNORED])} if shown else {}


def number_header(headers: Mapping[str, str], name: str, kind: type[int] | type[float]) -> Any:
    """The number in a header, or None.

    Raises: ApiError with status 400 if it is none.
    """
    text = headers.get(name)
    if text is None:
        return None
    try:
        return kind(text) if len(text) <= 40 else kind("long")
    except ValueError:
        raise ApiError(400, f"header {name}: {clipped(text)!r} is not a number", param=name) from None
