"""Decode the body of a request into a checked struct.

A field that is null counts as unset; unknown fields are named in a header. Structs declare every optional field as `T |
None = None`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, reduce
from itertools import chain, islice
from operator import getitem
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from hookline.core.contracts import ApiError
from hookline.core.errors import clipped, shown_key
from hookline.core.sampling_params import check_number_of_biases
from hookline.core.serve.endpoints.structured import check_unknown
from hookline.core.serve.errors import invalid
from hookline.core.util.json_lines import BOM, json_fault

IGNORED_HEADER = "X-Hookline-Ignored"
"""The response header that names the request's fields without an effect."""
MAX_IGNORED = 20
"""Most names in that header."""
MAX_PLACE = 160
"""Most characters of a name in that header."""
LARGE = 512 * 1024
"""Bytes of a body beyond which it is decoded in a thread; smaller ones take at most some 20 ms."""
MAX_VALUES = 2**20
"""Most values in a large body. A list, a mapping and each field of a mapping count as `NESTED` values, because decoding
one keeps other threads, the event loop's too, from running for about that much longer."""
NESTED = 8
MAX_DIGITS = 400
"""Most digits of a number in a large body. Reading a number takes time with the square of its digits, and no float64
needs more."""
_PLAIN = frozenset(("", "identity"))
"""Codings that leave a body's bytes as they are."""
PIECE = 64 * 1024
"""Bytes of a body in which values are counted at once."""
_BACKSLASH = ord("\\")
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
_TOO_LONG = b"0" * (MAX_DIGITS + 1)
_PLACE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.S)
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""An escape in a JSON text: of a surrogate pair, of half of one, or any other."""
_OF_KEY = "[...]"
"""How msgspec writes the place of a value of a mapping, whatever its key."""
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)
_PRINTABLE = re.compile(r"[A-Za-z0-9_$?\[\]-]{1,64}")
Shape = Mapping[str, Any]
"""The known fields of a mapping, or of each mapping in a list. A field's value is None if it is not looked into, a
Shape if it is a mapping or a list itself, or a function from the mapping to its Shape."""

Struct = TypeVar("Struct", bound=msgspec.Struct)


async def read(request: Request, kind: type[Struct]) -> tuple[Struct, dict[str, str]]:
    """Decode a request's body; returns it and headers that name its ignored fields.

    Raises: ApiError with status 400 for a body that is not a JSON object or a field of a wrong type; with 413 for a
    body of too many values; with 415 for a compressed body.
    """
    for header in ("Content-Encoding", "Transfer-Encoding"):
        coding = ", ".join(request.headers.getlist(header))
        codings = [one.strip().lower() for one in coding.split(",")]
        if header == "Transfer-Encoding":
            del codings[-1]  # `chunked`, which the HTTP parser has checked and undone
        if not _PLAIN.issuperset(codings):
            message = f"{header}: {clipped(coding)} is not supported; send the body as it is"
            raise ApiError(415, message, code="unsupported_media_type")
    data = (await request.body()).removeprefix(BOM)
    if len(data) <= LARGE:
        return _decoded(data, kind)
    return await asyncio.get_running_loop().run_in_executor(_thread(), _decoded_if_few, data, kind)


@cache
def _thread() -> ThreadPoolExecutor:
    """The lock for decoding large bodies: one at a time, so that the event loop runs between two of them."""
    return ThreadPoolExecutor(1, "hookline-bodies")


def _decoded_if_few(data: bytes, kind: type[Struct]) -> tuple[Struct, dict[str, str]]:
    check_values([data], "the body holds", "send its prompts in several requests")
    _check_number_of_biases(data, kind)
    return _decoded(data, kind)


def _check_number_of_biases(data: bytes, kind: type[Struct]) -> None:
    """Refuse a list of too many entries before it is decoded, by counting its commas: decoding 100,000 entries stops
    all threads for 30 ms.
    """
    if "logit_bias" not in kind.__struct_fields__:
        return
    given = b""
    with suppress(*_UNREADABLE):  # the decoder reports the error
        given = bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("logit_bias", b""))
    if given.startswith(b"{"):
        check_number_of_biases(given.count(b",") + 1)


def check_values(texts: Sequence[bytes], what: str, advice: str) -> None:
    """Refuse JSON that takes long to decode, whatever its size. what: how the error's text begins.

    Raises: ApiError with status 413 for too many values, with 400 for a number of too many digits.
    """
    if sum(map(_weight, texts)) > MAX_VALUES and sum(map(_weight, chain(*map(_outside_texts, texts)))) > MAX_VALUES:
        message = f"{what} more than {MAX_VALUES} values (a list, a mapping, a field counts as {NESTED})"
        raise ApiError(413, f"{message}; {advice}", code="body_too_large")
    suspects = filter(_has_long_number, texts)
    if any(map(_has_long_number, chain(*map(_outside_texts, suspects)))):
        raise invalid(f"{what} a number of more than {MAX_DIGITS} digits")


def _has_long_number(data: bytes) -> bool:
    """Whether the text has a run of more than MAX_DIGITS digits. Searches piece by piece, so that other threads can
    run.
    """
    starts = range(0, len(data), PIECE)
    return any(_TOO_LONG in data[start : start + PIECE + MAX_DIGITS].translate(_DIGITS) for start in starts)


def _weight(data: bytes) -> int:
    """A lower bound for the number of values in JSON text, by its commas, brackets, braces and colons."""
    return data.count(b",") + NESTED * sum(map(data.count, (b"[", b"{", b":")))


def _outside_texts(data: bytes) -> Iterator[bytes]:
    """Yield the JSON text without the strings in it, piece by piece."""
    is_text, start = False, 0
    while start < len(data):
        end = min(start + PIECE, len(data))
        while end < len(data) and data[end - 1] == _BACKSLASH:  # a backslash and the character it escapes stay together
            end += 1
        parts = data[start:end].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[is_text::2])
        is_text ^= len(parts) % 2 == 0
        start = end


def _decoded(data: bytes, kind: type[Struct]) -> tuple[Struct, dict[str, str]]:
    try:
        values = msgspec.json.decode(data)
    except _UNREADABLE as error:
        raise _unreadable(data, error) from None
    if not isinstance(values, dict):
        raise invalid(f"the body is a JSON {type(values).__name__}, not an object")
    check_unknown(values, _known(kind))
    effective = _effective(kind)
    names = [name for name in values if name not in effective]
    for name, shape in getattr(kind, "SHAPE", {}).items():
        if values.get(name) is not None:
            names += islice(_without_effect(values[name], shape, name), MAX_IGNORED)
    return checked(values, kind), ignored_header(names)


def _unreadable(data: bytes, error: Exception) -> ApiError:
    """The error of a body that the decoder refused, with its reason and place where the decoder does not tell them."""
    if not data.strip():
        return invalid("the body is empty; send a JSON object")
    reason = clipped(json_fault(error)).removesuffix(f" - at `${_OF_KEY}`")
    with suppress(*_UNREADABLE):
        for name, value in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
            if (fault := _fault(value)) is not None:
                return invalid(f"{shown_key(name)}: {clipped(json_fault(fault))}", shown_key(name))
    if _fault(_ESCAPE.sub(lambda found: rb"\ufffd" if found["half"] else found[0], data)) is None:
        at = next(found for found in _ESCAPE.finditer(data) if found["half"])
        half = at[0].decode()
        reason = (
            f"{half} (byte {at.start()}) is half a surrogate pair, which is no text; a text was cut within an emoji"
        )
    return invalid(f"the body is not valid JSON: {reason}")


def _fault(data: bytes | msgspec.Raw) -> Exception | None:
    """The decoder's error about a JSON value; None if there is none."""
    try:
        msgspec.json.decode(data)
    except _UNREADABLE as error:
        return error
    return None


