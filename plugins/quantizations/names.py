"""Matches linears with a checkpoint's lists of modules, of unquantised ones and of the targets of a group."""

from __future__ import annotations

import re
from collections.abc import Sequence

REGEX = "re:"
"""How compressed-tensors marks a pattern."""
PARTS = ("language_model", "text_model")
"""Names of the language model inside such a model; all of it may be inside a thinker."""
HEADS = ("lm_head", "embed_out")
"""Names of output heads, which no format quantises unless it says so."""


def is_named(name: str, modules: Sequence[str]) -> bool:
    """Whether a linear is one of these, or inside one: full names, their last parts, or patterns (re:..., with * too).

    name: of the linear, as `model.layers.0.self_attn.q_proj`.
    """
    return any(_is_one(alias, module) for alias in aliases(name) for module in modules)


def aliases(name: str) -> tuple[str, ...]:
    """Names of a linear in lists: its own, or its name inside a model that also has towers for images or sound."""
    body = name.removeprefix("model.")
    inside = [name, *(f"{part}.{name}" for part in PARTS)]
    inside += [f"model.{part}.{body}" for part in PARTS if body != name]
    return (*inside, *(f"thinker.{one}" for one in inside))


def _is_one(name: str, module: str) -> bool:
    if module.startswith(REGEX):
        return re.match(module.removeprefix(REGEX), name) is not None
    if "*" in module:
        pattern = re.escape(module).replace(r"\*", ".*")
        return re.fullmatch(rf"(.*\.)?{pattern}(\..*)?", name) is not None
    return f".{module}." in f".{name}."
