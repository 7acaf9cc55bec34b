"""Quotes command-line values that are text as it stands, before Hydra's grammar sees them.

Of twenty ordinary prompts twelve break that grammar ("Hello, world", "it's", "${HOME}"). Knows the keys, not their
meaning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

RAW_KEYS = ("prompt", "prompts_file", "output", "result", "records", "fit", "save")
"""Keys whose value is raw text, always: what follows the first = is taken as it is."""


def is_raw(argument: str) -> bool:
    """True if the argument sets a raw key."""
    key, equals, _ = argument.partition("=")
    return equals == "=" and key.lstrip("+") in RAW_KEYS


def quote_raw_values(arguments: Sequence[str]) -> list[str]:
    """The arguments with the values of raw keys quoted, so that Hydra gives back exactly what was typed."""
    return [_quoted(argument) if is_raw(argument) else argument for argument in arguments]


def _quoted(argument: str) -> str:
    key, _, value = argument.partition("=")
    # OmegaConf's escape first, since Hydra's own quotes are taken off before OmegaConf sees the text.
    plain = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    inside = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + (r"\'" if match[2] else ""), plain)
    return f"{key}='{inside}'"
