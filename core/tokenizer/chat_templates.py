"""Renders chat templates, which are programs from a checkpoint, in Jinja's sandbox and within limits of time and size.

A loop is interrupted when it takes too much time or memory, or makes too much text. A single operation cannot be
interrupted, so a template with numbers that only serve to make something huge is refused before it is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from hookline.core.errors import RequestError, clipped, one_short_line
from hookline.core.util.interrupt import limits

TIMEOUT_S = 2.0
"""Longest time that a template may take to render a conversation."""
MAX_BYTES = 2**30
"""Most memory that a template may take meanwhile."""
MAX_CHARACTERS = 2**25
"""Most characters of a rendered conversation: twice the largest body that a server takes."""
MAX_NUMBER = 1_000_000
"""Largest number in a template: with more, one operation may fill the memory."""
_WIDTHS = re.compile(r"%[^a-zA-Z]{0,20}[0-9]{7}|\{[^}]{0,40}:[^}]{0,40}[0-9]{7}")
"""Format strings with a width of that size."""


def rendered(tokenizer: Any, messages: Any, options: Mapping[str, Any]) -> str:
    """A chat as text, by the tokenizer's template; options: keyword arguments of its apply_chat_template.

    Raises: RequestError if the template refuses the messages, or fails, or reaches a limit.
    """
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, Mapping) else [templates]:
        if fault := size_fault(str(template)):
            raise RequestError(f"the checkpoint's chat template is refused: {fault}")
    render = tokenizer.apply_chat_template
    import_renderer(tokenizer)  # not a part of the template's time
    try:
        with limits(TIMEOUT_S, MAX_BYTES):
            _bound_text(tokenizer, options)
            text = render(messages, tokenize=False, **options)
    except Exception as error:
        raise RequestError(f"the chat template refuses these messages: {one_short_line(error)}") from None
    if not isinstance(text, str) or len(text) > MAX_CHARACTERS:
        size = f"{len(text)} characters" if isinstance(text, str) else f"a value of type {type(text).__name__}"
        raise RequestError(
            f"the chat template makes {size} of these messages, not a text of at most {MAX_CHARACTERS} characters"
        )
    return text


def import_ahead() -> None:
    """Import what rendering needs with almost every tokenizer, before there is one.

    What cannot be imported is no error here, since a tokenizer may need none of it.
    """
    _import_jinja()
    with suppress(Exception):  # dependencies of its own may be missing or broken
        from transformers import PreTrainedTokenizerFast

        _ = PreTrainedTokenizerFast
        _compile()


def import_renderer(tokenizer: Any) -> None:
    """Import everything that rendering a template of this tokenizer needs."""
    _import_jinja()
    _ = tokenizer.apply_chat_template  # may import transformers
    if hasattr(tokenizer, "get_chat_template"):
        _compile()


def _import_jinja() -> None:
    import encodings.unicode_escape
    import textwrap

    import jinja2.constants
    import jinja2.debug
    import jinja2.loaders

    _ = encodings, textwrap, jinja2


def _compile() -> Any:
    """The function of transformers that compiles a template; None if this version has none."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None
    return _compile_jinja_template


def _bound_text(tokenizer: Any, options: Mapping[str, Any]) -> None:
    """Make a template join its text piece by piece, with a check of the size.

    Otherwise a single operation would join it, which cannot be interrupted, and many references to one long piece take
    no memory before that. Changes the compiled template that transformers keeps and is about to render; a tokenizer of
    a model's own may have no templates.
    """
    if not hasattr(tokenizer, "get_chat_template"):
        return
    if (compiled := _compile()) is None:
        return
    template = compiled(tokenizer.get_chat_template(options.get("chat_template"), options.get("tools")))
    template.environment.concat = _joined


def _joined(pieces: Iterable[str]) -> str:
    """Join the pieces, unless the text gets too long."""
    taken, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise MemoryError(f"it makes more than {MAX_CHARACTERS} characters")
        taken.append(piece)
    return "".join(taken)


@lru_cache(maxsize=64)
def size_fault(template: str) -> str:
    """The part of a template that could fill the memory in one operation; empty if there is none."""
    from jinja2 import Environment, TemplateError

    try:
        tokens = [token for token in Environment().lex(template) if token[1] != "whitespace"]
    except TemplateError:
        return ""  # rendering reports the error
    before = ""
    for _, kind, text in tokens:
        if kind in ("integer", "float") and abs(_number(text)) > MAX_NUMBER:
            return f"it has the number {clipped(text)}, and the largest that may be is {MAX_NUMBER}"
        if kind == "operator" and text == "**" and before not in ("(", ","):
            return "it has a power, x ** y"
        if kind == "string" and _WIDTHS.search(text):
            return f"it formats to a width above {MAX_NUMBER}"
        before = text
    return ""


def _number(text: str) -> float:
    try:
        return float(int(text.replace("_", ""), 0) if "." not in text and "e" not in text.lower() else float(text))
    except (ValueError, OverflowError):
        try:
            return float(text.replace("_", ""))
        except ValueError:
            return float("inf")
