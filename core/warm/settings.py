"""The root keys of `hookline warm`, besides those that describe an engine."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.config.settings import EngineKeys
from hookline.core.util.ranges import bounded


@dataclass(frozen=True)
class WarmKeys(EngineKeys):
    """Root keys of `hookline warm`."""

    card: str | None = None
    """What to compile for: a100, rtx3090, rtx4090, l4, l40s, h100, h200, b200 or rtx5090. None: the first GPU here."""
    processes: int | None = bounded(None, 1)
    """Compilers at work. None: one a core."""
    export: str | None = None
    """A folder for the kernels, which engine.kernel_cache=FOLDER then takes them from, at any path and read-only. If it
    has some, for another model or card, these are added. None: the compiler's own cache."""
