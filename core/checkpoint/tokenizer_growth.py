"""Bounds how much longer a checkpoint's tokenizer can make a text, before any text is given to it.

A tokenizer.json is a program that comes with a checkpoint: three normalizers that each replace a by 300 a's turn every
a into 27 million characters. The library that runs them cannot be interrupted. Therefore tokenizers that multiply texts
are refused in advance, as are chat templates that could fill the memory in one operation.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from hookline.core.errors import CheckpointError

MAX_GROWTH = 64
"""Most characters, or token ids, that a tokenizer may make of one character, and most characters that it may make of a
character of a token when it decodes."""
MAX_ADDED = 65_536
"""Most characters, or token ids, that a tokenizer may add to a text."""
_PARTS = ("normalizers", "pretokenizers", "processors", "decoders")
_ESCAPED = re.compile(rb"\\u00[2-7]")
"""A printable ASCII character that JSON writes as an escape; a key may contain it."""
_NORMALIZER = re.compile(r'"normalizer"\s*:\s*')


def check_file(data: bytes) -> None:
    """Check a tokenizer.json before it is loaded, because loading normalizes the added tokens.

    Reads only the normalizers, without parsing the whole file, which may have 30 MB.
    Raises: CheckpointError.
    """
    text = data.decode(errors="replace")
    if _ESCAPED.search(data):
        with suppress(ValueError, RecursionError):  # loading reports the error
            _check("normalizer", [json.loads(text).get("normalizer")])
        return
    read = json.JSONDecoder().raw_decode
    for found in _NORMALIZER.finditer(text):
        with suppress(ValueError, RecursionError):
            _check("normalizer", [read(text, found.end())[0]])


def check_growth(tokenizer: Any) -> float:
    """Check a loaded tokenizer; returns the most characters that it can make of one.

    Raises: CheckpointError.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer, pre_tokenizer, post_processor, decoder = (
        _state(getattr(backend, name, None)) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    growth = _check("normalizer and pre_tokenizer", [normalizer, pre_tokenizer])
    _check("decoder", [decoder])
    return growth * _check("post_processor", [post_processor])


def _state(component: Any) -> Any:
    """The description of a component in tokenizer.json; None for a component that is written in Python."""
    try:
        return json.loads(component.__getstate__())
    except Exception:
        return None


def _check(name: str, states: list[Any]) -> float:
    growth, added, num_byte_levels = 1.0, 0.0, 0
    for step in (step for state in states for step in _steps(state)):
        factor, more = _growth(step)
        if step.get("type") == "ByteLevel" and "normalizer" in name:
            num_byte_levels += 1
            # It makes characters of up to two bytes of a text's bytes; a further one makes two characters of each.
            factor, more = (2.0 if num_byte_levels > 1 else 1.0), 1.0
        growth, added = growth * factor, added * factor + more
        if growth > MAX_GROWTH or added > MAX_ADDED:
            raise CheckpointError(
                f"the tokenizer's {name} may make a text more than {MAX_GROWTH} times as long, or add more than "
                f"{MAX_ADDED} characters to it: correct tokenizer.json"
            )
    return growth


def _steps(state: Any) -> Iterator[Mapping[str, Any]]:
    """The elementary parts of a component, in order."""
    if isinstance(state, Mapping):
        if state.get("type") == "Sequence":
            for inner in (inner for part in _PARTS if isinstance(state.get(part), list) for inner in state[part]):
                yield from _steps(inner)
        else:
            yield state


def _growth(step: Mapping[str, Any]) -> tuple[float, float]:
    """The most characters that a part can make of one, and can add to a text. Unicode's normal forms count as 1: they
    make up to 18 of one character, but do not grow again when repeated.
    """
    kind = step.get("type")
    if kind == "Replace":
        return _replaced(step.get("pattern"), len(str(step.get("content", ""))))
    if kind == "Prepend":
        return 1.0, len(str(step.get("prepend", "")))
    if kind == "Precompiled":
        return _longest_entry(step.get("precompiled_charsmap")), 0.0
    if kind == "TemplateProcessing":
        return _repeated(step)
    if (kind == "BPEDecoder" and step.get("suffix") == "") or (
        kind == "CTC" and step.get("word_delimiter_token") == ""
    ):
        return 2.0, 1.0  # a space wherever the empty string matches
    return 1.0, 0.0


def _replaced(pattern: Any, size: int) -> tuple[float, float]:
    text = pattern.get("String") if isinstance(pattern, Mapping) else pattern
    if isinstance(text, str) and text:
        return max(1.0, size / len(text)), 0.0
    regex = pattern.get("Regex", "") if isinstance(pattern, Mapping) else ""
    if _matches_nothing(str(regex)):
        return 1.0 + size, size
    return max(1.0, size), 0.0


def _matches_nothing(regex: str) -> bool:
    """Whether a regular expression can match the empty string between characters."""
    if "(?" in regex or re.search(r"\\[bBGAzZK]", regex):
        return True
    try:
        return re.search(regex, "") is not None
    except re.error:  # in a dialect that Python does not know
        return True


def _longest_entry(charsmap: Any) -> float:
    """Length of the longest text by which a character map of SentencePiece replaces others."""
    try:
        data = base64.b64decode(charsmap) if isinstance(charsmap, str) else bytes(charsmap)
    except (ValueError, TypeError):
        return 1.0  # loading reports the error
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1.0, *(len(text.decode(errors="replace")) for text in texts))


def _repeated(step: Mapping[str, Any]) -> tuple[float, float]:
    special = step.get("special_tokens")
    sizes = {name: len(one.get("ids", ())) for name, one in special.items()} if isinstance(special, Mapping) else {}
    pieces = [one for name in ("single", "pair") for one in step.get(name) or () if isinstance(one, Mapping)]
    num_texts = sum("Sequence" in one for one in step.get("single") or ())
    added = sum(sizes.get(one["SpecialToken"].get("id"), 1) for one in pieces if "SpecialToken" in one)
    return max(1.0, num_texts), float(added)
