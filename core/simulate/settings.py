"""The keys of a simulation besides the keys of a benchmark: the dataclass of the root keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.bench.settings import BenchKeys
from hookline.core.util.ranges import bounded


@dataclass(frozen=True)
class SimulateKeys(BenchKeys):
    """Root keys of a simulation, beside the kinds."""

    cost: str | Mapping[str, Any] = "h200_qwen3_0_6b"
    """Cost model of a step: one of conf/cost_models, a .json file, or a mapping (docs/simulation.md)."""
    fit: str | None = None
    """In place of cost: folders of benchmarks with results.jsonl and records, separated by commas."""
    save: str | None = None
    """file.json that the cost model is written to."""
    host_s: float | None = None
    """Seconds that the host takes for a step; None: as the cost model says."""
    repeats: int = bounded(1, 1)
    """Repetitions; all give the same figures, except for prefixes that happen to be equal."""
