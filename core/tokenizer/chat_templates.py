"""Renders chat templates, programs that come with a checkpoint: in Jinja's sandbox, within bounds of time and size.

A loop is interrupted when it takes too much time or memory, or makes too much text. A single operation cannot be
interrupted, so a template with numbers that only serve to make something huge is refused before it is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from hookline.core.errors import RequestError, clipped, one_short_line
from hookline.core.util.interrupt import limits

TIMEOUT_S = 2.0
"""Longest time that a template may take to render a conversation."""
MAX_BYTES = 2**30
"""Most memory that it may take meanwhile."""
MAX_CHARACTERS = 2**25
"""Most characters of a rendered conversation: twice the largest body that a server takes."""
MAX_NUMBER = 1_000_000
"""Largest number in a template: with more, one operation may fill the memory."""
_WIDTHS = re.compile(r"%[^a-zA-Z]{0,20}[0-9]{7}|\{[^}]{0,40}:[^}]{0,40}[0-9]{7}")
"""Texts that format something to a width of that size."""


def rendered(tokenizer: Any, messages: Any, options: Mapping[str, Any]) -> str:
    """A chat as text, by the tokenizer's template; options are those of its apply_chat_template.

    Raises: RequestError if the template refuses the messages, or fails, or reaches a limit.
    """
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, Mapping) else [templates]:
        if fault := size_fault(str(template)):
            raise RequestError(f"the checkpoint's chat template is refused: {fault}")
    render = tokenizer.apply_chat_template
    import_renderer(tokenizer)  # which is no work of the template
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


def import_renderer(tokenizer: Any) -> None:
    """Import all that rendering a template of this tokenizer imports when it first comes to need it."""
    import encodings.unicode_escape
    import textwrap

    import jinja2.constants
    import jinja2.debug
    import jinja2.loaders

    _ = tokenizer.apply_chat_template, encodings, textwrap, jinja2  # the first may import transformers
    if hasattr(tokenizer, "get_chat_template"):
        _compile()


def _compile() -> Any:
    """How transformers compiles a template; None if this version has no function for it."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None
    return _compile_jinja_template


def _bound_text(tokenizer: Any, options: Mapping[str, Any]) -> None:
    """Have the template put its text together piece by piece, with an eye on the size.

    Otherwise one operation does, which nothing breaks off, and a long piece that comes often takes no memory before it.
    The compiled template is the one that transformers keeps and is about to render. A tokenizer of a model's own may
    know no templates.
    """
    if not hasattr(tokenizer, "get_chat_template"):
        return
    if (compiled := _compile()) is None:
        return
    template = compiled(tokenizer.get_chat_template(options.get("chat_template"), options.get("tools")))
    template.environment.concat = _joined


def _joined(pieces: Iterable[str]) -> str:
    """The pieces in one, unless that gets too long."""
    taken, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise MemoryError(f"it makes more than {MAX_CHARACTERS} characters")
        taken.append(piece)
    return "".join(taken)


@lru_cache(maxsize=64)
def size_fault(template: str) -> str:
    """What in a template could fill the memory in one operation; empty if nothing was found."""
    from jinja2 import Environment, TemplateError

    try:
        tokens = [token for token in Environment().lex(template) if token[1] != "whitespace"]
    except TemplateError:
        return ""  # rendering it says what is wrong
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
