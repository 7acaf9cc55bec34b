"""The root keys of `hookline warm`, besides those that describe an engine."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.config.settings import EngineKeys
from hookline.core.util.ranges import bounded


@dataclass(frozen=True)
class WarmKeys(EngineKeys):
    """Root keys of `hookline warm`."""

    card: str | None = None
    """What to compile for: a100, h100, h200, l4 or l40s. None: the first GPU here."""
    processes: int | None = bounded(None, 1)
    """Compilers at work. None: one a core."""
