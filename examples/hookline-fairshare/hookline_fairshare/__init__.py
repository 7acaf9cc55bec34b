"""Deficit round robin over tenants: its options and its registration. Imports no policy code."""

from __future__ import annotations

from dataclasses import dataclass, field

from hookline.core.contracts import Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class DeficitRoundRobinConfig:
    """Each tenant gets so many tokens a round, times its weight."""

    key: str = "tenant"
    """The tag whose values share the machine; requests without it are one tenant together."""
    weights: dict[str, float] = field(default_factory=dict)
    """What a tenant gets more than others, e.g. {acme: 3}; 1 for those not named."""
    quantum: int = bounded(256, 1)
    """Tokens, of prompts and of answers, that a tenant of weight 1 gets a round."""
    watermark: float = bounded(0.01, 0, below=1)
    """Fraction of all KV blocks kept free when a request is admitted beside running ones; spares preemptions."""


@hookimpl
def register_schedulers(register: Registrar) -> None:
    register(
        "deficit_round_robin",
        "hookline_fairshare.policy:DeficitRoundRobin",
        config=DeficitRoundRobinConfig,
        help="tenants, by a tag of their requests, take turns; each gets so many tokens a round",
    )
