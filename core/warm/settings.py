"""What `core.warm` takes, beside what describes an engine: the dataclass of the root keys."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.run.settings import RunKeys
from hookline.core.util.ranges import bounded


@dataclass(frozen=True)
class WarmKeys(RunKeys):
    """Root keys, beside the kinds. Those of prompts and their sampling have no effect."""

    card: str | None = None
    """What to compile for: a100, h100, h200, l4 or l40s. None: the first GPU here."""
    processes: int | None = bounded(None, 1)
    """Compilers at work. None: one a core."""
