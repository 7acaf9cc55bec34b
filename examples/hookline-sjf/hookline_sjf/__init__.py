"""Shortest job first: its option, its presets and its registration. Imports no policy code."""

from __future__ import annotations

from dataclasses import dataclass

from hookline.core.contracts import Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class ShortestJobFirstConfig:
    """Short jobs first; waiting makes a job count as shorter."""

    ageing_tokens_per_s: float = bounded(1000.0, above=0)
    """How much smaller a job counts for each second it waits, in tokens; above 0, so that nothing starves."""
    watermark: float = bounded(0.01, 0, below=1)
    """Fraction of all KV blocks kept free when a request is admitted beside running ones; spares preemptions."""


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
