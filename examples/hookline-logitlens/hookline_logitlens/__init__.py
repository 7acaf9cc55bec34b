"""A logit lens: its settings, its arguments and its registration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from hookline.core.contracts import Needs, Registrar, bounded, hookimpl

API_VERSION = 2


@dataclass
class LensConfig:
    """What an engine's lens looks at: extensions.logitlens.layers=[8,16,24]."""

    layers: list[int] = field(default_factory=list)
    """The layers, counted from 0; empty: the one in the middle, and the last one."""
    most: int = bounded(5, 1, 100)
    """Most tokens that a request may ask for."""


@dataclass
class LensArguments:
    """What a request asks for: SamplingParams(extra_args={"logitlens": {"top": 3}})."""

    top: int = bounded(0, 0, 100)
    """How many of the likeliest tokens of each layer it is told; 0: it does not use the lens."""


@hookimpl
def register_extensions(register: Registrar) -> None:
    register(
        "logitlens",
        "hookline_logitlens.extension:LogitLens",
        config=LensConfig,
        arguments=LensArguments,
        help="top: the likeliest tokens after inner layers, with each token",
        needs=Needs(graph_safe=True),
    )
