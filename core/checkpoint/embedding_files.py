"""How a checkpoint makes embeddings, read from the files of sentence-transformers: modules.json and its modules.

Without these files, an embedding is the last token's hidden state, scaled to length 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hookline.core.checkpoint.headless import is_classifier
from hookline.core.errors import shown
from hookline.core.pooling_params import CLASSIFY, EMBED, SCORE, PoolingDefaults

MODULES = "modules.json"
MODE = "pooling_mode"
_MAX_BYTES = 1 << 20


def pooling_defaults(folder: Path | None, config: Mapping[str, Any]) -> PoolingDefaults:
    """The pooling that a checkpoint's files state; if it is not supported, requests that need it are refused."""
    if folder is None or not (folder / MODULES).is_file():
        return PoolingDefaults(scored_by=CLASSIFY if is_classifier(config) else SCORE)
    scored_by = CLASSIFY if is_classifier(config) else EMBED
    try:
        mode, normalizes = _read(folder)
    except (OSError, ValueError, RecursionError) as error:
        refusal = f"{folder / MODULES} does not say how to pool: {error}; name a pooler"
        return PoolingDefaults(refusal=refusal, scored_by=scored_by)
    return PoolingDefaults(mode, normalizes, scored_by=scored_by)


def _read(folder: Path) -> tuple[str, bool]:
    """The mode, and whether vectors are scaled to length 1. Raises: ValueError for unknown modules or modes."""
    modules = _json(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ValueError("it is not a list of modules")
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules]
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others or kinds.count("Pooling") != 1:
        raise ValueError(f"its modules are {shown(kinds)}; Transformer, Pooling and Normalize can be computed")
    inside = PurePosixPath(str(modules[kinds.index("Pooling")].get("path", "")))
    if inside.is_absolute() or ".." in inside.parts:
        raise ValueError(f"its path {shown(str(inside))} leads out of the folder")
    return _mode(_json(folder / inside / "config.json")), "Normalize" in kinds


def _mode(config: Any) -> str:
    if not isinstance(config, dict):
        raise ValueError("the Pooling module's config.json is not an object")
    said = config.get(MODE)
    modes = [said] if isinstance(said, str) else list(said) if isinstance(said, list) else []
    modes += [key.removeprefix(f"{MODE}_") for key, value in config.items() if key.startswith(f"{MODE}_") and value]
    if len(modes) != 1 or not isinstance(modes[0], str):
        raise ValueError(f"its pooling mode is {shown(modes)}; one can be computed, not several")
    if config.get("include_prompt") is False:
        raise ValueError("it leaves the prompt out of the mean (include_prompt is false), which is not supported")
    return modes[0]


def _json(path: Path) -> Any:
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{shown(str(path))} is no file")
    with path.open("rb") as file:
        return json.loads(file.read(_MAX_BYTES))
