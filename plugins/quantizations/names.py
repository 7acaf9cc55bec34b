"""Which linears a checkpoint's lists of modules name: those that it leaves unquantised, and those of a group."""

from __future__ import annotations

import re
from collections.abc import Sequence

REGEX = "re:"
"""How compressed-tensors marks a pattern."""
HEADS = ("lm_head", "embed_out")
"""Names of output heads, which no format quantises unless it says so."""


def is_named(name: str, modules: Sequence[str]) -> bool:
    """Whether a linear is one of these, or inside one: full names, their last parts, or patterns (re:..., with * too).

    name: of the linear, as `model.layers.0.self_attn.q_proj`.
    """
    return any(_is_one(name, module) for module in modules)


def _is_one(name: str, module: str) -> bool:
    if module.startswith(REGEX):
        return re.match(module.removeprefix(REGEX), name) is not None
    if "*" in module:
        pattern = re.escape(module).replace(r"\*", ".*")
        return re.fullmatch(rf"(.*\.)?{pattern}(\..*)?", name) is not None
    return f".{module}." in f".{name}."