def _without_effect(value: Any, shape: Any, place: str) -> Iterator[str]:
    """Places of unknown fields within a field; null fields count as unset."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _without_effect(one, shape, f"{place}[{number}]")
        return
    shape = shape(value) if callable(shape) and isinstance(value, dict) else shape
    if shape is None or not isinstance(value, dict):
        return
    if not value.keys() <= shape.keys():
        yield from (f"{place}.{name}" for name, one in value.items() if name not in shape and one is not None)
    for name, inner in shape.items():
        if inner is not None and name in value:
            yield from _without_effect(value[name], inner, f"{place}.{name}")


def checked(values: Any, kind: type[Struct], param: str | None = None) -> Struct:
    """Convert plain values to a struct.

    Raises: ApiError with status 400 that names the field.
    """
    try:
        return msgspec.convert(values, kind, strict=False)  # 16.0 is a whole number, and "0.5" a number
    except (msgspec.ValidationError, RecursionError, ValueError, OverflowError) as error:
        found = _PLACE.fullmatch(str(error))
        message = found[1] if found else str(error)
        missing = _MISSING.fullmatch(message)
        within = found and found[2] and _with_keys(found[2], str(error), values, kind)
        place = ".".join(part for part in (param, within, missing and missing[1]) if part)
        message = "Field required" if missing else message
        raise invalid(clipped(f"{place}: {message}" if place else message), place or None) from None


def _with_keys(place: str, told: str, values: Any, kind: type[msgspec.Struct]) -> str:
    """The place with the keys of mappings that msgspec leaves out of it. told: msgspec's error."""
    first, *others = place.split(_OF_KEY)
    steps: list[Any] = [name or int(index) for name, index in _STEP.findall(first)]
    for other in others:
        entries = list(reduce(getitem, steps, values).items())
        while len(entries) > 1:  # each half is converted alone, so that all of them take about as long as the whole
            half = entries[: len(entries) // 2]
            is_there = _refusal(_replaced(values, steps, dict(half)), kind) == told
            entries = half if is_there else entries[len(half) :]
        key = entries[0][0]
        first += f"[{shown_key(key)}]{other}"
        steps += [key, *(name or int(index) for name, index in _STEP.findall(other))]
    return first


def _refusal(values: Any, kind: type[msgspec.Struct]) -> str | None:
    try:
        msgspec.convert(values, kind, strict=False)
    except (msgspec.ValidationError, RecursionError, ValueError, OverflowError) as error:
        return str(error)
    return None


def _replaced(values: Any, steps: Sequence[Any], new: Any) -> Any:
    """The values with another one at a place, and of the mappings around it nothing else."""
    if not steps:
        return new
    inner = _replaced(values[steps[0]], steps[1:], new)
    return {steps[0]: inner} if isinstance(values, dict) else [*values[: steps[0]], inner]


@cache
def _known(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the fields, with an effect or without."""
    return frozenset(kind.__struct_fields__)


@cache
def _effective(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Names of the fields that have an effect. A struct lists its accepted but ignored fields in IGNORED."""
    ignored: Iterable[str] = getattr(kind, "IGNORED", ())
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind)) - frozenset(ignored)


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that names ignored fields; empty without any. The names come from a client, so their characters are
    checked.
    """
    shown = [_shown(name) for name in names]
    return {IGNORED_HEADER: ", ".join(shown[:MAX_IGNORED])} if shown else {}


def _shown(name: str) -> str:
    """A name as a header can have it; a long place is shown by its beginning and its end."""
    shown = ".".join(one if _PRINTABLE.fullmatch(one) else "?" for one in name.split("."))
    return shown if len(shown) <= MAX_PLACE else f"{shown[: MAX_PLACE // 3]}...{shown[-MAX_PLACE // 2 :]}"


def also_ignored(headers: Mapping[str, str], names: Sequence[str]) -> Mapping[str, str]:
    """The headers with further ignored fields, each once. The new names come first, because they may say what an answer
    lacks.
    """
    before = [name for name in headers.get(IGNORED_HEADER, "").split(", ") if name]
    return {**headers, **ignored_header(dict.fromkeys([*names, *before]))}


def number_header(headers: Mapping[str, str], name: str, kind: type[int] | type[float]) -> Any:
    """The number in a header, or None without the header.

    Raises: ApiError with status 400 if the value is not a number.
    """
    text = headers.get(name)
    if text is None:
        return None
    try:
        return kind(text) if len(text) <= 40 else kind("long")
    except ValueError:
        raise ApiError(400, f"header {name}: {clipped(text)!r} is not a number", param=name) from None
