"""Shortest job first: its option, its presets and its registration. Imports no policy code."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hookline.core.contracts import Registrar, hookimpl
from hookline.core.errors import ConfigError

API_VERSION = 2


@dataclass
class ShortestJobFirstConfig:
    """Short jobs first; waiting makes a job count as shorter."""

    ageing_tokens_per_s: float = 1000.0
    """How much smaller a job counts for each second it waits, in tokens; above 0, so that nothing starves."""
    watermark: float = 0.01
    """Fraction of all KV blocks kept free when a request is admitted beside running ones; spares preemptions."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ageing_tokens_per_s) and self.ageing_tokens_per_s > 0):
            raise ConfigError(f"scheduler.ageing_tokens_per_s={self.ageing_tokens_per_s} must be finite and above 0")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"scheduler.watermark={self.watermark} must be at least 0 and below 1")


@hookimpl
def register_schedulers(register: Registrar) -> None:
    register(
        "sjf",
        "hookline_sjf.policy:ShortestJobFirst",
        config=ShortestJobFirstConfig,
        help="shortest job first, with ageing; prompts before decodes",
    )


@hookimpl
def config_packages() -> list[str]:
    return ["hookline_sjf.conf"]
